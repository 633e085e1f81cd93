// The counts and sums of a pass on a GPU have the bits of the CPU.
#include "moiety/model/routing_sums.h"

#include "moiety/base/graph.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"
#include "tests/support/tensors.h"

namespace moiety::model {
namespace {

class RoutingSumsGpu : public GpuTest {};

Tensor integers(std::vector<int64_t> sizes, unsigned seed) {
  std::mt19937 engine(seed);
  Tensor out(DType::kInt64, sizes);
  for (int64_t i = 0; i < out.view().numel(); ++i) out.data<int64_t>()[i] = engine() % 1000;
  return out;
}

std::string sums_of(const StepSums& sums, const Stream& stream) {
  return bytes_of(to_host(sums.memory(), stream));
}

TEST_F(RoutingSumsGpu, HaveTheBitsOfTheCpu) {
  for (const int64_t tokens : {0, 1, 1023, 5000}) {
    SCOPED_TRACE(text("{} tokens", tokens));
    const int64_t layers = 3, segments = 4, experts = 300;
    const Tensor loss = normal_tensor(DType::kFloat32, {tokens}, 1);
    const Tensor target(DType::kInt32, {tokens}), mask(DType::kUInt8, {tokens});
    for (int64_t t = 0; t < tokens; ++t) {
      target.data<int32_t>()[t] = t % 3 == 0 ? -100 : 7;
      mask.data<uint8_t>()[t] = t % 5 != 0;
    }
    const Tensor count = integers({layers, segments, experts + 1}, 2);
    const Tensor info = integers({layers, 16}, 3);
    const Tensor sum = normal_tensor(DType::kFloat64, {layers, segments, experts + 1}, 4);
    const Tensor two = normal_tensor(DType::kFloat64, {2}, 5);
    const Tensor own(DType::kInt64, {2}), scope(DType::kInt64, {2});
    const Tensor pooled_count(DType::kInt64, {segments, experts + 1});
    const Tensor pooled_sum(DType::kFloat64, {segments, experts + 1});
    const Mirror m(
        {loss, target, mask, count, info, sum, two, own, scope, pooled_count, pooled_sum}, stream);
    const StepSums here(layers, experts), there(layers, experts, kGpu);
    const auto pass = [&](const auto& at, const StepSums& sums, const Stream& s) {
      for (const bool in_scope : {false, true}) {
        count_targets({at(target), at(mask), at(own), at(scope), in_scope,
                       in_scope ? at(mask) : TensorView()},
                      s);
        add_counts({at(own), at(count), at(info)}, sums, s);
      }
      add_counts({{}, at(count), at(info)}, sums, s);
      sum_layers(at(count), at(pooled_count), s);
      sum_layers(at(sum), at(pooled_sum), s);
      add_losses(at(loss), sums, s);
      add_routing_losses(at(own), at(two), sums, s);
    };
    const Graph graph(stream, [&] { pass(m, there, stream); });
    for (int launch = 0; launch < 2; ++launch) {
      pass([](const TensorView& x) { return x; }, here, Stream());
      graph.launch(stream);
    }
    EXPECT_EQ(sums_of(there, stream), sums_of(here, Stream()));
    for (const Tensor* x : {&own, &scope, &pooled_count, &pooled_sum}) {
      EXPECT_EQ(m.difference("counts", *x), "");
    }
  }
}

}  // namespace
}  // namespace moiety::model
