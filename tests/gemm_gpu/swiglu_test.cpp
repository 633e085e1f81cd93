// Activations on a GPU, from a captured graph, have the bits of the reference.
#include "moiety/base/graph.h"
#include "tests/gemm/swiglu_cases.h"
#include "tests/quant/amax_of.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::gemm {
namespace {

class ActivationGpu : public GpuTest {
 protected:
  Mirror mirror(const ActivationProblem& p) const {
    return Mirror({p.h, p.prob, p.a, p.da, p.dh, p.dprob}, stream);
  }
  ActivationArgs there(const Mirror& m, const ActivationProblem& p) const {
    ActivationArgs args = p.args;
    args.h = m(args.h);
    args.prob_R = m(args.prob_R);
    return args;
  }
};

TEST_F(ActivationGpu, HasTheBitsOfTheReference) {
  for (const ActivationCase& kind : kActivationKinds) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (auto [ffn, interleave] : kActivationColumns) {
        for (const bool with_prob : {true, false}) {
          SCOPED_TRACE(
              text("{} {} F={} s={} prob={}", kind.name, name(dtype), ffn, interleave, with_prob));
          ActivationProblem p(kind.activation, dtype, 35, ffn, interleave);
          if (!with_prob) p.args.prob_R = {};
          p.put_specials();
          const Mirror m = mirror(p);
          const ActivationArgs args = there(m, p);
          const std::vector<Tensor> expected = p.reference();
          const Graph graph(stream, [&] {
            activation_forward(args, m(p.a), stream);
            activation_backward(args, m(p.da), m(p.dh), {}, m(p.dprob), stream);
          });
          graph.launch(stream);
          expect_same(m.back(p.a), expected[0], "A");
          expect_same(m.back(p.dh), expected[1], "dH");
          expect_same(m.back(p.dprob), expected[2], "dprob");
          fill_bytes(m(p.a), 0, stream);
          activation_backward(args, m(p.da), args.h, m(p.a), {}, stream);
          expect_same(m.back(p.a), expected[0], "A again");
          expect_same(m.back(p.h), expected[1], "dH over H");
        }
      }
    }
  }
}

// Rows with a stride, which begin anywhere.
TEST_F(ActivationGpu, AnyAlignment) {
  for (const int64_t offset : {0, 1, 3, 8}) {
    const ActivationProblem whole(swiglu(), DType::kBFloat16, 9, 136, 0);
    const Mirror m = mirror(whole);
    const auto part = [&](const Tensor& x, int64_t n) {
      return x.view().slice(1, offset, offset + n);
    };
    ActivationArgs args = whole.args;
    args.h = part(whole.h, 256);
    const TensorView a = part(whole.a, 128), da = part(whole.da, 128), dh = part(whole.dh, 256);
    activation_backward(args, da, dh, a, whole.dprob, Stream());
    ActivationArgs gpu = args;
    gpu.h = m(args.h);
    gpu.prob_R = m(args.prob_R);
    activation_backward(gpu, m(da), m(dh), m(a), m(whole.dprob), stream);
    EXPECT_EQ(m.difference("a", whole.a), "");
    EXPECT_EQ(m.difference("dh", whole.dh), "");
    EXPECT_EQ(m.difference("dprob", whole.dprob), "");
  }
}

// Dead rows are left alone, and the sink has the amax of every group.
TEST_F(ActivationGpu, GroupsAndSink) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const GroupCase& c : group_cases()) {
      for (const bool broken : {false, true}) {
        const TestGroups groups(c);
        if (broken && groups.experts() < 2) continue;
        SCOPED_TRACE(text("{} {} broken={}", name(dtype), c.name, broken));
        if (broken) groups.count()[1] = groups.capacity() + 1;
        ActivationProblem p(swiglu(), dtype, groups.capacity(), 24, 8);
        p.args.groups = groups();
        for (const Tensor* t : {&p.h, &p.da, &p.prob}) groups.fill_dead_rows(*t, NAN);
        for (const Tensor* t : {&p.a, &p.dh, &p.dprob}) fill(*t, kSentinel);
        const Tensor amax = normal_tensor(DType::kFloat32, {groups.experts()}, 9);
        p.args.sink = {amax};
        const Mirror m = mirror(p);
        const Groups& g = p.args.groups;
        const Mirror data({g.begin_E1, g.count_E, g.status, amax}, stream);
        ActivationArgs args = there(m, p);
        args.groups.begin_E1 = data(g.begin_E1);
        args.groups.count_E = data(g.count_E);
        args.groups.status = data(g.status);
        args.sink = {data(amax)};
        const auto compare = [&] {
          EXPECT_EQ(m.difference("A", p.a), "");
          EXPECT_EQ(m.difference("dH", p.dh), "");
          EXPECT_EQ(m.difference("dprob", p.dprob), "");
          EXPECT_EQ(data.difference("amax", amax), "");
          EXPECT_EQ(data.difference("status", g.status), "");
        };
        p.forward();
        activation_forward(args, m(p.a), stream);
        compare();
        p.backward();
        activation_backward(args, m(p.da), m(p.dh), m(p.a), m(p.dprob), stream);
        compare();
      }
    }
  }
}

}  // namespace
}  // namespace moiety::gemm
