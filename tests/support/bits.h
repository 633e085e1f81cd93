// Values compared as bits: signs of zeros and payloads of NaN count.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/base/format.h"
#include "moiety/base/tensor_view.h"

namespace moiety {

inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

inline bool same_bits(float a, float b) { return bits_of(a) == bits_of(b); }

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Compares tensors on the host, without gaps. An absent tensor equals only an absent one.
inline bool same_bits(const TensorView& a, const TensorView& b) {
  return a.defined() == b.defined() && a.bytes() == b.bytes() &&
         (a.bytes() == 0 || std::memcmp(a.raw(), b.raw(), static_cast<size_t>(a.bytes())) == 0);
}

// Empty, or the first element (of packed ones: the first byte) that does not have the same bits.
inline std::string difference(std::string_view what, const TensorView& got,
                              const TensorView& want) {
  if (same_bits(got, want)) return "";
  if (got.defined() != want.defined() || got.bytes() != want.bytes()) {
    return text("{} is {}, expected {}; ", what, got.describe(), want.describe());
  }
  const int64_t each = byte_size(want.dtype(), 1);
  const auto *a = static_cast<const std::byte*>(got.raw()),
             *b = static_cast<const std::byte*>(want.raw());
  int64_t i = 0;
  while (std::memcmp(a + i, b + i, static_cast<size_t>(each)) == 0) i += each;
  const auto hex = [&](const std::byte* x) {
    std::string out;
    for (int64_t k = i + each - 1; k >= i; --k) out += text("{:02x}", static_cast<int>(x[k]));
    return out;
  };
  return text("{}: element {} of {} is {}, expected {}; ", what, i / each, want.describe(), hex(a),
              hex(b));
}

inline std::vector<uint32_t> bits_of(const TensorView& float32) {
  const auto* bits = static_cast<const uint32_t*>(float32.raw());
  return {bits, bits + float32.numel()};
}

// The bytes of a tensor on the host, without gaps; "" if it is absent.
inline std::string bytes_of(const TensorView& x) {
  return x.defined() ? std::string(static_cast<const char*>(x.raw()), x.bytes()) : "";
}

// An object's memory as the tensor of bytes that operations take structs in.
template <class T>
TensorView byte_view(T& x) {
  return {&x, DType::kUInt8, {sizeof(T)}};
}

}  // namespace moiety
