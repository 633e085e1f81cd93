#include "moiety/base/crc32c.h"

#include <array>
#include <cstring>

namespace moiety {
namespace {

// Slicing by 8: table[k][b] is the remainder of byte b followed by k zero bytes.
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t c = b;
    for (int i = 0; i < 8; ++i) c = (c >> 1) ^ (c & 1 ? 0x82F63B78u : 0);
    t[0][b] = c;
  }
  for (uint32_t b = 0; b < 256; ++b) {
    for (int k = 1; k < 8; ++k) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 255];
  }
  return t;
}
constexpr auto kTables = make_tables();

uint32_t update_portable(uint32_t crc, const unsigned char* p, size_t n) {
  while (n >= 8) {
    uint64_t w;
    std::memcpy(&w, p, 8);
    w ^= crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= kTables[7 - k][(w >> (8 * k)) & 255];
    p += 8;
    n -= 8;
  }
  while (n--) crc = (crc >> 8) ^ kTables[0][(crc ^ *p++) & 255];
  return crc;
}

constexpr uint32_t kOne = 0x80000000u;  // polynomials are reflected: x^0 is the highest bit

// a * b modulo the polynomial.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ (b & 1 ? 0x82F63B78u : 0);
  }
  return product;
}

// The factor by which `bytes` zero bytes behind a message multiply its remainder: x^(8 * bytes).
constexpr uint32_t zero_bytes(uint64_t bytes) {
  uint32_t power = kOne >> 8, product = kOne;
  for (; bytes != 0; bytes >>= 1) {
    if (bytes & 1) product = multiply(power, product);
    power = multiply(power, power);
  }
  return product;
}

#if defined(__x86_64__)
// The instruction takes three cycles but starts in each, so long inputs go as three chains.
constexpr size_t kChain = 16384;

__attribute__((target("sse4.2"))) uint32_t update_sse42(uint32_t crc, const unsigned char* p,
                                                        size_t n) {
  const auto word = [](const unsigned char* at) {
    uint64_t w;
    std::memcpy(&w, at, 8);
    return w;
  };
  while (n >= 3 * kChain) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kChain; i += 8) {
      a = __builtin_ia32_crc32di(a, word(p + i));
      b = __builtin_ia32_crc32di(b, word(p + i + kChain));
      c = __builtin_ia32_crc32di(c, word(p + i + 2 * kChain));
    }
    constexpr uint32_t kShift = zero_bytes(kChain);
    const uint32_t ab = multiply(kShift, static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
    crc = multiply(kShift, ab) ^ static_cast<uint32_t>(c);
    p += 3 * kChain;
    n -= 3 * kChain;
  }
  uint64_t rest = crc;
  for (; n >= 8; p += 8, n -= 8) rest = __builtin_ia32_crc32di(rest, word(p));
  uint32_t out = static_cast<uint32_t>(rest);
  while (n--) out = __builtin_ia32_crc32qi(out, *p++);
  return out;
}
#endif

}  // namespace

uint32_t crc32c_combine(uint32_t a, uint32_t b, uint64_t b_bytes) {
  return multiply(zero_bytes(b_bytes), a) ^ b;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t previous) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t crc = ~previous;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~update_sse42(crc, p, bytes);
#endif
  return ~update_portable(crc, p, bytes);
}

}  // namespace moiety
