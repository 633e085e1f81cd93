// The model's element-by-element operations on a GPU have the bits of the CPU.
#include "moiety/nn/elementwise.h"

#include "moiety/base/graph.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"
#include "tests/support/tensors.h"

namespace moiety::nn {
namespace {

class ElementwiseGpu : public GpuTest {};

TEST_F(ElementwiseGpu, HasTheBitsOfTheCpu) {
  for (const int64_t n : {0, 1, 8, 264, 1003}) {
    SCOPED_TRACE(n);
    const Tensor position(DType::kInt32, {3, n}), start(DType::kInt32, {3, n});
    for (int64_t i = 0; i < 3 * n; ++i) position.data<int32_t>()[i] = static_cast<int32_t>(i % 7);
    const Tensor x = normal_tensor(DType::kFloat32, {n}, 1, 30),
                 dy = normal_tensor(DType::kFloat32, {n}, 2), rounded(DType::kBFloat16, {n}),
                 part(DType::kBFloat16, {n}), wide(DType::kFloat32, {n}),
                 narrow(DType::kBFloat16, {n});
    const Mirror m({position, start, x, dy, rounded, part, wide, narrow}, stream);
    const auto run = [&](const auto& at, const Stream& s) {
      document_starts(at(position), at(start), s);
      for (const bool more : {false, true}) round_to_bf16(at(x), at(rounded), more, s);
      if (n > 1) round_to_bf16(at(x).slice(0, 1, n), at(part).slice(0, 0, n - 1), false, s);
      apply_sigmoid(at(x), s);
      sigmoid_gradient(at(x), at(dy), at(wide), s);
      sigmoid_gradient(at(x), at(dy), at(narrow), s);
    };
    run([](const Tensor& t) { return t.view(); }, Stream());
    const Graph graph(stream, [&] { run(m, stream); });
    graph.launch(stream);
    for (const Tensor* t : {&start, &rounded, &part, &x, &wide, &narrow}) {
      EXPECT_EQ(m.difference("out", *t), "");
    }
  }
}

}  // namespace
}  // namespace moiety::nn
