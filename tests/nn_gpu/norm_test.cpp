// norm and its backward pass on a GPU, from a captured graph, have the bits of the reference.
#include "moiety/base/graph.h"
#include "tests/nn/norm_cases.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::nn {
namespace {

class NormGpu : public GpuTest, public testing::WithParamInterface<NormCase> {
 protected:
  Mirror mirror(const NormProblem& p) const {
    return Mirror({p.x.storage, p.y.storage, p.dy.storage, p.dx.storage, p.addend.storage, p.weight,
                   p.grad, p.workspace},
                  stream);
  }
  void forward(const Mirror& m, const NormArgs& a, TensorView amax = {}) const {
    const Graph graph(stream, [&] {
      norm({m(a.x), m(a.weight_D), m(a.y), a.eps, {amax}}, stream);
    });
    graph.launch(stream);
  }
  void backward(const Mirror& m, const NormBackwardArgs& a) const {
    const Graph graph(stream, [&] {
      norm_backward({m(a.x), m(a.weight_D), m(a.dy), m(a.addend), m(a.dx), m(a.grad_D),
                     m(a.workspace), a.eps, a.accumulate},
                    stream);
    });
    graph.launch(stream);
  }
};
INSTANTIATE_TEST_SUITE_P(Shapes, NormGpu, testing::ValuesIn(kNormCases),
                         [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(Many, NormGpu, testing::ValuesIn(kNormManyRows),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(NormGpu, HasTheBitsOfTheReference) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(text("{} accumulate={}", name(dtype), accumulate));
      const NormProblem p(GetParam(), dtype);
      const Mirror m = mirror(p);
      const Tensor amax = normal_tensor(DType::kFloat32, {1}, 3, 1, 100);
      const Mirror sink({amax}, stream);
      NormArgs args = p.forward();
      args.sink = {amax};
      args.sink.clear();
      norm_ref(args);
      forward(m, p.forward(), sink(amax));
      norm_backward_ref(p.backward(accumulate));
      backward(m, p.backward(accumulate));
      EXPECT_EQ(m.difference("y", p.y.storage), "");
      EXPECT_EQ(m.difference("dx", p.dx.storage), "");
      EXPECT_EQ(m.difference("grad", p.grad), "");
      EXPECT_EQ(sink.difference("amax", amax), "");
    }
  }
}

TEST_P(NormGpu, WorksInPlace) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    NormProblem p(GetParam(), dtype);
    const Mirror m = mirror(p);
    p.with_addend = true;
    NormBackwardArgs over_dy = p.backward(false), over_addend = over_dy;
    over_dy.dx = p.dy.view;
    over_addend.dx = p.addend.view;
    NormArgs over_x = p.forward();
    over_x.y = p.x.view;
    for (const NormBackwardArgs& a : {over_dy, over_addend}) {
      norm_backward_ref(a);
      backward(m, a);
    }
    norm_ref(over_x);
    forward(m, over_x);
    EXPECT_EQ(m.difference("dx over dy", p.dy.storage), "");
    EXPECT_EQ(m.difference("dx over the addend", p.addend.storage), "");
    EXPECT_EQ(m.difference("y over x", p.x.storage), "");
    EXPECT_EQ(m.difference("grad", p.grad), "");
  }
}

class NormGpuTest : public GpuTest {};

TEST_F(NormGpuTest, OneCaptureServesOtherData) {
  const NormProblem p(kNormCases[5], DType::kBFloat16);
  const Mirror m({p.x.storage, p.weight, p.y.storage}, stream);
  const NormArgs a = p.forward();
  const Graph graph(stream, [&] { norm({m(a.x), m(a.weight_D), m(a.y), a.eps}, stream); });
  for (unsigned replay = 0; replay < 3; ++replay) {
    fill_normal(p.x.view, 50 + replay);
    copy(m(p.x.storage), p.x.storage, stream);
    graph.launch(stream);
    norm_ref(a);
    EXPECT_EQ(m.difference("y", p.y.storage), "");
  }
}

// More blocks of rows than a GPU has multiprocessors.
TEST_F(NormGpuTest, ManyBlocks) {
  for (const bool heads : {false, true}) {
    const NormProblem p({"", heads ? 3000 : 20000, heads ? 520 : 264, heads, true},
                        DType::kBFloat16);
    const Mirror m(
        {p.x.storage, p.dy.storage, p.dx.storage, p.addend.storage, p.weight, p.grad, p.workspace},
        stream);
    const NormBackwardArgs a = p.backward(false);
    norm_backward_ref(a);
    norm_backward(
        {m(a.x), m(a.weight_D), m(a.dy), m(a.addend), m(a.dx), m(a.grad_D), m(a.workspace), a.eps},
        stream);
    EXPECT_EQ(m.difference("dx", p.dx.storage), "");
    EXPECT_EQ(m.difference("grad", p.grad), "");
  }
}

// Rows that begin anywhere and are octets but for that.
TEST_F(NormGpuTest, AnyAlignment) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t offset : {1, 2, 5}) {
      const NormProblem p({"", 70, 72}, dtype);
      const Mirror m(
          {p.x.storage, p.y.storage, p.dy.storage, p.dx.storage, p.weight, p.grad, p.workspace},
          stream);
      const auto part = [&](const TensorView& x) {
        return x.slice(-1 + x.dims(), offset, offset + 64);
      };
      NormArgs f = p.forward();
      NormBackwardArgs b = p.backward(false);
      const TensorView workspace = p.workspace.view().slice(1, 0, 64);
      b.workspace = TensorView(workspace.raw(), DType::kFloat32, workspace.sizes());
      for (TensorView* x : {&f.x, &f.weight_D, &f.y}) *x = part(*x);
      for (TensorView* x : {&b.x, &b.weight_D, &b.dy, &b.dx, &b.grad_D}) *x = part(*x);
      norm_ref(f);
      norm_backward_ref(b);
      norm({m(f.x), m(f.weight_D), m(f.y), f.eps}, stream);
      norm_backward(
          {m(b.x), m(b.weight_D), m(b.dy), {}, m(b.dx), m(b.grad_D), m(b.workspace), b.eps},
          stream);
      EXPECT_EQ(m.difference("y", p.y.storage), "");
      EXPECT_EQ(m.difference("dx", p.dx.storage), "");
      EXPECT_EQ(m.difference("grad", p.grad), "");
    }
  }
}

TEST_F(NormGpuTest, RefusesWhatItHasNoKernelFor) {
  const Tensor x(DType::kFloat64, {2, 8}, kGpu), w(DType::kFloat64, {8}, kGpu);
  EXPECT_THROW(norm({x, w, x}, stream), Error);
  const Tensor here(DType::kFloat32, {2, 8}), there(DType::kFloat32, {8}, kGpu);
  EXPECT_THROW(norm({here, there, here}, stream), Error);
}

}  // namespace
}  // namespace moiety::nn
