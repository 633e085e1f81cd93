// grouped_gemm on a GPU over the table of groups against the CPU reference: bit for bit with fp32
// operands and on integers, within the bound of grouped_gemm.h else; dead rows, faults, replays.
#include "moiety/gemm/grouped_gemm.h"

#include "moiety/base/graph.h"
#include "moiety/gemm/grouped_block.h"
#include "tests/gemm/groups.h"
#include "tests/gemm_gpu/bounds.h"

namespace moiety::gemm {
namespace {

constexpr GroupedOp kOps[] = {GroupedOp::kForward, GroupedOp::kDgrad, GroupedOp::kWgrad};

struct Widths {
  int64_t c, n;
};

enum class Data { kIntegers, kNormal, kAbsolute };

struct Problem {
  Problem(const GroupCase& shape, Widths width_in, DType dtype, DType out_dtype, Data data,
          const Stream& stream_in)
      : stream(stream_in), groups(shape), width(width_in) {
    const int64_t rows = groups.capacity(), experts = groups.experts();
    count = Twin(groups().count_E, stream);
    begin = Twin(groups().begin_E1, stream);
    status = Twin(DType::kUInt32, {4}, stream);
    x = Twin(dtype, {rows, width.c}, stream);
    dy = Twin(dtype, {rows, width.n}, stream);
    w = Twin(dtype, {experts, width.n, width.c}, stream);
    y = Twin(out_dtype, {rows, width.n}, stream);
    dx = Twin(out_dtype, {rows, width.c}, stream);
    dw = Twin(out_dtype, {experts, width.n, width.c}, stream);
    bias = Twin(dtype, {experts, width.n}, stream);
    scale = Twin(DType::kFloat32, {rows}, stream);
    uint32_t id = 0;
    for (const Twin* t : {&x, &dy, &w, &bias, &scale}) {
      data == Data::kIntegers ? fill_integers(t->host, ++id, 4) : fill_normal(t->host, ++id);
      if (data == Data::kAbsolute) make_absolute(t->host);
    }
    kill_dead_rows();
    poison();
  }

  void kill_dead_rows() const {
    for (const Twin* t : {&x, &dy, &scale}) groups.fill_dead_rows(t->host, NAN);
    for (const Twin* t : {&x, &dy, &w, &bias, &scale, &count, &begin}) t->upload(stream);
  }
  void poison(double value = kSentinel) const {
    for (const Twin* t : {&y, &dx, &dw}) {
      fill(t->host, value);
      t->upload(stream);
    }
  }
  const Twin& out(GroupedOp op) const {
    return op == GroupedOp::kForward ? y : op == GroupedOp::kDgrad ? dx : dw;
  }
  GroupedGemmArgs args(GroupedOp op, Side side) const {
    GroupedGemmArgs a;
    a.op = op;
    a.groups = groups();
    a.groups.count_E = side(count);
    a.groups.begin_E1 = side(begin);
    a.groups.status = side(status);
    a.a.data = side(op == GroupedOp::kForward ? x : dy);
    if (op == GroupedOp::kWgrad) {
      a.b.data = side(x);
      a.w = side(dw);
    } else {
      a.w = side(w);
      a.out = side(out(op));
    }
    return a;
  }
  // Runs args(side), changed by `change`, on both and compares the bits of what is written.
  template <class Change>
  std::string compare(GroupedOp op, Change&& change) const {
    for (const Side side : {kHost, kOnGpu}) {
      GroupedGemmArgs a = args(op, side);
      change(a, side);
      grouped_gemm(a, side.gpu ? stream : Stream());
    }
    return difference(out(op).download(stream), out(op).host) +
           difference(status.download(stream), status.host);
  }

  Stream stream;
  TestGroups groups;
  Widths width;
  Twin count, begin, status, x, dy, w, y, dx, dw, bias, scale;
};

class GroupedGemmGpu : public GpuTest, public testing::WithParamInterface<GroupCase> {
 protected:
  void check(Widths width, DType dtype, DType out_dtype, bool integers) {
    const Problem p(GetParam(), width, dtype, out_dtype, integers ? Data::kIntegers : Data::kNormal,
                    stream);
    for (GroupedOp op : kOps) {
      SCOPED_TRACE(text("op {} {} -> {} integers {}, C {} N {}", int(op), name(dtype),
                        name(out_dtype), integers, width.c, width.n));
      grouped_gemm(p.args(op, kOnGpu), stream);
      const Tensor got = p.out(op).download(stream);
      grouped_gemm_reference(p.args(op, kHost));
      if (integers || dtype == DType::kFloat32) {
        ASSERT_EQ(difference(got, p.out(op).host), "");
        continue;
      }
      const Problem m(GetParam(), width, dtype, DType::kFloat32, Data::kAbsolute, stream);
      grouped_gemm_reference(m.args(op, kHost));
      const int64_t terms = op == GroupedOp::kForward ? width.c
                            : op == GroupedOp::kDgrad ? width.n
                                                      : p.groups.capacity();
      ASSERT_EQ(outside_bound(got, p.out(op).host, m.out(op).host, double(terms)), "");
    }
    EXPECT_EQ(difference(p.status.download(stream), p.status.host), "");
  }
};

TEST_P(GroupedGemmGpu, EqualsReference) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (DType out_dtype : {DType::kFloat32, DType::kBFloat16}) {
      check({19, 24}, dtype, out_dtype, true);
      if (GetParam().counts.size() > 1000) continue;  // slow, and no other code
      check({19, 24}, dtype, out_dtype, false);
    }
  }
}

TEST_P(GroupedGemmGpu, WholeAndCutTiles) {
  if (GetParam().counts.size() > 1000) {  // slow
    return check({24, 40}, DType::kBFloat16, DType::kBFloat16, true);
  }
  check({136, 264}, DType::kBFloat16, DType::kBFloat16, true);
  check({72, 40}, DType::kBFloat16, DType::kFloat32, false);
}

INSTANTIATE_TEST_SUITE_P(Cases, GroupedGemmGpu, testing::ValuesIn(group_cases()),
                         [](const auto& info) { return info.param.name; });

using GroupedGemmParts = GpuTest;

TEST_F(GroupedGemmParts, WidthsOfModels) {
  for (const Widths& width : {Widths{8, 7168}, Widths{7168, 8}, Widths{40, 2880}, Widths{2880, 64},
                              Widths{64, 768}, Widths{768, 2880}, Widths{7168, 768}}) {
    for (const DType out_dtype : {DType::kBFloat16, DType::kFloat32}) {
      const Problem p({"", {130, 0, 1, 65}, 3}, width, DType::kBFloat16, out_dtype, Data::kIntegers,
                      stream);
      for (GroupedOp op : kOps) {
        EXPECT_EQ(p.compare(op, [](GroupedGemmArgs&, Side) {}), "")
            << int(op) << ", C " << width.c << " N " << width.n << " " << name(out_dtype);
      }
    }
  }
}

// More than 2^31 elements lie before what is read and written, of rows and of weights.
TEST_F(GroupedGemmParts, OffsetsAre64Bit) {
  constexpr int64_t kWidth = 1024, kRows = (int64_t{1} << 21) + 9, kExperts = 2100;
  if (gpu_free_memory(0) < int64_t{20} << 30) GTEST_SKIP() << "the GPU has less than 20 GiB free";
  GroupCase last{"", std::vector<int64_t>(kExperts)};
  last.counts.back() = 3;
  const TestGroups groups(last);
  groups.begin()[kExperts - 1] = kRows - 3;
  groups.begin()[kExperts] = kRows;
  const Twin count(groups().count_E, stream), begin(groups().begin_E1, stream);
  const Tensor x(DType::kBFloat16, {kRows, kWidth}, kGpu),
      y(DType::kBFloat16, {kRows, kWidth}, kGpu),
      w(DType::kBFloat16, {kExperts, kWidth, kWidth}, kGpu), rows(DType::kBFloat16, {3, kWidth}),
      twice(DType::kBFloat16, {kWidth, kWidth}), doubled(DType::kBFloat16, {3, kWidth}),
      squares(DType::kBFloat16, {kWidth, kWidth});
  for (const Tensor* t : {&x, &y, &w}) fill_bytes(*t, 0xFF, stream);  // NaN
  for (int64_t i = 0; i < 3 * kWidth; ++i) {
    put(rows, i, double(i % 5));
    put(doubled, i, double(i % 5 * 2));
  }
  for (int64_t n = 0; n < kWidth; ++n) put(twice, n * kWidth + n, 2);
  for (int64_t i = 0; i < kWidth * kWidth; ++i) {
    double sum = 0;
    for (int64_t r = 0; r < 3; ++r) sum += get(rows, r, i / kWidth) * get(rows, r, i % kWidth);
    put(squares, i, sum);
  }
  const auto end_of = [&](const Tensor& t) { return t.view().slice(0, kRows - 3, kRows); };
  copy(end_of(x), rows, stream);
  copy(w.view().select(kExperts - 1), twice, stream);
  GroupedGemmArgs args;
  args.groups = groups();
  args.groups.count_E = count.gpu;
  args.groups.begin_E1 = begin.gpu;
  args.groups.status = {};
  args.groups.capacity = kRows;
  args.a.data = x;
  args.w = w.view();
  args.out = y;
  for (const GroupedOp op : {GroupedOp::kForward, GroupedOp::kDgrad}) {
    args.op = op;
    grouped_gemm(args, stream);
    EXPECT_EQ(difference(to_host(end_of(y), stream), doubled), "") << int(op);
    fill_bytes(y, 0xFF, stream);
  }
  args.op = GroupedOp::kWgrad;
  args.b.data = x;
  args.out = {};
  grouped_gemm(args, stream);
  EXPECT_EQ(difference(to_host(w.view().select(kExperts - 1), stream), squares), "");
  EXPECT_EQ(get(to_host(w.view().select(kExperts - 2), stream), 0), 0);
}

TEST_F(GroupedGemmParts, FactorsAndBias) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Problem p({"", {30, 0, 150, 21, 1}, 5}, {40, 72}, dtype, DType::kFloat32, Data::kIntegers,
                    stream);
    const Twin alpha(DType::kFloat32, {5}, stream), beta(DType::kFloat32, {1}, stream);
    fill_integers(alpha.host, 20, 2);
    put(beta.host, 0, -1);
    alpha.upload(stream);
    beta.upload(stream);
    for (GroupedOp op : kOps) {
      for (const bool scaled : {false, true}) {
        p.poison(3);
        EXPECT_EQ(p.compare(op,
                            [&](GroupedGemmArgs& a, Side side) {
                              a.alpha.per_group = side(alpha);
                              a.beta.per_group = side(beta);
                              if (op != GroupedOp::kForward) return;
                              a.bias_EN = side(p.bias);
                              if (scaled) a.bias_scale_R = side(p.scale);
                            }),
                  "")
            << int(op);
      }
    }
  }
}

TEST_F(GroupedGemmParts, EmptyExpertsOverNanAndMainGrad) {
  const Problem p({"", {0, 9, 0, 70, 0}}, {24, 40}, DType::kBFloat16, DType::kFloat32,
                  Data::kIntegers, stream);
  p.poison(NAN);
  EXPECT_EQ(p.compare(GroupedOp::kWgrad, [](GroupedGemmArgs&, Side) {}), "");
  p.poison(0.5);
  EXPECT_EQ(p.compare(GroupedOp::kWgrad, [](GroupedGemmArgs& a, Side) { a.beta.value = 1; }), "");
}

// Rows from elsewhere, some of them zeros, some indices wrong.
TEST_F(GroupedGemmParts, GatheredRowsAndFaults) {
  for (const bool faulty : {false, true}) {
    const Problem p({"", {30, 0, 150, 21, 1}, 5}, {40, 72}, DType::kBFloat16, DType::kFloat32,
                    Data::kIntegers, stream);
    const int64_t rows = p.groups.capacity(), sources = 50;
    const Twin source(DType::kInt32, {rows}, stream);
    for (int64_t r = 0; r < rows; ++r) source.host.data<int32_t>()[r] = int32_t(r * 7 % 51) - 1;
    if (faulty) {
      source.host.data<int32_t>()[100] = sources;
      source.host.data<int32_t>()[60] = -2;
      p.count.host.data<int64_t>()[3] = -4;
      p.count.upload(stream);
    }
    source.upload(stream);
    const Twin x(DType::kBFloat16, {sources, 40}, stream),
        dy(DType::kBFloat16, {sources, 72}, stream);
    fill_integers(x.host, 31, 4);
    fill_integers(dy.host, 32, 4);
    x.upload(stream);
    dy.upload(stream);
    for (GroupedOp op : kOps) {
      EXPECT_EQ(p.compare(op,
                          [&](GroupedGemmArgs& a, Side side) {
                            a.a = {side(op == GroupedOp::kForward ? x : dy), side(source)};
                            if (op == GroupedOp::kWgrad) a.b = {side(x), side(source)};
                          }),
                "")
          << int(op) << faulty;
    }
    EXPECT_EQ(p.status.host.data<uint32_t>()[0], faulty ? kFaultGroup | kFaultIndex : 0u);
  }
}

TEST_F(GroupedGemmParts, IndexedWeights) {
  GroupCase many{"", std::vector<int64_t>(600)};
  for (size_t e = 0; e < many.counts.size(); ++e) many.counts[e] = int64_t(e % 3);
  const Problem p(many, {24, 16}, DType::kBFloat16, DType::kFloat32, Data::kIntegers, stream);
  // The matrices lie in another order in memory.
  const Twin w(DType::kBFloat16, {600, 16, 24}, stream), dw(DType::kFloat32, {600, 16, 24}, stream);
  fill_integers(w.host, 9, 4);
  w.upload(stream);
  for (GroupedOp op : kOps) {
    std::vector<TensorView> views[2];
    const std::string found = p.compare(op, [&](GroupedGemmArgs& a, Side side) {
      for (int64_t e = 0; e < 600; ++e) {
        const TensorView& all = op == GroupedOp::kWgrad ? side(dw) : side(w);
        views[side.gpu].push_back(all.select((e * 7) % 600));
      }
      a.w = std::span<const TensorView>(views[side.gpu]);
    });
    if (op != GroupedOp::kWgrad) {
      EXPECT_EQ(found, "") << int(op);
    }
  }
  EXPECT_EQ(difference(dw.download(stream), dw.host), "");
}

TEST_F(GroupedGemmParts, ScalesAndTransposedOperands) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Problem p({"", {128, 0, 256, 77}}, {264, 136}, dtype, DType::kFloat32, Data::kIntegers,
                    stream);
    const int64_t rows = p.groups.capacity();
    const auto scales = [&](std::initializer_list<int64_t> sizes) {
      Twin out(DType::kFloat32, sizes, stream);
      for (int64_t i = 0; i < out.host.view().numel(); ++i) {
        put(out.host, i, std::ldexp(1.0, int(i * 7 % 5) - 2));
      }
      out.upload(stream);
      return out;
    };
    const Twin tensor = scales({4}), a_x = scales({rows, 3}), b_x = scales({4, 2, 3}),
               a_dy = scales({rows, 2}), b_dy = scales({4, 3, 2}), rows_dy = scales({136, 4}),
               rows_x = scales({264, 4});
    EXPECT_EQ(p.compare(GroupedOp::kForward,
                        [&](GroupedGemmArgs& a, Side side) {
                          a.a_scale = {side(tensor), side(a_x), 1};
                          a.b_scale = {side(tensor), side(b_x), 128};
                        }),
              "");
    EXPECT_EQ(p.compare(GroupedOp::kDgrad,
                        [&](GroupedGemmArgs& a, Side side) {
                          a.a_scale = {side(tensor), side(a_dy), 1};
                          a.b_scale = {side(tensor), side(b_dy), 128};
                        }),
              "");
    Twin turned_x(dtype, {264, rows}, stream), turned_dy(dtype, {136, rows}, stream);
    fill_integers(turned_x.host, 40, 4);
    fill_integers(turned_dy.host, 41, 4);
    turned_x.upload(stream);
    turned_dy.upload(stream);
    for (const bool blocks : {false, true}) {
      EXPECT_EQ(p.compare(GroupedOp::kWgrad,
                          [&](GroupedGemmArgs& a, Side side) {
                            a.a = {side(turned_dy)};
                            a.b = {side(turned_x)};
                            a.transposed = true;
                            if (!blocks) return;
                            a.a_scale = {side(tensor), side(rows_dy), 1};
                            a.b_scale = {side(tensor), side(rows_x), 1};
                          }),
                "")
          << blocks;
    }
  }
}

// The bits of a group depend on its rows and weight alone.
TEST_F(GroupedGemmParts, OtherGroupsDoNotMatter) {
  const Problem alone({"", {0, 150, 0}}, {200, 264}, DType::kBFloat16, DType::kFloat32,
                      Data::kNormal, stream);
  const Problem among({"", {77, 150, 400}, 3}, {200, 264}, DType::kBFloat16, DType::kFloat32,
                      Data::kNormal, stream);
  const int64_t from = alone.groups.begin()[1], to = among.groups.begin()[1];
  for (const auto& [a, b] : {std::pair{&alone.x, &among.x}, std::pair{&alone.dy, &among.dy}}) {
    copy(b->gpu.view().slice(0, to, to + 150), a->gpu.view().slice(0, from, from + 150), stream);
  }
  for (GroupedOp op : kOps) {
    grouped_gemm(alone.args(op, kOnGpu), stream);
    grouped_gemm(among.args(op, kOnGpu), stream);
    const Tensor a = alone.out(op).download(stream), b = among.out(op).download(stream);
    const bool wgrad = op == GroupedOp::kWgrad;
    EXPECT_EQ(difference(copy_of(wgrad ? b.view().select(1) : b.view().slice(0, to, to + 150)),
                         copy_of(wgrad ? a.view().select(1) : a.view().slice(0, from, from + 150))),
              "")
        << int(op);
  }
}

TEST_F(GroupedGemmParts, OneCaptureServesEveryRouting) {
  const Problem p({"", {200, 0, 0, 0, 0, 0, 0, 0, 400}}, {40, 72}, DType::kBFloat16,
                  DType::kFloat32, Data::kIntegers, stream);
  std::vector<std::vector<int64_t>> counts = {{0, 0, 0, 0, 0, 0, 0, 0, 0},
                                              {600, 0, 0, 0, 0, 0, 0, 0, 0},
                                              {1, 2, 3, 5, 7, 11, 13, 127, 131},
                                              {60, 70, 60, 70, 60, 70, 60, 70, 80},
                                              {10, 9000, 5, 0, 0, 0, 0, 0, 1}};
  while (counts.size() < 50) {
    std::vector<int64_t> more(9);
    for (size_t e = 0; e < 9; ++e) more[e] = int64_t((counts.size() * 31 + e * 17) % 67);
    counts.push_back(more);
  }
  const Graph graph(stream, [&] {
    for (GroupedOp op : kOps) grouped_gemm(p.args(op, kOnGpu), stream);
  });
  for (const auto& split : counts) {
    int64_t row = 0;
    for (size_t e = 0; e < split.size(); ++e) {
      p.begin.host.data<int64_t>()[e] = row;
      p.count.host.data<int64_t>()[e] = split[e];
      row = std::min<int64_t>(600, row + split[e]);
    }
    p.begin.host.data<int64_t>()[split.size()] = row;
    p.begin.upload(stream);
    p.count.upload(stream);
    fill_integers(p.x.host, uint32_t(split[0]), 4);
    fill_integers(p.dy.host, uint32_t(split[0]) + 1, 4);
    p.x.upload(stream);
    p.dy.upload(stream);
    fill_bytes(p.status.gpu, 0, stream);
    fill_bytes(p.status.host, 0, Stream());
    p.poison();
    graph.launch(stream);
    for (GroupedOp op : kOps) {
      grouped_gemm(p.args(op, kHost), Stream());
      EXPECT_EQ(difference(p.out(op).download(stream), p.out(op).host), "") << int(op) << split[0];
    }
    EXPECT_EQ(difference(p.status.download(stream), p.status.host), "");
  }
}

TEST_F(GroupedGemmParts, BiasAndScaleGradients) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Problem p({"", {300, 0, 1100, 1, 128}, 5}, {8, 75}, dtype, dtype, Data::kNormal, stream);
    const Twin dbias(DType::kFloat32, {5, 75}, stream),
        dscale(DType::kFloat32, {p.groups.capacity()}, stream);
    for (const bool more : {false, true}) {
      for (const Side side : {kHost, kOnGpu}) {
        const GroupedGemmArgs a = p.args(GroupedOp::kDgrad, side);
        const Stream on = side.gpu ? stream : Stream();
        grouped_bias_grad({.groups = a.groups,
                           .dy = a.a,
                           .scale_R = more ? side(p.scale) : TensorView(),
                           .dbias_EN = side(dbias),
                           .beta = {.value = more ? 1.0f : 0.0f}},
                          on);
        grouped_scale_grad({a.groups, a.a, side(p.bias), side(dscale), more}, on);
      }
      EXPECT_EQ(difference(dbias.download(stream), dbias.host), "") << name(dtype);
      EXPECT_EQ(difference(dscale.download(stream), dscale.host), "") << name(dtype);
    }
  }
}

}  // namespace
}  // namespace moiety::gemm
