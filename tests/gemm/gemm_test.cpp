// gemm: every engine against a double product of the stored operands, and the vector engine against
// the reference bit for bit.
#include "moiety/gemm/gemm.h"

#include "moiety/base/parallel.h"
#include "moiety/gemm/gemm_block.h"
#include "tests/gemm/groups.h"
#include "tests/support/error_of.h"

namespace moiety::gemm {
namespace {

struct Case {
  int64_t m, n, k;
};

// Around the tiles (6 x 16, 12 x 32, 14 x 32), row blocks (96, 112, 256) and reduction runs (320,
// 512) of the engines.
const std::vector<Case> kCases = {{0, 5, 3},     {5, 0, 3},      {3, 4, 0},      {1, 1, 1},
                                  {1, 24, 40},   {5, 7, 9},      {6, 16, 8},     {7, 17, 33},
                                  {12, 32, 64},  {13, 8, 320},   {96, 31, 321},  {97, 33, 700},
                                  {257, 49, 5},  {300, 20, 12},  {2, 1100, 16},  {16, 40, 2880},
                                  {14, 32, 512}, {15, 161, 513}, {113, 33, 1025}};

struct Problem {
  GemmOp op;
  Tensor a, b, c, out;
  GemmArgs args;

  Problem(GemmOp op, const Case& s, DType dtype, DType out_dtype, bool integers) : op(op) {
    const bool a_transposed = op == GemmOp::kNT, b_transposed = op == GemmOp::kTN;
    // Rows are longer than the matrix: strides are free.
    a = Tensor(dtype, {a_transposed ? s.k : s.m, (a_transposed ? s.m : s.k) + 3});
    b = Tensor(dtype, {b_transposed ? s.n : s.k, (b_transposed ? s.k : s.n) + 5});
    c = Tensor(out_dtype, {s.m, s.n});
    out = Tensor(out_dtype, {s.m, s.n + 2});
    uint32_t id = 0;
    for (const Tensor* x : {&a, &b, &c, &out}) {
      integers ? fill_integers(*x, ++id, 4) : fill_normal(*x, ++id);
    }
    args.op = op;
    args.a = a.view().slice(1, 0, a.view().size(1) - 3);
    args.b = b.view().slice(1, 0, b.view().size(1) - 5);
    args.out = out.view().slice(1, 0, s.n);
  }

  Product block(const Case& s) const {
    Product g;
    g.op = op;
    g.dtype = a.view().dtype();
    g.m = s.m;
    g.n = s.n;
    g.k = s.k;
    g.a = {args.a.raw(), args.a.stride(0)};
    g.b = {args.b.raw(), args.b.stride(0)};
    const TensorView& old = args.c.defined() ? args.c : args.out;
    g.epilogue = {.alpha = {args.alpha},
                  .beta = {args.beta},
                  .out = args.out.raw(),
                  .out_dtype = args.out.dtype(),
                  .out_stride = args.out.stride(0),
                  .old = old.raw(),
                  .old_dtype = old.dtype(),
                  .old_stride = old.stride(0)};
    return g;
  }

  double left(int64_t i, int64_t p) const {
    return op == GemmOp::kNT ? get(args.a, p, i) : get(args.a, i, p);
  }
  double right(int64_t p, int64_t j) const {
    return op == GemmOp::kTN ? get(args.b, j, p) : get(args.b, p, j);
  }

  // `out` against the double product; `before` is what out held.
  void expect_close(const Case& s, const TensorView& before) const {
    std::vector<double> lefts, rights;
    for (int64_t i = 0; i < s.m; ++i) {
      for (int64_t p = 0; p < s.k; ++p) lefts.push_back(left(i, p));
    }
    for (int64_t j = 0; j < s.n; ++j) {
      for (int64_t p = 0; p < s.k; ++p) rights.push_back(right(p, j));
    }
    for (int64_t i = 0; i < s.m; ++i) {
      for (int64_t j = 0; j < s.n; ++j) {
        double sum = 0, magnitude = 0;
        for (int64_t p = 0; p < s.k; ++p) {
          const double term = lefts[i * s.k + p] * rights[j * s.k + p];
          sum += term;
          magnitude += std::fabs(term);
        }
        double old = 0;
        if (args.beta != 0) old = args.c.defined() ? get(args.c, i, j) : get(before, i, j);
        const double expected = args.alpha * sum + args.beta * old;
        magnitude = std::fabs(args.alpha) * magnitude + std::fabs(args.beta * old);
        const double bound =
            half_ulp(args.out.dtype(), expected) * 1.0001 + (s.k + 3) * 0x1p-23 * magnitude;
        ASSERT_NEAR(get(args.out, i, j), expected, bound) << i << ", " << j;
      }
      for (int64_t j = s.n; j < s.n + 2; ++j) ASSERT_EQ(get(out, i, j), get(before, i, j));
    }
  }
};

class Gemm : public testing::TestWithParam<std::tuple<GemmOp, DType, DType>> {
 protected:
  GemmOp op() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  DType out_dtype() const { return std::get<2>(GetParam()); }
};

TEST_P(Gemm, EnginesAreCloseAndExactOnIntegers) {
  for (const Case& s : kCases) {
    for (bool integers : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << s.m << " x " << s.n << " x " << s.k << ", integers " << integers);
      Problem p(op(), s, dtype(), out_dtype(), integers);
      const Tensor before = copy_of(p.out);
      p.args.alpha = integers ? 2 : 0.75f;
      p.args.beta = integers ? 1 : -0.5f;
      block_gemm(p.block(s), GemmEngine::kReference);
      p.expect_close(s, before);
      const Tensor expected = copy_of(p.out);
      for (GemmEngine engine :
           {GemmEngine::kVector, GemmEngine::kBf16, GemmEngine::kAmx, GemmEngine::kOneDnn}) {
        if (!engine_available(engine, dtype())) continue;
        SCOPED_TRACE(name(engine));
        copy_into(p.out, before);
        block_gemm(p.block(s), engine);
        if (integers || has_reference_bits(engine, dtype())) {
          EXPECT_TRUE(same_bits(p.out, expected));
        } else {
          p.expect_close(s, before);
        }
      }
    }
  }
}

TEST_P(Gemm, PublicCallEqualsReferenceForAnyThreads) {
  const int threads = thread_budget();
  const Case s{700, 200, 96};
  Problem whole(op(), s, dtype(), out_dtype(), true);
  block_gemm(whole.block(s), GemmEngine::kReference);
  for (int budget : {1, 2, 5}) {
    set_thread_budget(budget);
    Problem p(op(), s, dtype(), out_dtype(), true);
    gemm(p.args, Stream());
    EXPECT_TRUE(same_bits(p.out, whole.out)) << budget << " threads";
  }
  set_thread_budget(threads);
}

TEST_P(Gemm, ResidualOfAnotherDtype) {
  const Case s{9, 20, 12};
  Problem p(op(), s, dtype(), out_dtype(), false);
  const Tensor residual = normal_tensor(DType::kFloat32, {s.m, s.n}, 9);
  const Tensor kept = copy_of(residual), before = copy_of(p.out);
  p.args.c = residual;
  p.args.beta = 1;
  gemm(p.args, Stream());
  p.expect_close(s, before);
  EXPECT_TRUE(same_bits(residual, kept));
}

TEST_P(Gemm, BetaZeroNeverReadsOld) {
  const Case s{7, 18, 0};
  Problem p(op(), s, dtype(), out_dtype(), false);
  fill(p.out, NAN);
  gemm(p.args, Stream());
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < s.n; ++j) {
      ASSERT_EQ(get(p.args.out, i, j), 0.0);
      ASSERT_FALSE(std::signbit(get(p.args.out, i, j)));
    }
  }
}

std::string param_name(const testing::TestParamInfo<Gemm::ParamType>& info) {
  const char* ops[] = {"TN", "NN", "NT"};
  return text("{}_{}_{}", ops[int(std::get<0>(info.param))], name(std::get<1>(info.param)),
              name(std::get<2>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(All, Gemm,
                         testing::Combine(testing::Values(GemmOp::kTN, GemmOp::kNN, GemmOp::kNT),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(DType::kFloat32, DType::kBFloat16)),
                         param_name);

TEST(GemmFp64, IsTheDoubleProduct) {
  for (GemmOp op : {GemmOp::kTN, GemmOp::kNN, GemmOp::kNT}) {
    const Case s{4, 6, 11};
    Problem p(op, s, DType::kFloat64, DType::kFloat64, false);
    const Tensor before = copy_of(p.out);
    p.args.beta = 1;
    gemm(p.args, Stream());
    for (int64_t i = 0; i < s.m; ++i) {
      for (int64_t j = 0; j < s.n; ++j) {
        double sum = get(before, i, j);
        for (int64_t q = 0; q < s.k; ++q) sum += p.left(i, q) * p.right(q, j);
        ASSERT_NEAR(get(p.args.out, i, j), sum, 1e-14 * (1 + std::fabs(sum)));
      }
    }
  }
}

TEST(GemmSpecialValues, NanAndInfinityStayInTheirRow) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Case s{14, 34, 21};
    Problem p(GemmOp::kTN, s, dtype, DType::kFloat32, true);
    put(p.args.a, 3 * s.k + 5, NAN);
    put(p.args.a, 8 * s.k + 1, HUGE_VAL);
    gemm(p.args, Stream());
    for (int64_t i = 0; i < s.m; ++i) {
      for (int64_t j = 0; j < s.n; ++j) {
        ASSERT_EQ(std::isnan(get(p.args.out, i, j)),
                  i == 3 || (i == 8 && get(p.args.b, j, 1) == 0));
      }
    }
  }
}

// With rows of whole cache lines gradients are written past the caches, other products are not.
TEST(GemmBf16, RowsOfCacheLinesHaveTheReferencesBits) {
  if (!avx512_bf16_available()) GTEST_SKIP() << "this processor has no AVX512-BF16";
  const Case s{31, 112, 77};
  for (const GemmOp op : {GemmOp::kTN, GemmOp::kNN, GemmOp::kNT}) {
    const Problem p(op, s, DType::kBFloat16, DType::kFloat32, false);
    const Tensor expected(DType::kFloat32, {s.m, s.n}), got(DType::kFloat32, {s.m, s.n});
    Product g = p.block(s);
    g.epilogue.out_stride = s.n;
    g.epilogue.out = expected.view().raw();
    block_gemm(g, GemmEngine::kReference);
    g.epilogue.out = got.view().raw();
    block_gemm(g, GemmEngine::kBf16);
    EXPECT_TRUE(same_bits(got, expected)) << int(op);
  }
}

// A subnormal operand, and a sum that is one, count as zero.
TEST(GemmBf16, SubnormalNumbersAreZeros) {
  if (!avx512_bf16_available()) GTEST_SKIP() << "this processor has no AVX512-BF16";
  const Case s{3, 2, 4};
  for (const GemmOp op : {GemmOp::kTN, GemmOp::kNN, GemmOp::kNT}) {
    const Problem p(op, s, DType::kBFloat16, DType::kFloat32, true);
    fill(p.args.a, 0x1p-127);
    fill(p.args.b, 0x1p100);
    block_gemm(p.block(s), GemmEngine::kBf16);
    for (int64_t i = 0; i < s.m * s.n; ++i) ASSERT_EQ(get(p.args.out, i), 0);
    fill(p.args.a, 0x1p-100);
    fill(p.args.b, 0x1p-30);
    block_gemm(p.block(s), GemmEngine::kBf16);
    for (int64_t i = 0; i < s.m * s.n; ++i) ASSERT_EQ(get(p.args.out, i), 0);
    fill(p.args.b, 0x1p-26);  // the least number that is not subnormal
    block_gemm(p.block(s), GemmEngine::kBf16);
    for (int64_t i = 0; i < s.m * s.n; ++i) ASSERT_EQ(get(p.args.out, i), 0x1p-124);
  }
}

TEST(GemmErrors, NameTheArguments) {
  const auto message = [](const GemmArgs& args) { return error_of([&] { gemm(args, Stream()); }); };
  Problem p(GemmOp::kTN, {4, 5, 6}, DType::kFloat32, DType::kFloat32, false);
  GemmArgs args = p.args;
  args.b = p.args.b.slice(1, 0, 5);
  EXPECT_NE(message(args).find("reduction 6 and 5"), std::string::npos) << message(args);
  args = p.args;
  args.out = p.args.out.slice(0, 0, 3);
  EXPECT_NE(message(args).find("expected [4, 5]"), std::string::npos) << message(args);
  args = p.args;
  const Tensor half(DType::kBFloat16, {5, 6});
  args.b = half;
  EXPECT_NE(message(args).find("dtypes differ"), std::string::npos) << message(args);
  args = p.args;
  args.a = TensorView(p.a.data<float>(), DType::kFloat32, std::array<int64_t, 2>{4, 6},
                      std::array<int64_t, 2>{1, 4});
  EXPECT_NE(message(args).find("not contiguous"), std::string::npos) << message(args);
  args = p.args;
  args.workspace = half;
  EXPECT_NE(message(args).find("gemm: workspace"), std::string::npos) << message(args);
  const Tensor bytes(DType::kUInt8, {512});
  args.workspace = bytes.view().slice(0, 1, 511);  // tensors are aligned to 64
  EXPECT_NE(message(args).find("aligned to 256"), std::string::npos) << message(args);
}

TEST(GemmWorkspace, IsNotNeededOnACpu) {
  Problem p(GemmOp::kTN, {4, 5, 6}, DType::kBFloat16, DType::kFloat32, true);
  EXPECT_EQ(gemm_workspace(p.args, Stream()), 0);
  gemm(p.args, Stream());
  const Tensor expected = copy_of(p.out), bytes(DType::kUInt8, {512});
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(bytes.view().raw()) % 256);
  p.args.workspace = bytes.view().slice(0, (256 - past) % 256, 512);
  gemm(p.args, Stream());
  EXPECT_TRUE(same_bits(p.out, expected));
}

}  // namespace
}  // namespace moiety::gemm
