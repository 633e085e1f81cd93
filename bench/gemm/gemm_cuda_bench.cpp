// Products on a GPU: dense ones by cuBLASLt and by Moiety's tiles; grouped ones of the experts of
// known models, against one dense product of as many operations; and whole experts, forward and
// backward.
#include <cmath>
#include <functional>

#include "bench/gemm/bursts.h"
#include "moiety/gemm/grouped_mlp.h"

namespace moiety::bench {
namespace {

using gemm::GemmArgs;
using gemm::GemmOp;
using gemm::GroupedGemmArgs;
using gemm::GroupedOp;

struct DenseShape {
  int64_t m, n, k;
};
constexpr DenseShape kDense[] = {
    {8192, 8192, 8192}, {8192, 5120, 2048}, {8192, 2048, 4096}, {2048, 5120, 8192}};

struct DenseOp {
  const char* name;
  GemmOp op;
  DType out;
};
constexpr DenseOp kDenseOps[] = {{"tn", GemmOp::kTN, DType::kBFloat16},
                                 {"nn", GemmOp::kNN, DType::kBFloat16},
                                 {"nt", GemmOp::kNT, DType::kFloat32}};

// Measures TFLOP/s. `tiles` takes Moiety's kernel, which a scale of an operand asks for.
double measure_dense(const DenseOp& op, const DenseShape& s, DType dtype, bool tiles,
                     const Stream& stream, double cublas = 0) {
  const bool a_turned = op.op == GemmOp::kNT, b_turned = op.op == GemmOp::kTN;
  const Tensor a = random_on_gpu(dtype, {a_turned ? s.k : s.m, a_turned ? s.m : s.k}, stream);
  const Tensor b = random_on_gpu(dtype, {b_turned ? s.n : s.k, b_turned ? s.k : s.n}, stream);
  const Tensor out(op.out, {s.m, s.n}, kGpu), one = random_on_gpu(DType::kFloat32, {1}, stream);
  GemmArgs args{.op = op.op, .a = a, .b = b, .out = out};
  if (tiles) args.a_scale.tensor = one;
  const Timing time = measure([&](int64_t) { gemm::gemm(args, stream); }, stream, 0.15);
  const bool half = dtype == DType::kBFloat16;
  Row row{text("gemm.{}.{}.{}", op.name, half ? "bf16" : "fp32", tiles ? "tiles" : "auto"),
          text("{}x{}x{}", s.m, s.n, s.k), tera(2.0 * double(s.m * s.n) * double(s.k), time.ms),
          "TFLOP/s", time};
  row.device = kGpu;
  if (cublas > 0) {
    row.against = "cuBLASLt";
    row.ratio = row.value / cublas;
  }
  print(row);
  return row.value;
}

void measure_all_dense(const Stream& stream) {
  for (const DenseShape& s : kDense) {
    for (const DenseOp& op : kDenseOps) {
      const double cublas = measure_dense(op, s, DType::kBFloat16, false, stream);
      measure_dense(op, s, DType::kBFloat16, true, stream, cublas);
    }
  }
  measure_dense({"tn", GemmOp::kTN, DType::kFloat32}, {4096, 4096, 4096}, DType::kFloat32, false,
                stream);
  // A router's gradients.
  measure_dense({"nn", GemmOp::kNN, DType::kBFloat16}, {8192, 2048, 128}, DType::kFloat32, false,
                stream);
  measure_dense({"nt", GemmOp::kNT, DType::kFloat32}, {128, 2048, 8192}, DType::kFloat32, false,
                stream);
}

struct GroupedShape {
  const char* name;
  int64_t rows, model, ffn, experts;
  bool skewed = false;   // Zipf instead of 0.7 to 1.3 of the mean
  bool gpt_oss = false;  // its gate and biases (configs/gpt-oss-20b-experts.toml)
};
constexpr GroupedShape kGrouped[] = {{"qwen3-30b", 65536, 2048, 768, 128},
                                     {"qwen3-30b zipf", 65536, 2048, 768, 128, true},
                                     {"qwen3-30b E16", 65536, 2048, 768, 16},
                                     {"mixtral", 16384, 4096, 14336, 8},
                                     {"gptoss", 32768, 2880, 2880, 32, false, true}};

std::vector<int64_t> begins(const GroupedShape& s) {
  std::vector<double> weight(s.experts);
  double sum = 0;
  for (int64_t e = 0; e < s.experts; ++e) {
    const uint32_t word = philox(rng_key(9, RngDomain::kInit), {uint32_t(e), 0, 0, 0})[0];
    sum += weight[e] = s.skewed ? 1 / double(e + 1) : 0.7 + 0.6 * word * 0x1p-32;
  }
  std::vector<int64_t> out{0};
  double end = 0;
  for (int64_t e = 0; e < s.experts; ++e) {
    end += weight[e] / sum * double(s.rows);
    out.push_back(e == s.experts - 1 ? s.rows : std::llround(end));
  }
  return out;
}

void measure_grouped(const GroupedShape& s, const Stream& stream) {
  std::vector<int64_t> rows = begins(s);
  const Tensor begin(DType::kInt64, {s.experts + 1}, kGpu);
  copy(begin, TensorView(rows.data(), DType::kInt64, {s.experts + 1}), stream);
  const DType half = DType::kBFloat16;
  const int64_t n = 2 * s.ffn, c = s.model;
  const Tensor x = random_on_gpu(half, {s.rows, c}, stream),
               y = random_on_gpu(half, {s.rows, n}, stream),
               w = random_on_gpu(half, {s.experts, n, c}, stream),
               dw(DType::kFloat32, {s.experts, n, c}, kGpu);
  const double flop = 2.0 * double(s.rows) * double(n * c);
  struct Kind {
    const char* name;
    GroupedOp op;
    const DenseOp* dense;
    DenseShape shape;
  };
  for (const Kind& kind : {Kind{"fwd", GroupedOp::kForward, &kDenseOps[0], {s.rows, n, c}},
                           Kind{"dgrad", GroupedOp::kDgrad, &kDenseOps[1], {s.rows, c, n}},
                           Kind{"wgrad", GroupedOp::kWgrad, &kDenseOps[2], {n, c, s.rows}}}) {
    const double dense = measure_dense(*kind.dense, kind.shape, half, false, stream);
    GroupedGemmArgs args;
    args.op = kind.op;
    args.groups.begin_E1 = begin;
    args.groups.experts = s.experts;
    args.groups.capacity = s.rows;
    args.a.data = kind.op == GroupedOp::kForward ? x : y;
    if (kind.op == GroupedOp::kWgrad) {
      args.b.data = x;
      args.w = dw.view();
      args.beta.value = 1;
    } else {
      args.w = w.view();
      args.out = kind.op == GroupedOp::kForward ? y : x;
    }
    const Timing time = measure([&](int64_t) { gemm::grouped_gemm(args, stream); }, stream, 0.15);
    Row row{text("grouped_gemm.{}", kind.name), s.name, tera(flop, time.ms), "TFLOP/s", time};
    row.device = kGpu;
    row.against = "dense gemm";
    row.ratio = row.value / dense;
    print(row);
  }
}

// Experts with router probabilities; backward adds to fp32 gradients.
void measure_mlp(const GroupedShape& s, const Stream& stream) {
  std::vector<int64_t> rows = begins(s);
  const Tensor begin(DType::kInt64, {s.experts + 1}, kGpu);
  copy(begin, TensorView(rows.data(), DType::kInt64, {s.experts + 1}), stream);
  const DType half = DType::kBFloat16;
  const int64_t hidden = 2 * s.ffn;
  const auto random = [&](DType dtype, std::initializer_list<int64_t> sizes) {
    return random_on_gpu(dtype, sizes, stream);
  };
  const Tensor x = random(half, {s.rows, s.model}), d_o = random(half, {s.rows, s.model}),
               prob = random(DType::kFloat32, {s.rows}),
               w1 = random(half, {s.experts, hidden, s.model}),
               w2 = random(half, {s.experts, s.model, s.ffn}),
               b1 = random(half, {s.experts, hidden}), b2 = random(half, {s.experts, s.model});
  const Tensor h(half, {s.rows, hidden}, kGpu), o(half, {s.rows, s.model}, kGpu),
      a(half, {s.rows, s.ffn}, kGpu), dh(half, {s.rows, hidden}, kGpu),
      dx(half, {s.rows, s.model}, kGpu), dprob(DType::kFloat32, {s.rows}, kGpu),
      dw1(DType::kFloat32, {s.experts, hidden, s.model}, kGpu),
      dw2(DType::kFloat32, {s.experts, s.model, s.ffn}, kGpu),
      db1(DType::kFloat32, {s.experts, hidden}, kGpu),
      db2(DType::kFloat32, {s.experts, s.model}, kGpu);
  const gemm::PathReport path = gemm::choose_grouped_mlp({half, s.model, s.ffn}, kGpu);
  gemm::GroupedMlp mlp{
      .path = path.path, .activation = gemm::swiglu(), .w1 = w1.view(), .w2 = w2.view()};
  if (s.gpt_oss) {
    mlp.activation = gemm::qgeglu(1.702f, 7, 1);
    mlp.b1_EH = b1;
    mlp.b2_ED = b2;
  }
  const gemm::MlpInput input{
      .groups = {.begin_E1 = begin, .experts = s.experts, .capacity = s.rows},
      .x = x,
      .prob_R = prob};
  const Tensor workspace(DType::kUInt8, {grouped_mlp_workspace(mlp, input)}, kGpu);
  const gemm::GroupScalar add{.value = 1};
  gemm::MlpGradients gradients{.d_o = d_o, .h = h, .dh = dh, .a = a, .dx = dx, .dprob_R = dprob};
  if (s.gpt_oss) {
    gradients.db1_EH = db1;
    gradients.db2_ED = db2;
    gradients.bias_beta = add;
  }
  // There are three products of this size each.
  const double flop = 6.0 * double(s.rows) * double(s.model * s.ffn);
  const auto report = [&](const char* name, const std::function<void()>& call) {
    const Timing time = measure([&](int64_t) { call(); }, stream, 0.15);
    Row row{text("grouped_mlp.{}", name), s.name, tera(flop, time.ms), "TFLOP/s", time};
    row.device = kGpu;
    row.more = text(R"("experts": "{}")", path.describe());
    print(row);
  };
  report("fwd", [&] { grouped_mlp_forward(mlp, input, h, o, workspace, stream); });
  report("bwd data", [&] { grouped_mlp_backward_data(mlp, input, gradients, workspace, stream); });
  report("bwd weights", [&] {
    grouped_mlp_backward_weights(mlp, input, gradients, {dw2.view(), add}, {dw1.view(), add},
                                 stream);
  });
}

void run(Options& options) {
  std::string device = "cuda", part = "all";
  options.choice("--device", device, {"cuda"}, "where");
  options.choice("--part", part, {"all", "dense", "grouped", "mlp"}, "what is measured");
  if (!options.parse()) return;
  require_device("gemm_cuda_bench", kGpu);
  const Stream stream = Stream::on(kGpu);
  const auto wanted = [&](const char* what) { return part == "all" || part == what; };
  if (wanted("dense")) measure_all_dense(stream);
  for (const GroupedShape& s : kGrouped) {
    if (wanted("grouped")) measure_grouped(s, stream);
    if (wanted("mlp")) measure_mlp(s, stream);
  }
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "Dense and grouped products on a GPU.",
                                 moiety::bench::run);
}
