// AdamW on a GPU has the bits of the CPU.
#include "moiety/optim/adamw.h"

#include <array>
#include <deque>

#include "moiety/base/copy.h"
#include "moiety/base/graph.h"
#include "moiety/optim/stand.h"
#include "moiety/optim/step_decision.h"
#include "tests/optim_gpu/cases.h"
#include "tests/support/gpu_test.h"

namespace moiety::optim {
namespace {

constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16;
const AdamW kAdam{};

// A segment whose tensors begin `offset` elements behind an aligned address.
struct Segment {
  Segment(int64_t n, DType grads, DType moments, std::optional<DType> weights, int64_t offset,
          uint64_t what)
      : offset(offset),
        grad(hard_tensor(grads, n + offset, what + 1)),
        master(hard_tensor(kF32, n + offset, what + 2)),
        exp_avg(hard_tensor(moments, n + offset, what + 3)),
        exp_avg_sq(hard_tensor(moments, n + offset, what + 4)) {
    if (weights) weight = Tensor(*weights, {n + offset});
    for (int64_t i = 0; i < n + offset; ++i) {
      store(exp_avg_sq, i, std::fabs(hard_value(static_cast<uint64_t>(i), what + 4)));
    }
  }
  int64_t offset;
  Tensor grad, master, exp_avg, exp_avg_sq, weight;
  std::vector<ElementRun> runs;

  std::vector<TensorView> tensors() const { return {grad, master, exp_avg, exp_avg_sq, weight}; }
  // The arguments, with the copies of the tensors that `at(tensor)` gives.
  template <class At>
  AdamWArgs args(At&& at) const {
    const auto part = [&](const TensorView& x) {
      const TensorView there = at(x);
      return there.defined() ? there.slice(0, offset, there.size(0)) : there;
    };
    return {part(grad), part(master), part(exp_avg), part(exp_avg_sq), part(weight), runs};
  }
};

class AdamWGpu : public GpuTest {
 protected:
  // Both devices' segments, before and behind any number of steps.
  struct Twin {
    Twin(const std::deque<Segment>& segments, const Stream& stream) : segments(segments) {
      std::vector<AdamWArgs> host, gpu;
      for (const Segment& s : segments) {
        mirrors.emplace_back(
            std::initializer_list<TensorView>{s.grad, s.master, s.exp_avg, s.exp_avg_sq, s.weight},
            stream);
        host.push_back(s.args([](const TensorView& x) { return x; }));
        gpu.push_back(s.args(mirrors.back()));
      }
      on_host = AdamWTable(host, Device{});
      on_gpu = AdamWTable(gpu, stream.device());
    }
    void expect_equal() const {
      static constexpr std::array kNames{"grad", "master", "exp_avg", "exp_avg_sq", "weight"};
      for (size_t i = 0; i < segments.size(); ++i) {
        const auto tensors = segments[i].tensors();
        for (size_t t = 0; t < tensors.size(); ++t) {
          if (!tensors[t].defined()) continue;
          ASSERT_EQ(difference(mirrors[i], kNames[t], tensors[t]), "") << "segment " << i;
        }
      }
    }
    const std::deque<Segment>& segments;
    std::deque<Mirror> mirrors;
    AdamWTable on_host, on_gpu;
  };

  // The same step on both.
  void step(const Twin& twin, AdamWStep values, uint64_t seed = 7) {
    const TensorView host = byte_view(values);
    const Mirror m({host}, stream);
    adamw(kAdam, seed, host, twin.on_host, Stream());
    adamw(kAdam, seed, m(host), twin.on_gpu, stream);
    stream.synchronize();
  }
};

constexpr AdamWStep kStep{.s = 0.37f, .k1 = 3.5f, .k2 = 7.25f, .lr = 1e-3f, .wd = 0.1f, .t = 5};

TEST_F(AdamWGpu, HasTheBitsOfTheCpu) {
  for (const DType grads : {kF32, kBf16}) {
    for (const DType moments : {kF32, kBf16}) {
      for (const auto weights :
           {std::optional<DType>(), std::optional(kF32), std::optional(kBf16)}) {
        for (const int64_t offset : {0, 1}) {
          SCOPED_TRACE(text("grads {} moments {} weights {} offset {}", name(grads), name(moments),
                            weights ? name(*weights) : "none", offset));
          std::deque<Segment> segments;
          for (const int64_t n : {0, 1, 127, 1024, 4095, 4096, 4097, 60001}) {
            const auto what = static_cast<uint64_t>(5 * std::ssize(segments));
            segments.emplace_back(n, grads, moments, weights, offset, what);
            segments.back().runs = mixed_runs(n, what);
            segments.emplace_back(n, grads, moments, weights, offset, what);
            segments.back().runs = {{.begin = 0, .end = n, .logical = 4, .tensor_id = 9}};
          }
          const Twin twin(segments, stream);
          for (uint32_t t = 1; t <= 3; ++t) {
            AdamWStep values = kStep;
            values.t = t;
            step(twin, values);
          }
          twin.expect_equal();
        }
      }
    }
  }
}

TEST_F(AdamWGpu, TakesManySmallSegments) {
  std::deque<Segment> segments;
  for (uint64_t i = 0; i < 400; ++i) {
    segments.emplace_back(random_word(i, 77) % 900, kF32, kBf16, kBf16, 0, i % 50);
    segments.back().runs = mixed_runs(segments.back().master.view().numel(), i);
  }
  const Twin twin(segments, stream);
  step(twin, kStep);
  twin.expect_equal();
}

TEST_F(AdamWGpu, TakesLargeSegments) {
  for (const DType moments : {kF32, kBf16}) {
    std::deque<Segment> segments;
    segments.emplace_back((int64_t{16} << 20) + 3, kF32, moments, kBf16, 0, 0);
    segments.back().runs = {{.begin = 1, .end = (int64_t{16} << 20) + 2, .logical = 1}};
    const Twin twin(segments, stream);
    step(twin, kStep);
    twin.expect_equal();
  }
}

TEST_F(AdamWGpu, ASkippedStepChangesNothing) {
  std::deque<Segment> segments;
  segments.emplace_back(5000, kF32, kF32, kBf16, 0, 0);
  segments.back().runs = mixed_runs(5000);
  const Twin twin(segments, stream);
  AdamWStep values = kStep;
  values.skip = 1;
  const TensorView host = byte_view(values);
  const Mirror m({host}, stream);
  adamw(kAdam, 7, m(host), twin.on_gpu, stream);
  stream.synchronize();
  twin.expect_equal();
}

// A wait for a peer that has failed, of a communicator or of the exchange of experts.
TEST_F(AdamWGpu, AFaultOfAnyWaitSkipsTheStep) {
  const Tensor words(DType::kUInt64, {3}, kGpu), addresses(DType::kUInt64, {2}, kGpu),
      skip(DType::kInt32, {1}, kGpu);
  uint64_t* const at = words.view().data<uint64_t>();
  std::array<uint64_t, 2> two{reinterpret_cast<uint64_t>(at), reinterpret_cast<uint64_t>(at + 2)};
  copy(addresses, TensorView(two.data(), DType::kUInt64, {2}), stream);
  const auto skips = [&](std::array<uint64_t, 3> values) {
    copy(words, TensorView(values.data(), DType::kUInt64, {3}), stream);
    skip_on_fault_cuda(addresses, skip.view().data<int32_t>(), stream);
    return *to_host(skip, stream).data<int32_t>() != 0;
  };
  EXPECT_FALSE(skips({0, 1, 0}));
  EXPECT_TRUE(skips({0, 0, 2}));
  EXPECT_TRUE(skips({0, 0, 0}));  // the flag stays
}

// The step is read when a graph runs, not when it is captured.
TEST_F(AdamWGpu, AGraphReadsTheStepOfTheDay) {
  std::deque<Segment> segments;
  segments.emplace_back(70001, kF32, kBf16, kBf16, 0, 0);
  segments.back().runs = mixed_runs(70001);
  const Twin twin(segments, stream);
  AdamWStep values = kStep;
  const TensorView host = byte_view(values);
  const Mirror m({host}, stream);
  const Graph graph(stream, [&] { adamw(kAdam, 7, m(host), twin.on_gpu, stream); });
  EXPECT_EQ(graph.nodes(), 1);
  for (uint32_t t = 1; t <= 4; ++t) {
    values.t = t;
    values.s = 1.0f / float(t);
    values.skip = t == 3;
    copy(m(host), host, stream);
    graph.launch(stream);
    adamw(kAdam, 7, host, twin.on_host, Stream());
    stream.synchronize();
  }
  twin.expect_equal();
}

// The golden of docs/spec/optimizer.md#adamw.
TEST_F(AdamWGpu, Golden) {
  std::deque<Segment> segments;
  segments.emplace_back(1, kF32, kF32, kBf16, 0, 0);
  Segment& x = segments.back();
  x.runs = {{.begin = 0, .end = 1}};
  *x.master.data<float>() = 1;
  *x.exp_avg.data<float>() = *x.exp_avg_sq.data<float>() = 0;
  const Twin twin(segments, stream);
  const Mirror& m = twin.mirrors[0];
  StepState state;
  struct Expected {
    float sum;
    uint32_t m, v, p;
  };
  for (const Expected& e : {Expected{0.75f, 0x3CCCCCCD, 0x3B4CCCCD, 0x3F7FB7E9},
                            Expected{-3.0f, 0xBD9EB852, 0x3D58F5C3, 0x3F7FD5A2}}) {
    const StepDecision d = decide({}, 0, {.sumsq = 1, .tokens = 3}, state);
    AdamWStep values{.s = d.s, .k1 = d.k1, .k2 = d.k2, .lr = 1e-3f, .wd = 0.1f};
    *x.grad.data<float>() = e.sum;
    copy(m(x.grad), x.grad, stream);
    const Mirror there({byte_view(values)}, stream);
    adamw(kAdam, 0, there(byte_view(values)), twin.on_gpu, stream);
    const auto bits = [&](const Tensor& t) {
      return std::bit_cast<uint32_t>(*m.back(t).data<float>());
    };
    EXPECT_EQ(bits(x.exp_avg), e.m);
    EXPECT_EQ(bits(x.exp_avg_sq), e.v);
    EXPECT_EQ(bits(x.master), e.p);
    EXPECT_EQ(m.back(x.weight).data<bf16>()->bits, bf16::encode(std::bit_cast<float>(e.p)));
  }
}

TEST_F(AdamWGpu, RefusesAnotherDevice) {
  std::deque<Segment> segments;
  segments.emplace_back(8, kF32, kF32, kBf16, 0, 0);
  segments.back().runs = {{.begin = 0, .end = 8}};
  const Twin twin(segments, stream);
  AdamWStep values;
  EXPECT_THROW(adamw(kAdam, 0, byte_view(values), twin.on_gpu, stream), Error);
  EXPECT_THROW(adamw(kAdam, 0, byte_view(values), twin.on_host, stream), Error);
  EXPECT_THROW(adamw(kAdam, 0, byte_view(values), twin.on_gpu, Stream()), Error);
}

}  // namespace
}  // namespace moiety::optim
