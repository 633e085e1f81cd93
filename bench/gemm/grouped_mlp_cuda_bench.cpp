// The experts of a layer on a GPU, for the shapes of known models under random routing: both products
// that an activation follows, with it, and the whole forward and backward passes, by every path, as
// a share of one dense product. "by maps" reads tokens where they lie and writes the sums of a
// token's rows, as the operators of the PyTorch package do.
#include "bench/gemm/bursts.h"
#include "bench/gemm/expert_shapes.h"
#include "moiety/gemm/grouped_gemm_cuda.h"
#include "moiety/gemm/grouped_mlp.h"

namespace moiety::bench {
namespace {

using gemm::MlpPath;

// Operands of one layer's experts, in the order of experts and as tokens.
struct Experts {
  Experts(const ExpertShape& shape, const Stream& stream) : s(shape), routing(shape, stream) {
    const int64_t rows = s.rows(), hidden = 2 * s.ffn;
    const auto random = [&](DType dtype, std::initializer_list<int64_t> sizes) {
      return random_on_gpu(dtype, sizes, stream);
    };
    x_TD = random(kHalf, {s.tokens, s.model});
    x_RD = random(kHalf, {rows, s.model});
    prob = random(DType::kFloat32, {rows});
    w1 = random(kHalf, {s.experts, hidden, s.model});
    w2 = random(kHalf, {s.experts, s.model, s.ffn});
    h = random(kHalf, {rows, hidden});
    dh = Tensor(kHalf, {rows, hidden}, kGpu);
    a = Tensor(kHalf, {rows, s.ffn}, kGpu);
    da = Tensor(kHalf, {rows, s.ffn}, kGpu);
    out = Tensor(kHalf, {rows, s.model}, kGpu);
    dprob = Tensor(DType::kFloat32, {rows}, kGpu);
    segments = Tensor(DType::kFloat32, {rows, (s.ffn + 63) / 64}, kGpu);
    dw1 = Tensor(kHalf, {s.experts, hidden, s.model}, kGpu);
    dw2 = Tensor(kHalf, {s.experts, s.model, s.ffn}, kGpu);
  }

  gemm::GroupedGemmArgs product(gemm::GroupedOp op, bool gathered, const Tensor& w,
                                const Tensor& result) const {
    gemm::GroupedGemmArgs args;
    args.op = op;
    args.groups = routing.groups;
    args.a = gathered ? gemm::GroupedTensor{x_TD, routing.source_R} : gemm::GroupedTensor{x_RD, {}};
    args.w = w.view();
    args.out = result;
    return args;
  }
  gemm::ActivationBlock activation(bool backward) const {
    gemm::ActivationBlock block{.activation = gemm::swiglu(), .ffn = s.ffn, .dtype = kHalf};
    block.h = h.view().raw();
    block.h_stride = 2 * s.ffn;
    block.prob = prob.view().raw();
    block.a = a.view().raw();
    block.a_stride = s.ffn;
    if (!backward) return block;
    block.da = da.view().raw();
    block.da_stride = s.ffn;
    block.dh = dh.view().raw();
    block.dh_stride = 2 * s.ffn;
    block.dprob = dprob.view().raw();
    return block;
  }

  ExpertShape s;
  Routing routing;
  Tensor x_TD, x_RD, prob, w1, w2, h, dh, a, da, out, dprob, segments, dw1, dw2;
};

// A product and the activation that follows or precedes it.
void run_part(const Experts& x, bool backward, bool gathered, MlpPath path, const Stream& stream) {
  const auto op = backward ? gemm::GroupedOp::kDgrad : gemm::GroupedOp::kForward;
  const gemm::GroupedGemmArgs product =
      x.product(op, gathered, backward ? x.w2 : x.w1, backward ? x.da : x.h);
  if (path == MlpPath::kSm90Fused) {
    const bool taken = grouped_activation_cuda(
        product, x.activation(backward), static_cast<std::byte*>(x.segments.view().raw()), stream);
    MOIETY_CHECK(taken, "the shape {} is not taken by {}", x.s.name, gemm::name(path));
    return;
  }
  grouped_gemm_cuda(product, gemm::TileKernels::kFastest, stream);
  gemm::ActivationArgs args{.activation = gemm::swiglu(), .groups = x.routing.groups, .h = x.h};
  args.prob_R = x.prob;
  if (backward) {
    activation_backward(args, x.da, x.dh, x.a, x.dprob, stream);
  } else {
    activation_forward(args, x.a, stream);
  }
}

struct Mlp {
  Mlp(const Experts& x, MlpPath path, bool maps)
      : x_(x),
        mlp{.path = path, .activation = gemm::swiglu(), .w1 = x.w1.view(), .w2 = x.w2.view()},
        input{.groups = x.routing.groups, .x = maps ? x.x_TD : x.x_RD, .prob_R = x.prob},
        out(maps ? x.out.view().slice(0, 0, x.s.tokens) : x.out.view()) {
    if (maps) {
      input.source_R = x.routing.source_R;
      input.row_TK = x.routing.row_TK;
    }
    gradients = {.d_o = input.x, .h = x.h, .dh = x.dh, .a = x.a, .dx = out, .dprob_R = x.dprob};
    workspace = Tensor(DType::kUInt8, {grouped_mlp_workspace(mlp, input)}, kGpu);
  }
  void forward(const Stream& stream) const {
    grouped_mlp_forward(mlp, input, x_.h, out, workspace, stream);
  }
  void backward(const Stream& stream) const {
    grouped_mlp_backward_data(mlp, input, gradients, workspace, stream);
    grouped_mlp_backward_weights(mlp, input, gradients, {x_.dw2.view()}, {x_.dw1.view()}, stream);
  }

  const Experts& x_;
  gemm::GroupedMlp mlp;
  gemm::MlpInput input;
  TensorView out;
  gemm::MlpGradients gradients;
  Tensor workspace;
};

void measure_shape(const ExpertShape& s, const std::string& only, bool steady, const Rates& dense,
                   double copy, const Stream& stream) {
  const Experts x(s, stream);
  const double one = 2.0 * double(s.rows()) * double(s.model * s.ffn);
  const auto report = [&](const std::string& name, MlpPath path, double flop, auto&& call) {
    const std::string title = text("{} {}", name, gemm::name(path));
    if (!wanted(title, only)) return;
    const Burst burst = bursts(call, steady, stream);
    Row row{"grouped_mlp." + title, s.name, tera(flop, burst.from_rest.ms), "TFLOP/s",
            burst.from_rest};
    row.device = kGpu;
    gemm::PathReport taken = gemm::choose_grouped_mlp({DType::kBFloat16, s.model, s.ffn}, kGpu);
    taken.require(path);
    row.more = text(
        R"("dense": {:.1f}, "copy": {:.2f}, "share": {:.3f}, "least_ms": {:.4f}, "experts": "{}")",
        dense.from_rest, copy, row.value / dense.from_rest, burst.from_rest.least,
        taken.describe());
    if (steady) row.more += steady_fields(burst, flop, dense);
    print(row);
  };
  for (const MlpPath path : {MlpPath::kSm90, MlpPath::kSm90Fused}) {
    for (const bool gathered : {false, true}) {
      for (const bool backward : {false, true}) {
        report(text("{} with activation{}", backward ? "fc2 dgrad" : "fc1",
                    gathered ? " gathered" : ""),
               path, backward ? one : 2 * one,
               [&] { run_part(x, backward, gathered, path, stream); });
      }
    }
    for (const bool maps : {false, true}) {
      const Mlp mlp(x, path, maps);
      const char* how = maps ? " by maps" : "";
      report(text("forward{}", how), path, 3 * one, [&] { mlp.forward(stream); });
      report(text("forward + backward{}", how), path, 9 * one, [&] {
        mlp.forward(stream);
        mlp.backward(stream);
      });
    }
  }
}

void run(Options& options) {
  std::string device = "cuda", shape, only;
  bool steady = false, list = false;
  options.choice("--device", device, {"cuda"}, "where");
  options.choice("--shape", shape, expert_shape_names(), "one alone; else all");
  options.word("--only", only, kOnlyHelp);
  options.flag("--steady", steady, "also bursts of a second");
  options.flag("--list", list, "print the shapes and the routing, for peers");
  if (!options.parse()) return;
  const auto for_shapes = [&](auto&& run_one) {
    for (const ExpertShape& s : kExpertShapes) {
      if (shape.empty() || shape == s.name) run_one(s);
    }
  };
  if (list) return for_shapes([](const ExpertShape& s) { print_shape(s, s.name); });
  require_device("grouped_mlp_cuda_bench", kGpu);
  const Stream stream = Stream::on(kGpu);
  const Rates dense = dense_rates(steady, stream);
  const double copy = copy_rate(stream);
  for_shapes([&](const ExpertShape& s) { measure_shape(s, only, steady, dense, copy, stream); });
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "Grouped MLPs of experts on a GPU.",
                                 moiety::bench::run);
}
