// grouped_gemm over the table of groups: layout and tails on integers, bits against the reference,
// dead rows, faults, and what the result must not depend on.
#include "moiety/gemm/grouped_gemm.h"

#include <sys/mman.h>

#include "moiety/base/parallel.h"
#include "moiety/gemm/grouped_block.h"
#include "tests/gemm/groups.h"

namespace moiety::gemm {
namespace {

constexpr GroupedOp kOps[] = {GroupedOp::kForward, GroupedOp::kDgrad, GroupedOp::kWgrad};

struct Widths {
  int64_t c, n;
};

// Operands and outputs of all three ops over one set of groups.
struct Problem {
  TestGroups groups;
  Widths width;
  Tensor x, dy, w;   // x [R_cap, C], dy [R_cap, N], w [E, N, C]
  Tensor y, dx, dw;  // outputs
  Tensor bias, scale;

  Problem(const GroupCase& c, Widths width, DType dtype, DType out_dtype, bool integers)
      : groups(c),
        width(width),
        x(dtype, {groups.capacity(), width.c}),
        dy(dtype, {groups.capacity(), width.n}),
        w(dtype, {groups.experts(), width.n, width.c}),
        y(out_dtype, {groups.capacity(), width.n}),
        dx(out_dtype, {groups.capacity(), width.c}),
        dw(out_dtype, {groups.experts(), width.n, width.c}),
        bias(dtype, {groups.experts(), width.n}),
        scale(DType::kFloat32, {groups.capacity()}) {
    uint32_t id = 0;
    for (const Tensor* t : {&x, &dy, &w, &bias, &scale}) {
      integers ? fill_integers(*t, ++id, 4) : fill_normal(*t, ++id);
    }
    groups.fill_dead_rows(x, NAN);
    groups.fill_dead_rows(dy, NAN);
    groups.fill_dead_rows(scale, NAN);
    poison();
  }

  void poison() const {
    for (const Tensor* t : {&y, &dx, &dw}) fill(*t, kSentinel);
  }

  const Tensor& out(GroupedOp op) const {
    return op == GroupedOp::kForward ? y : op == GroupedOp::kDgrad ? dx : dw;
  }

  GroupedGemmArgs args(GroupedOp op) const {
    GroupedGemmArgs a;
    a.op = op;
    a.groups = groups();
    a.a.data = op == GroupedOp::kForward ? x : dy;
    if (op == GroupedOp::kWgrad) {
      a.b.data = x;
      a.w = dw.view();
    } else {
      a.w = w.view();
      a.out = out(op);
    }
    return a;
  }
};

void expect_dead_rows(const TestGroups& groups, const TensorView& out) {
  const std::vector<int64_t> owner = groups.owners();
  for (int64_t r = 0; r < groups.capacity(); ++r) {
    for (int64_t c = 0; owner[r] < 0 && c < out.size(1); ++c)
      ASSERT_EQ(get(out, r, c), kSentinel) << r;
  }
}

class GroupedGemm : public testing::TestWithParam<GroupCase> {};

TEST_P(GroupedGemm, EveryOpDtypeAndEngine) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (DType out_dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (bool integers : {true, false}) {
        if (!integers && GetParam().counts.size() > 1000) continue;  // slow, and no other code
        const Problem p(GetParam(), {19, 24}, dtype, out_dtype, integers);
        for (GroupedOp op : kOps) {
          SCOPED_TRACE(
              text("op {} {} -> {} integers {}", int(op), name(dtype), name(out_dtype), integers));
          p.poison();
          grouped_gemm_reference(p.args(op));
          const Tensor expected = copy_of(p.out(op));
          if (op != GroupedOp::kWgrad) expect_dead_rows(p.groups, expected);
          for (GemmEngine engine : {GemmEngine::kAuto, GemmEngine::kVector, GemmEngine::kBf16,
                                    GemmEngine::kAmx, GemmEngine::kOneDnn}) {
            if (!engine_available(engine, dtype)) continue;
            const bool exact = has_reference_bits(engine, dtype);
            p.poison();
            if (engine == GemmEngine::kAuto) {
              grouped_gemm(p.args(op), Stream());
            } else {
              grouped_gemm_cpu(p.args(op), engine);
            }
            if (integers || exact) {
              ASSERT_TRUE(same_bits(p.out(op), expected)) << name(engine);
            } else {
              for (int64_t i = 0; i < expected.view().numel(); ++i) {
                ASSERT_NEAR(get(p.out(op), i), get(expected, i),
                            2 * half_ulp(out_dtype, get(expected, i)) + 1e-3);
              }
            }
          }
        }
        EXPECT_EQ(p.groups.status()[0], 0u);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GroupedGemm, testing::ValuesIn(group_cases()),
                         [](const auto& info) { return info.param.name; });

// The reference against sums written out here, epilogue included.
TEST(GroupedGemmReference, IsTheDefinition) {
  constexpr double kOld = 7;
  const Problem p({"", {3, 0, 5, 2}, 2}, {7, 9}, DType::kFloat32, DType::kFloat32, false);
  const std::vector<int64_t> owner = p.groups.owners();
  const Tensor alpha = normal_tensor(DType::kFloat32, {4}, 20),
               beta = normal_tensor(DType::kFloat32, {4}, 21);
  for (GroupedOp op : kOps) {
    GroupedGemmArgs args = p.args(op);
    args.alpha.per_group = alpha;
    args.beta.per_group = beta;
    if (op == GroupedOp::kForward) {
      args.bias_EN = p.bias;
      args.bias_scale_R = p.scale;
    }
    fill(p.out(op), kOld);
    grouped_gemm_reference(args);
  }
  const auto w = [&](int64_t e, int64_t n, int64_t c) { return get(p.w, (e * 9 + n) * 7 + c); };
  for (int64_t r = 0; r < p.groups.capacity(); ++r) {
    const int64_t e = owner[r];
    if (e < 0) continue;
    const double a = get(alpha, e), b = get(beta, e) * kOld;
    for (int64_t n = 0; n < 9; ++n) {
      double sum = 0;
      for (int64_t c = 0; c < 7; ++c) sum += get(p.x, r, c) * w(e, n, c);
      ASSERT_NEAR(get(p.y, r, n), a * sum + b + get(p.bias, e, n) * get(p.scale, r), 1e-4);
    }
    for (int64_t c = 0; c < 7; ++c) {
      double sum = 0;
      for (int64_t n = 0; n < 9; ++n) sum += get(p.dy, r, n) * w(e, n, c);
      ASSERT_NEAR(get(p.dx, r, c), a * sum + b, 1e-4);
    }
  }
  for (int64_t e = 0; e < 4; ++e) {
    for (int64_t n = 0; n < 9; ++n) {
      for (int64_t c = 0; c < 7; ++c) {
        double sum = 0;
        for (int64_t r = 0; r < p.groups.capacity(); ++r) {
          if (owner[r] == e) sum += get(p.dy, r, n) * get(p.x, r, c);
        }
        ASSERT_NEAR(get(p.dw, (e * 9 + n) * 7 + c), get(alpha, e) * sum + get(beta, e) * kOld,
                    1e-4);
      }
    }
  }
}

TEST(GroupedGemmWidths, NarrowWideAndZero) {
  const GroupCase groups{"", {5, 0, 17, 40}};
  for (Widths width : {Widths{0, 24}, {7, 1}, {8, 1}, {40, 2880}, {2880, 24}}) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const Problem p(groups, width, dtype, DType::kFloat32, true);
      for (GroupedOp op : kOps) {
        SCOPED_TRACE(text("C={} N={} {} op {}", width.c, width.n, name(dtype), int(op)));
        p.poison();
        grouped_gemm_reference(p.args(op));
        const Tensor expected = copy_of(p.out(op));
        p.poison();
        grouped_gemm(p.args(op), Stream());
        EXPECT_TRUE(same_bits(p.out(op), expected));
      }
    }
  }
}

TEST(GroupedGemmGather, EqualsGatheredRowsWithZerosAndRepeats) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Problem p({"", {9, 0, 21, 4}, 3}, {40, 24}, dtype, DType::kFloat32, true);
    const int64_t capacity = p.groups.capacity(), tokens = 6;
    const Tensor x = Tensor(dtype, {tokens, 40}), dy = Tensor(dtype, {tokens, 24});
    fill_integers(x, 30, 4);
    fill_integers(dy, 31, 4);
    const Tensor source(DType::kInt32, {capacity});
    for (int64_t r = 0; r < capacity; ++r) {
      source.data<int32_t>()[r] = static_cast<int32_t>(r * 5 % (tokens + 1)) - 1;
      const int32_t s = source.data<int32_t>()[r];
      for (int64_t c = 0; c < 40; ++c) put(p.x, r * 40 + c, s < 0 ? 0 : get(x, s, c));
      for (int64_t n = 0; n < 24; ++n) put(p.dy, r * 24 + n, s < 0 ? 0 : get(dy, s, n));
    }
    for (GroupedOp op : kOps) {
      p.poison();
      grouped_gemm(p.args(op), Stream());
      const Tensor expected = copy_of(p.out(op));
      GroupedGemmArgs args = p.args(op);
      args.a = {op == GroupedOp::kForward ? x.view() : dy.view(), source};
      if (op == GroupedOp::kWgrad) args.b = {x, source};
      for (GemmEngine engine : {GemmEngine::kReference, GemmEngine::kVector, GemmEngine::kBf16,
                                GemmEngine::kAmx, GemmEngine::kOneDnn}) {
        if (!engine_available(engine, dtype)) continue;
        p.poison();
        grouped_gemm_cpu(args, engine);
        EXPECT_TRUE(same_bits(p.out(op), expected)) << int(op) << name(engine);
      }
    }
    EXPECT_EQ(p.groups.status()[0], 0u);
  }
}

TEST(GroupedGemmGather, BadIndexReadsZerosAndIsRecorded) {
  const Problem p({"", {2, 3}}, {4, 6}, DType::kFloat32, DType::kFloat32, false);
  const Tensor source(DType::kInt32, {5});
  for (int32_t r = 0; r < 5; ++r) source.data<int32_t>()[r] = r == 3 ? 5 : r;
  GroupedGemmArgs args = p.args(GroupedOp::kForward);
  args.a.source_R = source;
  grouped_gemm(args, Stream());
  for (int64_t n = 0; n < 6; ++n) EXPECT_EQ(get(p.y, 3, n), 0);
  EXPECT_EQ(p.groups.status()[0], kFaultIndex);
  EXPECT_EQ(p.groups.status()[2], 1u);
  EXPECT_EQ(p.groups.status()[3], 5u);
}

TEST(GroupedGemmFaults, FaultyGroupIsTreatedAsEmpty) {
  const Problem p({"", {4, 5, 3}}, {8, 16}, DType::kFloat32, DType::kFloat32, true);
  TestGroups broken({"", {4, 5, 3}});
  broken.count()[1] = -2;
  for (GroupedOp op : kOps) {
    p.poison();
    grouped_gemm(p.args(op), Stream());
    const Tensor sound = copy_of(p.out(op));
    p.poison();
    GroupedGemmArgs args = p.args(op);
    args.groups = broken();
    grouped_gemm(args, Stream());
    const int64_t row = p.out(op).view().size(-1);
    for (int64_t i = 0; i < sound.view().numel(); ++i) {
      const int64_t group = op == GroupedOp::kWgrad ? i / (row * 16)
                            : i / row < 4           ? 0
                            : i / row < 9           ? 1
                                                    : 2;
      const double empty = op == GroupedOp::kWgrad ? 0 : kSentinel;
      ASSERT_EQ(get(p.out(op), i), group == 1 ? empty : get(sound, i));
    }
  }
  EXPECT_EQ(broken.status()[0], kFaultGroup);
  EXPECT_EQ(broken.status()[2], 1u);
}

TEST(GroupedGemmWgrad, EmptyGroupOverwritesOrKeeps) {
  for (DType out : {DType::kFloat32, DType::kBFloat16}) {
    const Problem p({"", {0, 3, 0}}, {8, 16}, DType::kBFloat16, out, false);
    fill(p.dw, NAN);
    grouped_gemm(p.args(GroupedOp::kWgrad), Stream());
    for (int64_t i = 0; i < 128; ++i) {
      ASSERT_EQ(get(p.dw, i), 0);
      ASSERT_FALSE(std::signbit(get(p.dw, i)));
      ASSERT_FALSE(std::isnan(get(p.dw, 128 + i)));
    }
    fill(p.dw, 0.5);
    GroupedGemmArgs args = p.args(GroupedOp::kWgrad);
    args.beta.value = 1;
    grouped_gemm(args, Stream());
    for (int64_t i = 0; i < 128; ++i) ASSERT_EQ(get(p.dw, i), 0.5);
    bool changed = false;
    for (int64_t i = 128; i < 256; ++i) changed |= get(p.dw, i) != 0.5;
    EXPECT_TRUE(changed);
  }
}

TEST(GroupedGemmScalars, HostOneAndPerGroupAgree) {
  const Problem p({"", {5, 0, 9}}, {8, 16}, DType::kBFloat16, DType::kFloat32, false);
  const Tensor one(DType::kFloat32, {1}), each(DType::kFloat32, {3});
  fill(one, 0.375);
  fill(each, 0.375);
  for (GroupedOp op : kOps) {
    std::vector<Tensor> results;
    for (const TensorView& view : {TensorView(), one.view(), each.view()}) {
      GroupedGemmArgs args = p.args(op);
      args.alpha = args.beta = {0.375f, view};
      fill(p.out(op), 7);
      grouped_gemm(args, Stream());
      results.push_back(copy_of(p.out(op)));
    }
    EXPECT_TRUE(same_bits(results[0], results[1]));
    EXPECT_TRUE(same_bits(results[0], results[2]));
  }
}

// The rows of group 1 of `c`, whatever is around them.
std::vector<float> middle_group(const GroupCase& c, GroupedOp op, DType dtype, GemmEngine engine,
                                int64_t expected_rows, bool indexed) {
  const Widths width{40, 48};
  const Problem p(c, width, dtype, DType::kFloat32, false);
  const RowRange range = group_rows(p.groups(), 1);
  uint32_t id = 50;  // the group's own data, the same in every surrounding
  for (const Tensor* t : {&p.x, &p.dy}) {
    const int64_t n = t->view().size(1);
    fill_normal(t->view().slice(0, range.begin, range.begin + range.rows).reshape({range.rows * n}),
                ++id);
  }
  fill_normal(p.w.view().select(1).reshape({width.n * width.c}), ++id);
  std::vector<TensorView> views;
  for (int64_t e = 0; e < p.groups.experts(); ++e) {
    views.push_back((op == GroupedOp::kWgrad ? p.dw : p.w).view().select(e));
  }
  GroupedGemmArgs args = p.args(op);
  args.groups.expected_rows = expected_rows;
  if (indexed) args.w = std::span<const TensorView>(views);
  grouped_gemm_cpu(args, engine);
  const TensorView out = op == GroupedOp::kWgrad
                             ? p.dw.view().select(1)
                             : p.out(op).view().slice(0, range.begin, range.begin + range.rows);
  return {out.data<float>(), out.data<float>() + out.numel()};
}

TEST(GroupedGemmInvariance, BitsOfAGroupDependOnItsRowsAndWeightAlone) {
  const int threads = thread_budget();
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (GemmEngine engine :
         {GemmEngine::kVector, GemmEngine::kBf16, GemmEngine::kAmx, GemmEngine::kOneDnn}) {
      if (!engine_available(engine, dtype)) continue;
      for (GroupedOp op : kOps) {
        SCOPED_TRACE(text("{} {} op {}", name(dtype), name(engine), int(op)));
        set_thread_budget(1);
        const std::vector<float> base = middle_group({"", {1, 300}}, op, dtype, engine, 0, false);
        EXPECT_EQ(base, middle_group({"", {1, 300}}, op, dtype, engine, 0, false)) << "run to run";
        EXPECT_EQ(base, middle_group({"", {1, 300}}, op, dtype, engine, 12345, false))
            << "expected_rows";
        EXPECT_EQ(base, middle_group({"", {1, 300}, 0, 500}, op, dtype, engine, 0, false))
            << "capacity";
        EXPECT_EQ(base, middle_group({"", {1, 300}, 5}, op, dtype, engine, 0, false)) << "begin";
        EXPECT_EQ(base, middle_group({"", {77, 300, 3, 90}}, op, dtype, engine, 0, false))
            << "others";
        EXPECT_EQ(base, middle_group({"", {1, 300}}, op, dtype, engine, 0, true)) << "indexed";
        set_thread_budget(3);
        EXPECT_EQ(base, middle_group({"", {77, 300, 3, 90}}, op, dtype, engine, 0, true))
            << "threads";
      }
    }
  }
  set_thread_budget(threads);
}

TEST(GroupedGemmSpecialValues, StayInTheirRowOrExpert) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Problem p({"", {4, 7}}, {13, 20}, dtype, DType::kFloat32, false);
    put(p.x, 5 * 13 + 3, NAN);
    put(p.dy, 5 * 20 + 2, HUGE_VAL);
    for (GroupedOp op : kOps) grouped_gemm(p.args(op), Stream());
    for (int64_t r = 0; r < 11; ++r) {
      for (int64_t n = 0; n < 20; ++n) ASSERT_EQ(std::isfinite(get(p.y, r, n)), r != 5);
      for (int64_t c = 0; c < 13; ++c) ASSERT_EQ(std::isfinite(get(p.dx, r, c)), r != 5);
    }
    for (int64_t i = 0; i < 260; ++i) ASSERT_TRUE(std::isfinite(get(p.dw, i)));
    for (int64_t n = 0; n < 20; ++n) ASSERT_TRUE(std::isnan(get(p.dw, 260 + n * 13 + 3)));
  }
}

// Buffers of more than 2^31 elements, of which a few rows at the end live. Only those are touched.
TEST(GroupedGemmBig, OffsetsAre64Bit) {
  constexpr int64_t kColumns = 1024, kRows = (int64_t{1} << 21) + 9;
  const auto map = [](DType dtype) {
    const size_t bytes = byte_size(dtype, kRows * kColumns);
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(p, MAP_FAILED);
    return TensorView(p, dtype, {kRows, kColumns});
  };
  const TensorView x = map(DType::kBFloat16), y = map(DType::kBFloat16);
  const Tensor w(DType::kBFloat16, {2, kColumns, kColumns});
  for (int64_t n = 0; n < kColumns; ++n) put(w, kColumns * kColumns + n * kColumns + n, 2);
  TestGroups groups({"", {0, 3}});
  groups.begin()[1] = kRows - 3;
  groups.begin()[2] = kRows;
  for (int64_t r = kRows - 3; r < kRows; ++r) {
    for (int64_t c = 0; c < kColumns; ++c) put(x, r * kColumns + c, (r + c) % 5);
  }
  GroupedGemmArgs args;
  args.groups = groups();
  args.groups.capacity = kRows;
  args.a.data = x;
  args.w = w.view();
  args.out = y;
  grouped_gemm(args, Stream());
  for (int64_t r = kRows - 3; r < kRows; ++r) {
    for (int64_t c = 0; c < kColumns; ++c) ASSERT_EQ(get(y, r, c), 2 * ((r + c) % 5));
  }
  for (const TensorView& v : {x, y}) munmap(v.raw(), v.bytes());
}

TEST(GroupedBiasGrad, BlocksOf128RowsThenTheirSums) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (bool scaled : {false, true}) {
      const Problem p({"", {300, 0, 128, 1}, 3}, {4, 70}, dtype, DType::kFloat32, false);
      const Tensor dbias(DType::kFloat32, {4, 70});
      fill(dbias, NAN);
      GroupedBiasGradArgs args;
      args.groups = p.groups();
      args.dy.data = p.dy;
      if (scaled) args.scale_R = p.scale;
      args.dbias_EN = dbias;
      grouped_bias_grad(args, Stream());
      for (int64_t e = 0; e < 4; ++e) {
        const RowRange range = group_rows(p.groups(), e);
        for (int64_t n = 0; n < 70; ++n) {
          float total = 0;
          for (int64_t b = 0; b < range.rows; b += 128) {
            float sum = 0;
            for (int64_t i = b; i < std::min(range.rows, b + 128); ++i) {
              const int64_t r = range.begin + i;
              const float v = static_cast<float>(get(p.dy, r, n));
              sum = scaled ? std::fma(v, static_cast<float>(get(p.scale, r)), sum) : sum + v;
            }
            total += sum;
          }
          ASSERT_EQ(dbias.data<float>()[e * 70 + n], total);
        }
      }
      args.beta.value = 1;
      const Tensor once = copy_of(dbias);
      grouped_bias_grad(args, Stream());
      for (int64_t i = 0; i < 280; ++i) {
        const float twice = once.data<float>()[i] + once.data<float>()[i];
        ASSERT_EQ(dbias.data<float>()[i], twice);
      }
    }
  }
}

TEST(GroupedScaleGrad, IsTheCanonicalRowDot) {
  const Problem p({"", {3, 0, 2}, 1}, {4, 150}, DType::kBFloat16, DType::kFloat32, false);
  const Tensor dscale(DType::kFloat32, {p.groups.capacity()});
  fill(dscale, kSentinel);
  GroupedScaleGradArgs args{p.groups(), {p.dy, {}}, p.bias, dscale, false};
  grouped_scale_grad(args, Stream());
  const std::vector<int64_t> owner = p.groups.owners();
  std::vector<float> dots(p.groups.capacity());
  for (int64_t r = 0; r < p.groups.capacity(); ++r) {
    if (owner[r] < 0) {
      ASSERT_EQ(get(dscale, r), kSentinel);
      continue;
    }
    for (int64_t s = 0; s < 150; s += 64) {
      float lane[4] = {};
      for (int64_t q = 0; q < 4; ++q) {
        for (int64_t j = 0; j < 8; ++j) {
          for (int64_t c : {s + 8 * j + 2 * q, s + 8 * j + 2 * q + 1}) {
            if (c < 150)
              lane[q] = std::fma(float(get(p.dy, r, c)), float(get(p.bias, owner[r], c)), lane[q]);
          }
        }
      }
      dots[r] += (lane[0] + lane[1]) + (lane[2] + lane[3]);
    }
    ASSERT_EQ(dscale.data<float>()[r], dots[r]);
  }
  args.accumulate = true;
  grouped_scale_grad(args, Stream());
  for (int64_t r = 0; r < p.groups.capacity(); ++r) {
    ASSERT_EQ(dscale.data<float>()[r], owner[r] < 0 ? kSentinel : dots[r] + dots[r]);
  }
}

TEST(GroupedGemmErrors, NameTheArguments) {
  const Problem p({"", {4, 5}}, {8, 16}, DType::kFloat32, DType::kFloat32, false);
  GroupedGemmArgs args = p.args(GroupedOp::kForward);
  args.w = p.dw.view().slice(2, 0, 7);
  EXPECT_THROW(grouped_gemm(args, Stream()), Error);
  args = p.args(GroupedOp::kForward);
  args.bias_scale_R = p.scale;
  EXPECT_THROW(grouped_gemm(args, Stream()), Error);
  args = p.args(GroupedOp::kDgrad);
  args.bias_EN = p.bias;
  EXPECT_THROW(grouped_gemm(args, Stream()), Error);
  args = p.args(GroupedOp::kWgrad);
  args.alpha.per_group = p.scale;
  EXPECT_THROW(grouped_gemm(args, Stream()), Error);
}

}  // namespace
}  // namespace moiety::gemm
