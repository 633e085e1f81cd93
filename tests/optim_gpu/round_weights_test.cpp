// Masters are rounded on a GPU as on the CPU.
#include "moiety/base/graph.h"
#include "moiety/optim/initialize.h"
#include "tests/optim_gpu/cases.h"
#include "tests/support/gpu_test.h"

namespace moiety::optim {
namespace {

class RoundWeightsGpu : public GpuTest {};

TEST_F(RoundWeightsGpu, HasTheBitsOfTheCpu) {
  for (const DType weights : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t n : {0, 1, 7, 8, 9, 4095, 4096, 100003, 16777219}) {
      for (const int64_t offset : {0, 1, 4}) {
        SCOPED_TRACE(text("{} to {} at {}", n, name(weights), offset));
        const Tensor master(DType::kFloat32, {n + offset}), weight(weights, {n + offset});
        for (int64_t i = 0; i < n + offset; ++i) {  // any bits
          master.data<float>()[i] = std::bit_cast<float>(random_word(static_cast<uint64_t>(i), 1));
        }
        const Mirror m({master, weight}, stream);
        const auto round = [&](const auto& at, const Stream& s) {
          round_weights(at(master).slice(0, offset, n + offset),
                        at(weight).slice(0, offset, n + offset), s);
        };
        round([](const Tensor& x) { return x.view(); }, Stream());
        const Graph graph(stream, [&] { round(m, stream); });
        graph.launch(stream);
        EXPECT_EQ(m.difference("weight", weight), "");
      }
    }
  }
}

}  // namespace
}  // namespace moiety::optim
