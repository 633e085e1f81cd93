// The six products of a layer's experts on a GPU, for the shapes of known models under random
// routing, as a share of one dense product: in short bursts from rest, when the chip's clock is
// high, and in a burst of a second, when its power decides.
#include "bench/gemm/bursts.h"
#include "bench/gemm/expert_shapes.h"
#include "moiety/gemm/grouped_gemm.h"

namespace moiety::bench {
namespace {

using gemm::GroupedGemmArgs;
using gemm::GroupedOp;

// Operands of one layer's experts.
struct Experts {
  Experts(const ExpertShape& shape, const std::string& spread, const Stream& stream)
      : s(shape), routing(shape, stream, spread) {
    const int64_t rows = s.rows();
    x_TD = random_on_gpu(kHalf, {s.tokens, s.model}, stream);
    x_RD = random_on_gpu(kHalf, {rows, s.model}, stream);
    h_RH = random_on_gpu(kHalf, {rows, 2 * s.ffn}, stream);
    a_RF = random_on_gpu(kHalf, {rows, s.ffn}, stream);
    w1 = random_on_gpu(kHalf, {s.experts, 2 * s.ffn, s.model}, stream);
    w2 = random_on_gpu(kHalf, {s.experts, s.model, s.ffn}, stream);
  }
  GroupedGemmArgs args(GroupedOp op, const gemm::GroupedTensor& a) const {
    GroupedGemmArgs args;
    args.op = op;
    args.groups = routing.groups;
    args.a = a;
    return args;
  }
  gemm::GroupedTensor gathered() const { return {x_TD, routing.source_R}; }

  ExpertShape s;
  Routing routing;
  Tensor x_TD, x_RD, h_RH, a_RF, w1, w2;
};

struct Product {
  const char* name;
  GroupedGemmArgs args;
  double flop;
};

std::vector<Product> products(const Experts& x, const TensorView& dw1, const TensorView& dw2,
                              float beta) {
  const double one = 2.0 * double(x.s.rows()) * double(x.s.model * x.s.ffn);
  std::vector<Product> out;
  const auto rows = [&](const char* name, GroupedOp op, const gemm::GroupedTensor& a,
                        const Tensor& w, const Tensor& result, double flop) {
    GroupedGemmArgs args = x.args(op, a);
    args.w = w.view();
    args.out = result;
    out.push_back({name, args, flop});
  };
  const auto weights = [&](const char* name, const gemm::GroupedTensor& dy,
                           const gemm::GroupedTensor& in, const TensorView& dw, double flop) {
    GroupedGemmArgs args = x.args(GroupedOp::kWgrad, dy);
    args.b = in;
    args.w = dw;
    args.beta.value = beta;
    out.push_back({name, args, flop});
  };
  const gemm::GroupedTensor token = x.gathered(), in{x.x_RD, {}}, h{x.h_RH, {}}, a{x.a_RF, {}};
  if (beta == 0) {
    rows("fc1", GroupedOp::kForward, in, x.w1, x.h_RH, 2 * one);
    rows("fc1 gathered", GroupedOp::kForward, token, x.w1, x.h_RH, 2 * one);
    rows("fc2", GroupedOp::kForward, a, x.w2, x.x_RD, one);
    rows("fc2 dgrad", GroupedOp::kDgrad, in, x.w2, x.a_RF, one);
    rows("fc2 dgrad gathered", GroupedOp::kDgrad, token, x.w2, x.a_RF, one);
    rows("fc1 dgrad", GroupedOp::kDgrad, h, x.w1, x.x_RD, 2 * one);
  }
  weights("fc2 wgrad", in, a, dw2, one);
  weights("fc2 wgrad gathered", token, a, dw2, one);
  weights("fc1 wgrad", h, in, dw1, 2 * one);
  weights("fc1 wgrad gathered", h, token, dw1, 2 * one);
  return out;
}

struct Measured {
  bool steady, indexed;
  std::string spread, only;
  Rates dense;
  double copy;  // TB/s
};

void measure_shape(const ExpertShape& s, const std::string& name, const Measured& how,
                   const Stream& stream) {
  const Experts x(s, how.spread, stream);
  struct Gradient {
    DType dtype;
    float beta;
    const char* name;
  };
  for (const Gradient& g : {Gradient{kHalf, 0, ""}, Gradient{DType::kFloat32, 0, " fp32"},
                            Gradient{DType::kFloat32, 1, " fp32 added"}}) {
    const Tensor dw1(g.dtype, {s.experts, 2 * s.ffn, s.model}, kGpu),
        dw2(g.dtype, {s.experts, s.model, s.ffn}, kGpu);
    for (Product& p : products(x, dw1, dw2, g.beta)) {
      if (g.dtype == DType::kFloat32 && p.args.op != GroupedOp::kWgrad) continue;
      const std::string title = text("{}{}", p.name, g.name);
      if (!wanted(title, how.only)) continue;
      if (how.indexed) p.args.w = gemm::GroupedWeight::split(p.args.w.packed());
      const Burst burst = bursts([&] { grouped_gemm(p.args, stream); }, how.steady, stream);
      Row row{"grouped_gemm." + title, name, tera(p.flop, burst.from_rest.ms), "TFLOP/s",
              burst.from_rest};
      row.device = kGpu;
      // The matrices of experts that have rows, once, beside a copy.
      const double bytes =
          double(x.routing.live_experts * byte_size(p.args.w.dtype(), s.ffn * s.model)) * p.flop /
          (2.0 * double(s.rows()) * double(s.model * s.ffn));
      row.more =
          text(R"("dense": {:.1f}, "share": {:.3f}, "copy": {:.2f}, "weights_share": {:.3f})",
               how.dense.from_rest, row.value / how.dense.from_rest, how.copy,
               bytes / burst.from_rest.ms * 1e-9 / how.copy);
      if (how.steady) row.more += steady_fields(burst, p.flop, how.dense);
      print(row);
    }
  }
}

// What a call costs the host; 20 us are allowed.
void measure_host(const Stream& stream) {
  for (const int64_t experts : {8, 128, 4096}) {
    const Experts x({"host", 8, 64, 64, experts, 1}, "random", stream);
    const Tensor dw1(kHalf, {experts, 2 * x.s.ffn, x.s.model}, kGpu),
        dw2(kHalf, {experts, x.s.model, x.s.ffn}, kGpu);
    for (const Product& p : products(x, dw1, dw2, 0)) {
      const Timing time = host_time([&] { grouped_gemm(p.args, stream); }, 40, stream);
      Row row{text("grouped_gemm.host {}", p.name), text("e{}", experts), time.ms * 1e3, "us",
              time};
      row.device = kGpu;
      print(row);
    }
  }
}

void run(Options& options) {
  std::string device = "cuda", shape, spread = "random", only;
  int64_t tokens = 0;
  bool steady = false, indexed = false, list = false, host = false;
  options.choice("--device", device, {"cuda"}, "where");
  options.choice("--shape", shape, expert_shape_names(), "one alone; else all");
  options.number("--tokens", tokens, "T in place of the shapes'");
  options.choice("--spread", spread, kSpreads, "how rows are spread over experts");
  options.word("--only", only, kOnlyHelp);
  options.flag("--indexed", indexed, "matrices by addresses of their own, not packed");
  options.flag("--steady", steady, "also bursts of a second");
  options.flag("--host", host, "instead what a call costs the host");
  options.flag("--list", list, "print the shapes and the routing, for peers");
  if (!options.parse()) return;
  const auto for_shapes = [&](auto&& run_one) {
    for (ExpertShape s : kExpertShapes) {
      if (!shape.empty() && shape != s.name) continue;
      std::string name = s.name;
      if (tokens > 0) name += text(" t{}", s.tokens = tokens);
      if (spread != "random") name += " " + spread;
      if (indexed) name += " indexed";
      run_one(s, name);
    }
  };
  if (list) {
    return for_shapes([&](const auto& s, const auto& name) { print_shape(s, name, spread); });
  }
  require_device("grouped_gemm_cuda_bench", kGpu);
  const Stream stream = Stream::on(kGpu);
  if (host) return measure_host(stream);
  const Rates dense = dense_rates(steady, stream);
  const Measured how{steady, indexed, spread, only, dense, copy_rate(stream)};
  for_shapes([&](const auto& s, const auto& name) { measure_shape(s, name, how, stream); });
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "Grouped products of experts on a GPU.",
                                 moiety::bench::run);
}
