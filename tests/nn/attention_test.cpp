// Attention: the double reference against matrices written out and central differences, reference
// and fast path in float and bf16 against the bound of the header.
#include "moiety/nn/attention.h"

#include "moiety/base/parallel.h"
#include "tests/nn/attention_cases.h"
#include "tests/support/gradient.h"

namespace moiety::nn {
namespace {
class Attention : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Attention, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Attention, ReferenceAndFastPathKeepTheBound) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::string type = name(dtype);
    const Problem p(GetParam(), dtype);
    attention_ref(p.forward());
    expect_forward(p, type + " reference");
    attention_backward_ref(p.backward());
    expect_backward(p, type + " reference");
    attention_cpu(p.forward());
    expect_forward(p, type + " fast");
    attention_backward_cpu(p.backward());
    expect_backward(p, type + " fast");
  }
}

TEST_P(Attention, DoubleReferenceIsTheDefinition) {
  const Problem p(GetParam(), DType::kFloat64);
  attention(p.forward(), {});
  attention_backward(p.backward(), {});
  const Oracle f = oracle(p, false), g = oracle(p, true);
  const std::vector<double> bound(p.q().numel() + p.k().numel(), 1e-10);
  expect_within(p.o(), f.o, bound, "o");
  expect_within(p.lse(), f.lse, bound, "lse");
  expect_within(p.tensors[5], g.dq, bound, "dq");
  expect_within(p.tensors[6], g.dk, bound, "dk");
  expect_within(p.tensors[7], g.dv, bound, "dv");
}

TEST_P(Attention, BackwardMatchesCentralDifferences) {
  const Problem p(GetParam(), DType::kFloat64);
  attention(p.forward(), {});
  attention_backward(p.backward(), {});
  const auto loss = [&] {
    attention(p.forward(), {});
    return dot(p.d_out(), p.o());
  };
  expect_gradient(p.q(), p.tensors[5], loss, "dq", 8);
  expect_gradient(p.k(), p.tensors[6], loss, "dk", 8);
  expect_gradient(p.v(), p.tensors[7], loss, "dv", 8);
}

TEST(AttentionTest, FusedHeadsAndThreadsGiveTheSameBits) {
  const int64_t sequences = 3, tokens = 3 * 40, heads = 4, kv = 2, dim = 16;
  const Tensor qkv = normal_tensor(DType::kBFloat16, {tokens, (heads + 2 * kv) * dim}, 1);
  const QkvHeads x = split_heads(qkv, sequences, heads, kv, dim);
  EXPECT_EQ(x.k_BSGC.raw(), qkv.data<bf16>() + 2 * dim);
  EXPECT_EQ(x.qk_TGNC.size(2), 3);
  const Tensor q = converted(x.q_BSGMC, DType::kBFloat16),
               k = converted(x.k_BSGC, DType::kBFloat16), v = converted(x.v_BSGC, DType::kBFloat16);
  const int threads = thread_budget();
  std::vector<Tensor> results;
  for (const bool fused : {true, false}) {
    set_thread_budget(fused ? 2 : 1);
    Tensor o(DType::kBFloat16, {sequences, 40, kv, 2, dim}),
        lse(DType::kFloat32, {sequences, kv, 2, 40}), dqkv(DType::kBFloat16, qkv.view().sizes());
    const QkvHeads d = split_heads(dqkv, sequences, heads, kv, dim);
    AttentionArgs f{q, k, v, {}, o, lse};
    if (fused) f = {x.q_BSGMC, x.k_BSGC, x.v_BSGC, {}, o, lse};
    attention(f, {});
    attention_backward({f, q, d.q_BSGMC, d.k_BSGC, d.v_BSGC}, {});
    results.push_back(std::move(o));
    results.push_back(std::move(dqkv));
  }
  set_thread_budget(threads);
  expect_same_bits(results[0], results[2], "o");
  expect_same_bits(results[1], results[3], "dqkv");
}

TEST(AttentionTest, RefusesWhatDoesNotFit) {
  const Problem p(kCases[8], DType::kFloat32);
  AttentionArgs odd = p.forward();
  odd.k_BSGC = odd.k_BSGC.slice(3, 0, 8);
  EXPECT_THROW(attention(odd, {}), Error);
  p.documents.data<int32_t>()[3] = 4;  // a start after its query
  EXPECT_THROW(attention(p.forward(), {}), Error);
}

TEST(AttentionTest, NeedsNoWorkAreaOnACpu) {
  const Problem p(kCases[4], DType::kBFloat16);
  EXPECT_EQ(attention_workspace(p.forward(), {}), 0);
  EXPECT_EQ(attention_backward_workspace(p.backward(), {}), 0);
  attention(p.forward(), {});
  const Tensor expected = copy_of(p.o()), bytes(DType::kUInt8, {512});
  AttentionArgs args = p.forward();
  args.workspace = bytes;
  attention(args, {});
  expect_same_bits(p.o(), expected, "o");
  args.workspace = bytes.view().slice(0, 1, 511);
  EXPECT_THROW(attention(args, {}), Error);
}

}  // namespace
}  // namespace moiety::nn
