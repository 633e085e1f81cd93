// Timing and rows (design.md, Measuring) for the benchmarks of gemm.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"

namespace moiety::bench {

inline constexpr int64_t kRotatedBytes = int64_t{128} << 20;  // operands of a case, past the caches
inline constexpr int64_t kMaxCopies = 8;

inline int64_t copies(int64_t operand_bytes) {
  return std::clamp<int64_t>(kRotatedBytes / std::max<int64_t>(operand_bytes, 1) + 1, 2,
                             kMaxCopies);
}

// Numbers of mean 0 and variance 1, nearly normal and quick to make.
inline Tensor random_tensor(DType dtype, std::initializer_list<int64_t> sizes, uint32_t id) {
  Tensor out(dtype, sizes);
  const PhiloxKey key = rng_key(5, RngDomain::kInit);
  for (int64_t i = 0; i < out.view().numel(); ++i) {
    // The sum of 16 bytes, scaled.
    const PhiloxBlock block = philox(key, {static_cast<uint32_t>(i), id, 0, 0});
    int sum = -16 * 255 / 2;
    for (uint32_t word : block) {
      for (int shift = 0; shift < 32; shift += 8) sum += (word >> shift) & 255;
    }
    const float x = static_cast<float>(sum) / 296.0f;
    if (dtype == DType::kBFloat16) {
      out.data<bf16>()[i] = bf16(x);
    } else {
      out.data<float>()[i] = x;
    }
  }
  return out;
}

// Milliseconds of run(i), the median of calls i = 0, 1, ... over at least `seconds`. Calls that are
// too short for the clock are timed in batches.
template <class Run>
double median_ms(Run&& run, double seconds = 0.3) {
  using Clock = std::chrono::steady_clock;
  const auto elapsed = [](Clock::time_point since) {
    return std::chrono::duration<double>(Clock::now() - since).count();
  };
  int64_t i = 0;
  const Clock::time_point warm_up = Clock::now();
  run(i++);
  const int64_t batch =
      std::max<int64_t>(1, static_cast<int64_t>(5e-5 / std::max(elapsed(warm_up), 1e-9)));
  std::vector<double> times;
  const Clock::time_point start = Clock::now();
  while (times.size() < 5 || elapsed(start) < seconds) {
    const Clock::time_point begin = Clock::now();
    for (int64_t n = 0; n < batch; ++n) run(i++);
    times.push_back(elapsed(begin) * 1e3 / static_cast<double>(batch));
  }
  std::nth_element(times.begin(), times.begin() + std::ssize(times) / 2, times.end());
  return times[times.size() / 2];
}

// `more`: further members, each as "\"key\": value".
inline void print_row(const std::string& name, const std::string& label, double flop, double ms,
                      const std::string& more = {}) {
  std::printf(
      "{\"name\": \"%s\", \"case\": \"%s\", \"device\": \"cpu\", \"value\": %.4f, "
      "\"unit\": \"TFLOP/s\", \"ms\": %.4f%s%s}\n",
      name.c_str(), label.c_str(), flop / ms / 1e9, ms, more.empty() ? "" : ", ", more.c_str());
  std::fflush(stdout);
}

}  // namespace moiety::bench
