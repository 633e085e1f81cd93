// gemm on a GPU against the CPU reference: bit for bit with fp32 operands and on integers, within
// the bound of gemm.h else.
#include "moiety/gemm/gemm.h"

#include "moiety/base/graph.h"
#include "moiety/base/trace.h"
#include "moiety/gemm/gemm_cuda.h"
#include "tests/gemm_gpu/bounds.h"
#include "tests/support/error_of.h"

namespace moiety::gemm {
namespace {

struct Case {
  int64_t m, n, k;
  int64_t pad = 0;  // elements that rows are longer by
};

// Around the tiles (128 x 128 x 64, 128 x 64 x 16, 32 x 32 x 64), for both paths of loads, and for
// cuBLASLt.
const std::vector<Case> kCases = {
    {0, 5, 3},         {5, 0, 3},      {3, 4, 0},         {1, 1, 1},
    {1, 24, 40},       {5, 7, 9, 3},   {16, 16, 16},      {17, 33, 65, 1},
    {64, 256, 64, 8},  {127, 255, 63}, {128, 256, 128},   {129, 257, 130},
    {130, 264, 72, 8}, {300, 40, 520}, {40, 520, 304, 8}, {256, 384, 512}};

struct Problem {
  Problem(GemmOp op, const Case& s, DType dtype, DType out_dtype, const Stream& stream) {
    const bool a_turned = op == GemmOp::kNT, b_turned = op == GemmOp::kTN;
    a = Twin(dtype, {a_turned ? s.k : s.m, (a_turned ? s.m : s.k) + s.pad}, stream);
    b = Twin(dtype, {b_turned ? s.n : s.k, (b_turned ? s.k : s.n) + s.pad}, stream);
    c = Twin(out_dtype, {s.m, s.n + s.pad}, stream);
    out = Twin(out_dtype, {s.m, s.n + s.pad}, stream);
    shape = s;
    base.op = op;
  }
  void fill(bool integers, const Stream& stream) const {
    uint32_t id = 0;
    for (const Twin* x : {&a, &b, &c, &out}) {
      integers ? fill_integers(x->host, ++id, 4) : fill_normal(x->host, ++id);
      x->upload(stream);
    }
  }
  GemmArgs args(Side side) const {
    const auto part = [&](const Twin& x) {
      const TensorView all = side(x);
      return all.slice(1, 0, all.size(1) - shape.pad);
    };
    GemmArgs args = base;
    args.a = part(a);
    args.b = part(b);
    args.out = part(out);
    if (with_c) args.c = part(c);
    return args;
  }
  Product block(Side side) const {
    const GemmArgs x = args(side);
    Product g;
    g.op = x.op;
    g.dtype = x.a.dtype();
    g.m = shape.m;
    g.n = shape.n;
    g.k = shape.k;
    g.a = {x.a.raw(), x.a.stride(0)};
    g.b = {x.b.raw(), x.b.stride(0)};
    const TensorView& old = with_c ? x.c : x.out;
    g.epilogue = {.alpha = {x.alpha},
                  .beta = {x.beta},
                  .out = x.out.raw(),
                  .out_dtype = x.out.dtype(),
                  .out_stride = x.out.stride(0),
                  .old = old.raw(),
                  .old_dtype = old.dtype(),
                  .old_stride = old.stride(0)};
    return g;
  }
  // The sums of the magnitudes of products and their terms.
  Tensor magnitude(const Stream& stream) {
    Problem p = {base.op, shape, a.host.view().dtype(), DType::kFloat32, stream};
    p.base = base;
    p.base.alpha = std::fabs(base.alpha);
    p.base.beta = std::fabs(base.beta);
    p.with_c = with_c;
    p.fill(false, stream);
    for (const Twin* x : {&p.a, &p.b, &p.c, &p.out}) make_absolute(x->host);
    block_gemm(p.block(kHost), GemmEngine::kReference);
    return std::move(p.out.host);
  }

  GemmArgs base;
  bool with_c = false;
  Case shape{};
  Twin a, b, c, out;
};

class GemmGpu : public GpuTest,
                public testing::WithParamInterface<std::tuple<GemmOp, DType, DType>> {
 protected:
  void check(const Case& s, bool integers, float alpha, float beta, bool with_c) {
    const auto& [op, dtype, out_dtype] = GetParam();
    SCOPED_TRACE(text("{} x {} x {} + {}, integers {}, c {}, beta {}", s.m, s.n, s.k, s.pad,
                      integers, with_c, beta));
    Problem p(op, s, dtype, out_dtype, stream);
    p.fill(integers, stream);
    p.base.alpha = alpha;
    p.base.beta = beta;
    p.with_c = with_c;
    const Tensor before = p.out.download(stream);
    gemm(p.args(kOnGpu), stream);
    const Tensor got = p.out.download(stream);
    block_gemm(p.block(kHost), GemmEngine::kReference);
    if (integers || dtype == DType::kFloat32) {
      ASSERT_EQ(difference(got, p.out.host), "");
    } else {
      ASSERT_EQ(outside_bound(got, p.out.host, p.magnitude(stream), double(s.k)), "");
    }
    // cuBLASLt and our tiles are both held to it.
    if (dtype != DType::kBFloat16 || !integers || s.m * s.n == 0) return;
    copy(p.out.gpu, before, stream);
    if (!gemm_cublaslt(p.block(kOnGpu), stream)) return;
    ASSERT_EQ(difference(p.out.download(stream), p.out.host), "") << "cuBLASLt";
    copy(p.out.gpu, before, stream);
    const Tensor one = Tensor(DType::kFloat32, {1}, kGpu);
    GemmArgs tiles = p.args(kOnGpu);
    const float factor = 1;
    copy(one, TensorView(const_cast<float*>(&factor), DType::kFloat32, {1}), stream);
    tiles.a_scale.tensor = one;
    gemm(tiles, stream);
    ASSERT_EQ(difference(p.out.download(stream), p.out.host), "") << "tiles";
  }
};

TEST_P(GemmGpu, EqualsReference) {
  for (const Case& s : kCases) {
    check(s, true, 2, 1, false);
    check(s, true, 1, 0, false);
    check(s, true, 1, -2, true);
    check(s, true, 2, 1, true);
    check(s, false, 0.75f, -0.5f, false);
    check(s, false, 1, 1, true);
  }
}

TEST_P(GemmGpu, BetaZeroNeverReadsOld) {
  const auto& [op, dtype, out_dtype] = GetParam();
  for (const Case& s : {Case{24, 40, 16}, Case{7, 18, 0}, Case{130, 70, 33}}) {
    Problem p(op, s, dtype, out_dtype, stream);
    p.fill(true, stream);
    fill(p.out.host, NAN);
    p.out.upload(stream);
    gemm(p.args(kOnGpu), stream);
    block_gemm(p.block(kHost), GemmEngine::kReference);
    EXPECT_EQ(difference(p.out.download(stream), p.out.host), "");
  }
}

TEST_P(GemmGpu, ResidualOfAnotherDtype) {
  const auto& [op, dtype, out_dtype] = GetParam();
  for (const Case& s : {Case{40, 72, 56}, Case{45, 70, 52, 1}, Case{300, 520, 136, 8}}) {
    Problem p(op, s, dtype, out_dtype, stream);
    p.fill(true, stream);
    const Twin residual(
        converted(p.c.host, out_dtype == DType::kFloat32 ? DType::kBFloat16 : DType::kFloat32),
        stream);
    p.base.beta = 1;
    for (const Side side : {kHost, kOnGpu}) {
      GemmArgs args = p.args(side);
      args.c = side(residual).slice(1, 0, s.n);
      gemm(args, side.gpu ? stream : Stream());
    }
    EXPECT_EQ(difference(p.out.download(stream), p.out.host), "") << s.m;
  }
}

TEST_P(GemmGpu, ScalesOfOperands) {
  const auto& [op, dtype, out_dtype] = GetParam();
  const Case s{140, 300, 272, 8};
  Problem p(op, s, dtype, out_dtype, stream);
  p.fill(true, stream);
  const Twin tensor_a(DType::kFloat32, {1}, stream), tensor_b(DType::kFloat32, {1}, stream);
  put(tensor_a.host, 0, 0.5);
  put(tensor_b.host, 0, 4);
  const Twin block_a(DType::kFloat32, {s.m, 3}, stream), block_b(DType::kFloat32, {3, 3}, stream);
  for (const Twin* x : {&block_a, &block_b}) {
    for (int64_t i = 0; i < x->host.view().numel(); ++i) {
      put(x->host, i, std::ldexp(1.0, int(i * 7 % 5) - 2));
    }
  }
  for (const Twin* x : {&tensor_a, &tensor_b, &block_a, &block_b}) x->upload(stream);
  for (const bool blocks : {false, true}) {
    if (blocks && op == GemmOp::kNT) continue;
    for (const Side side : {kHost, kOnGpu}) {
      GemmArgs args = p.args(side);
      args.a_scale.tensor = side(tensor_a);
      args.b_scale.tensor = side(tensor_b);
      if (blocks) {
        args.a_scale.block = side(block_a);
        args.b_scale.block = side(block_b);
        args.b_scale.block_rows = 128;
      }
      gemm(args, side.gpu ? stream : Stream());
    }
    EXPECT_EQ(difference(p.out.download(stream), p.out.host), "") << blocks;
  }
}

// The gradient of a weight, added over micro-batches, the same bits every time.
TEST_P(GemmGpu, CapturedAndRepeated) {
  const auto& [op, dtype, out_dtype] = GetParam();
  Problem p(op, {200, 136, 1000, 8}, dtype, out_dtype, stream);
  p.base.beta = 1;
  const Graph graph(stream, [&] { gemm(p.args(kOnGpu), stream); });
  Tensor first;
  for (int run = 0; run < 3; ++run) {
    p.fill(false, stream);
    run == 2 ? gemm(p.args(kOnGpu), stream) : graph.launch(stream);
    const Tensor got = p.out.download(stream);
    if (run == 0) first = copy_of(got);
    EXPECT_EQ(difference(got, first), "");
  }
  block_gemm(p.block(kHost), GemmEngine::kReference);
  EXPECT_EQ(outside_bound(first, p.out.host, p.magnitude(stream), 1000), "");
}

std::string param_name(const testing::TestParamInfo<GemmGpu::ParamType>& info) {
  const char* ops[] = {"TN", "NN", "NT"};
  return text("{}_{}_{}", ops[int(std::get<0>(info.param))], name(std::get<1>(info.param)),
              name(std::get<2>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(All, GemmGpu,
                         testing::Combine(testing::Values(GemmOp::kTN, GemmOp::kNN, GemmOp::kNT),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(DType::kFloat32, DType::kBFloat16)),
                         param_name);

using CublasLtGpu = GpuTest;

TEST_F(CublasLtGpu, TakesTheShapesOfModels) {
  if (!cublaslt_status().available) GTEST_SKIP() << cublaslt_status().text;
  std::printf("%s\n", cublaslt_status().text.c_str());
  for (const GemmOp op : {GemmOp::kTN, GemmOp::kNN, GemmOp::kNT}) {
    for (const DType out : {DType::kBFloat16, DType::kFloat32}) {
      Problem p(op, {512, 256, 384}, DType::kBFloat16, out, stream);
      p.base.beta = 1;
      p.with_c = out == DType::kBFloat16;  // a residual; fp32: main_grad
      EXPECT_TRUE(gemm_cublaslt(p.block(kOnGpu), stream)) << int(op) << name(out);
    }
  }
  stream.synchronize();
}

TEST_F(CublasLtGpu, IsASpanOfAProfile) {
  if (!cublaslt_status().available) GTEST_SKIP() << cublaslt_status().text;
  Problem p(GemmOp::kTN, {64, 48, 80}, DType::kBFloat16, DType::kFloat32, stream);
  Trace trace;
  set_current_trace(&trace);
  gemm(p.args(kOnGpu), stream);
  set_current_trace(nullptr);
  stream.synchronize();
  ASSERT_EQ(trace.events.size(), 1u);
  const TraceEvent& event = trace.events[0];
  EXPECT_STREQ(event.name, "gemm cublaslt");
  EXPECT_EQ(event.lane, TraceLane::kCompute);
  EXPECT_STREQ(event.args[3].name, "flops");
  EXPECT_EQ(event.args[3].value, 2.0 * 64 * 48 * 80);
}

// The area that these arguments ask for, full of NaN, or one of a byte.
Tensor work_area(const GemmArgs& args, const Stream& stream) {
  const int64_t bytes = std::max<int64_t>(gemm_workspace(args, stream), 1);
  const Tensor host(DType::kUInt8, {bytes});
  Tensor area(DType::kUInt8, {bytes}, stream.device());
  std::memset(host.view().raw(), 0xFF, bytes);
  copy(area, host, stream);
  stream.synchronize();
  return area;
}

// The last shapes are those whose reductions cuBLASLt splits.
const std::vector<Case> kAreaCases = {
    {64, 48, 80}, {512, 256, 384}, {64, 64, 16384}, {128, 32, 8192}};

TEST_F(CublasLtGpu, WorksInTheCallersMemory) {
  for (const GemmOp op : {GemmOp::kTN, GemmOp::kNN, GemmOp::kNT}) {
    for (const Case& s : kAreaCases) {
      Problem p(op, s, DType::kBFloat16, DType::kFloat32, stream);
      p.fill(false, stream);
      gemm(p.args(kOnGpu), stream);
      const Tensor expected = p.out.download(stream);
      p.out.upload(stream);
      GemmArgs args = p.args(kOnGpu);
      const Tensor area = work_area(args, stream);
      args.workspace = area;
      gemm(args, stream);
      EXPECT_EQ(difference(p.out.download(stream), expected), "") << int(op) << " k " << s.k;
      if (area.view().bytes() <= 1) continue;
      args.workspace = area.view().slice(0, 0, area.view().bytes() - 1);
      EXPECT_NE(error_of([&] { gemm(args, stream); }).find("gemm: workspace is uint8"),
                std::string::npos);
    }
  }
}

TEST_F(CublasLtGpu, GraphsOfOneStreamRunSideBySide) {
  for (const Case& s : kAreaCases) {
    const Stream others[] = {Stream::on(kGpu), Stream::on(kGpu)};
    Problem problems[] = {{GemmOp::kTN, s, DType::kBFloat16, DType::kFloat32, stream},
                          {GemmOp::kNT, s, DType::kBFloat16, DType::kFloat32, stream}};
    std::vector<Tensor> expected, areas;
    std::vector<Graph> graphs;
    for (Problem& p : problems) {
      p.fill(false, stream);
      GemmArgs args = p.args(kOnGpu);
      gemm(args, stream);
      expected.push_back(p.out.download(stream));
      areas.push_back(work_area(args, stream));
      args.workspace = areas.back();
      graphs.emplace_back(stream, [&] {
        for (int i = 0; i < 10; ++i) gemm(args, stream);
      });
    }
    for (int i = 0; i < 2; ++i) {
      problems[i].out.upload(others[i]);
      graphs[i].launch(others[i]);
    }
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(difference(problems[i].out.download(others[i]), expected[i]), "") << i;
    }
  }
}

TEST_F(CublasLtGpu, DoublesAndForeignTensorsAreErrors) {
  Problem p(GemmOp::kTN, {4, 4, 4}, DType::kFloat32, DType::kFloat32, stream);
  EXPECT_THROW(gemm(p.args(kHost), stream), Error);
  EXPECT_THROW(gemm(p.args(kOnGpu), Stream()), Error);
  const Tensor x(DType::kFloat64, {4, 4}, kGpu), y(DType::kFloat64, {4, 4}, kGpu);
  EXPECT_THROW(gemm({.op = GemmOp::kTN, .a = x, .b = x, .out = y}, stream), Error);
}

}  // namespace
}  // namespace moiety::gemm
