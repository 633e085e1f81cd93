// The experts of known models, by name, random routing to them, and the way in which what they do on
// a GPU is timed: beside one dense product, in short bursts from rest.
#pragma once

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "bench/harness.h"
#include "moiety/base/copy.h"
#include "moiety/gemm/gemm.h"
#include "moiety/gemm/grouped_tensor.h"

namespace moiety::bench {

struct ExpertShape {
  const char* name;
  int64_t tokens, model, ffn, experts, topk;
  int64_t rows() const { return tokens * topk; }
};
inline constexpr ExpertShape kExpertShapes[] = {
    {"q128", 8192, 2048, 768, 128, 8},    {"q16", 8192, 2048, 768, 16, 8},
    {"mixtral", 8192, 4096, 14336, 8, 2}, {"dsv3", 4096, 7168, 2048, 32, 8},
    {"gptoss", 8192, 2880, 2880, 32, 4},  {"s30b", 32768, 4096, 1024, 64, 4},
    {"s7b", 24576, 1536, 256, 128, 8},    {"s120b", 32768, 4096, 2048, 64, 4},
};
inline std::vector<std::string> expert_shape_names() {
  std::vector<std::string> names;
  for (const ExpertShape& s : kExpertShapes) names.push_back(s.name);
  return names;
}

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

// The rows of each expert, tight and in the order of their tokens.
struct Choices {
  std::vector<int64_t> begin{0};
  std::vector<int32_t> source;  // the token of a row
};

// Every token chooses `topk` experts at random.
inline Choices choose(const ExpertShape& s) {
  std::vector<std::vector<int32_t>> tokens(s.experts);
  std::vector<int32_t> experts(s.experts);
  std::iota(experts.begin(), experts.end(), 0);
  const PhiloxKey key = rng_key(9, RngDomain::kInit);
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t k = 0; k < s.topk; ++k) {
      const uint32_t word = philox(key, {uint32_t(t), uint32_t(k), 0, 0})[0];
      std::swap(experts[k], experts[k + word % (s.experts - k)]);
      tokens[experts[k]].push_back(static_cast<int32_t>(t));
    }
  }
  Choices out;
  for (const auto& rows : tokens) {
    out.source.insert(out.source.end(), rows.begin(), rows.end());
    out.begin.push_back(static_cast<int64_t>(out.source.size()));
  }
  return out;
}

// The same in the memory of the stream's GPU.
struct Routing {
  Routing(const ExpertShape& s, const Stream& stream)
      : begin_E1(DType::kInt64, {s.experts + 1}, stream.device()),
        source_R(DType::kInt32, {s.rows()}, stream.device()) {
    Choices c = choose(s);
    groups.begin_E1 = begin_E1;
    groups.experts = s.experts;
    groups.capacity = s.rows();
    copy(begin_E1, TensorView(c.begin.data(), DType::kInt64, {s.experts + 1}), stream);
    copy(source_R, TensorView(c.source.data(), DType::kInt32, {s.rows()}), stream);
    stream.synchronize();
  }

  Tensor begin_E1, source_R;
  gemm::Groups groups;
};

struct Burst {
  Timing from_rest;    // 0.5 s of rest, 5 runs, 20 timed ones
  double steady_ms{};  // of a run in a burst of a second
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
  stream.synchronize();
  out.steady_ms = elapsed_ms(marks[0], marks[1]) / n;
  return out;
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
  if (steady) row.more = text(R"("steady": {:.1f})", rates.steady);
  print(row);
  return rates;
}

}  // namespace moiety::bench
