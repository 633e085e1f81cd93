// Operands of the optimizer's operations on a GPU: hard numbers, runs of all kinds, and comparison
// with the CPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "moiety/formats/bf16.h"
#include "moiety/optim/buffer_layout.h"
#include "tests/support/bits.h"
#include "tests/support/mirror.h"

namespace moiety::optim {

inline uint32_t random_word(uint64_t i, uint64_t what) {
  uint64_t x = (i << 8 | what) * 0x9E3779B97F4A7C15ull;  // splitmix64
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>((x ^ x >> 31) >> 16);
}

// Zeros of both signs, subnormals, huge values, and ordinary ones of all exponents.
inline float hard_value(uint64_t i, uint64_t what) {
  const uint32_t w = random_word(i, what), rest = w & 0x807FFFFFu;
  switch (w >> 23 & 7) {
    case 0:
      return std::bit_cast<float>(w & 0x80000000u);
    case 1:
      return std::bit_cast<float>(rest);
    case 2:
      return std::bit_cast<float>(rest | 0x7E800000u);
    case 3:
      return std::bit_cast<float>(w & 0xBFFFFFFFu);
    default:
      return std::bit_cast<float>(rest | (118 + (w >> 26 & 15)) << 23);
  }
}

inline void store(const TensorView& x, int64_t i, float value) {
  if (x.dtype() == DType::kFloat32) {
    x.data<float>()[i] = value;
  } else {
    x.data<bf16>()[i] = bf16(value);
  }
}

inline Tensor hard_tensor(DType dtype, int64_t n, uint64_t what) {
  Tensor out(dtype, {n});
  for (int64_t i = 0; i < n; ++i) store(out, i, hard_value(i, what));
  return out;
}

// Ascending runs with gaps, of all classes, with and without decay, short and long, beginning
// anywhere in segment and tensor; some hold a cut of columns.
inline std::vector<ElementRun> mixed_runs(int64_t n, uint64_t what = 0) {
  std::vector<ElementRun> out;
  int64_t at = 0;
  for (int p = 0; at < n; ++p) {
    const uint32_t w = random_word(static_cast<uint64_t>(p), 100 + what);
    const int64_t length = p % 5 == 4 ? 9000 + w % 9000 : 1 + w % 900;
    ElementRun run{.begin = at,
                   .end = std::min(n, at + length),
                   .parameter = 10000 - p,
                   .logical = p % 7 == 6 ? (int64_t{1} << 34) + w % 4 : int64_t{w % 4096},
                   .tensor_id = random_word(w, 1),
                   .decay = p % 2 == 0,
                   .kind = static_cast<ParameterClass>(w >> 4 & 3)};
    if (p % 3 == 1) run.columns = {.first = 8, .count = 24, .all = 100};
    if (p % 3 == 2) run.columns = {.first = 3, .count = 7, .all = 11};
    out.push_back(run);
    at = run.end + (w >> 8) % 3 * 61;
  }
  return out;
}

// Bits are equal, or both are NaN, which differ in their payload between devices.
template <class T>
bool same_number(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(double(a)) && std::isnan(double(b)));
}

template <class T>
std::string difference(const char* what, std::span<const T> got, std::span<const T> want) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (same_number(got[i], want[i])) continue;
    return text("{}: element {} of {} is {}, expected {}", what, i, want.size(), double(got[i]),
                double(want[i]));
  }
  return {};
}

// Empty if what the mirror holds of `host` has its numbers.
inline std::string difference(const Mirror& mirror, const char* what, const TensorView& host) {
  const Tensor got = mirror.back(host);
  const auto n = static_cast<size_t>(host.numel());
  const auto compare = [&]<class T>(T) {
    return difference<T>(what, {got.data<T>(), n}, {host.data<T>(), n});
  };
  if (host.dtype() == DType::kFloat64) return compare(double());
  return host.dtype() == DType::kFloat32 ? compare(float()) : compare(bf16());
}

}  // namespace moiety::optim
