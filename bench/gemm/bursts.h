// Times of calls on a GPU in short bursts from rest, when the chip's clock is high, and in a burst of
// a second, when its power decides; and what the chip does at most.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "bench/gemm/sensors.h"
#include "bench/harness.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/gemm/gemm.h"

namespace moiety::bench {

inline constexpr Device kGpu{DeviceType::kCuda, 0};
inline constexpr DType kHalf = DType::kBFloat16;

// Random numbers of this spread where the stream runs, the same 4 Mi of them again and again.
inline Tensor random_on_gpu(DType dtype, std::initializer_list<int64_t> sizes, const Stream& stream,
                            float spread = 1) {
  constexpr int64_t kPeriod = int64_t{4} << 20;
  Tensor out(dtype, sizes, stream.device());
  const int64_t n = out.view().numel();
  const Tensor period = random_tensor(dtype, {std::min(n, kPeriod)}, 1);
  for (int64_t i = 0; spread != 1 && i < period.view().numel(); ++i) {
    if (dtype == kHalf) {
      period.data<bf16>()[i] = bf16(spread * float(period.data<bf16>()[i]));
    } else {
      period.data<float>()[i] *= spread;
    }
  }
  const TensorView all(out.view().raw(), dtype, {n}, stream.device());
  for (int64_t i = 0; i < n; i += kPeriod) {
    const int64_t size = std::min(kPeriod, n - i);
    copy(all.slice(0, i, i + size), period.view().slice(0, 0, size), stream);
  }
  stream.synchronize();
  return out;
}

struct Burst {
  Timing from_rest;           // 0.5 s of rest, 5 runs, 20 timed ones
  double steady_ms{};         // of a run in a burst of a second
  Sensors::Reading at_end{};  // of that burst
};
template <class Run>
Burst bursts(Run&& run, bool steady, const Stream& stream) {
  constexpr int kWarm = 5, kTimed = 20;
  std::vector<Event> marks;
  for (int i = 0; i <= kTimed; ++i) marks.push_back(Event::timed());
  stream.synchronize();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  for (int i = 0; i < kWarm; ++i) run();
  for (int i = 0; i < kTimed; ++i) {
    marks[i].record(stream);
    run();
  }
  marks[kTimed].record(stream);
  stream.synchronize();
  std::vector<double> times;
  for (int i = 0; i < kTimed; ++i) times.push_back(elapsed_ms(marks[i], marks[i + 1]));
  Burst out{timing(std::move(times))};
  if (!steady) return out;
  const int n = std::max(static_cast<int>(1000 / out.from_rest.ms), 1);
  marks[0].record(stream);
  for (int i = 0; i < n; ++i) run();
  marks[1].record(stream);
  static const Sensors sensors;
  for (Sensors::Reading now = sensors.read(); !marks[1].complete(); now = sensors.read()) {
    out.at_end = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  stream.synchronize();
  out.steady_ms = elapsed_ms(marks[0], marks[1]) / n;
  return out;
}

// The time in which the host enqueues a call, while the GPU has room for all of them.
template <class Run>
Timing host_time(Run&& run, int calls, const Stream& stream) {
  constexpr int kTimed = 20;
  std::vector<double> times;
  for (int i = 0; i <= kTimed; ++i) {
    stream.synchronize();
    const double ms = milliseconds([&] {
      for (int j = 0; j < calls; ++j) run();
    });
    if (i > 0) times.push_back(ms / calls);
  }
  stream.synchronize();
  return timing(std::move(times));
}

inline std::string power_of(const Burst& burst) {
  return text(R"(, "mhz": {:.0f}, "watts": {:.0f})", burst.at_end.mhz, burst.at_end.watts);
}

struct Rates {
  double from_rest = 0, steady = 0;  // TFLOP/s
};

inline Rates dense_rates(bool steady, const Stream& stream) {
  constexpr int64_t kSize = 8192;
  const Tensor a = random_on_gpu(kHalf, {kSize, kSize}, stream),
               b = random_on_gpu(kHalf, {kSize, kSize}, stream), c(kHalf, {kSize, kSize}, kGpu);
  const Burst burst =
      bursts([&] { gemm::gemm({.op = gemm::GemmOp::kTN, .a = a, .b = b, .out = c}, stream); },
             steady, stream);
  const double flop = 2.0 * kSize * kSize * kSize;
  const Rates rates{tera(flop, burst.from_rest.ms), steady ? tera(flop, burst.steady_ms) : 0};
  Row row{"gemm.tn", "8192x8192x8192", rates.from_rest, "TFLOP/s", burst.from_rest};
  row.device = kGpu;
  if (steady) row.more = text(R"("steady": {:.1f}{})", rates.steady, power_of(burst));
  print(row);
  return rates;
}

// Bytes read and written in a copy of 1 GiB, in TB/s.
inline double copy_rate(const Stream& stream) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  const Tensor from(DType::kUInt8, {kBytes}, kGpu), to(DType::kUInt8, {kBytes}, kGpu);
  const Burst burst = bursts([&] { copy(to, from, stream); }, false, stream);
  return 2.0 * double(kBytes) / burst.from_rest.ms * 1e-9;
}

// A row's fields of the burst of a second.
inline std::string steady_fields(const Burst& burst, double flop, const Rates& dense) {
  const double rate = tera(flop, burst.steady_ms);
  return text(R"(, "steady": {:.1f}, "steady_share": {:.3f}{})", rate, rate / dense.steady,
              power_of(burst));
}

}  // namespace moiety::bench
