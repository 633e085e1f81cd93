#include "moiety/gemm/grouped_mlp.h"

#include "moiety/base/buffer.h"
#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/gemm/grouped_gemm_cuda.h"
#include "moiety/gemm/mlp_steps.h"
#include "moiety/gemm/row_dot.h"
#include "moiety/gemm/sm90/fused.h"

namespace moiety::gemm {
namespace {

constexpr const char* kName = "grouped_mlp";

// The sizes in the shapes of the arguments.
struct Sizes {
  DType dtype;
  int64_t capacity, tokens, model, ffn, hidden;
  bool sums;  // of the rows of a token, at the end of both passes

  // Rows of o and dx.
  int64_t results() const { return sums ? tokens : capacity; }
};

DType scalar_dtype(DType storage) { return storage == DType::kFloat64 ? storage : DType::kFloat32; }

void check_matrix(const char* argument, const TensorView& x, DType dtype, int64_t rows,
                  int64_t columns) {
  check_tensor(kName, argument, x, dtype, {rows, columns});
  MOIETY_CHECK(x.stride(1) == 1 || columns <= 1, "{}: {} {} has columns that are not contiguous",
               kName, argument, x.describe());
}

void check_maps(const MlpInput& input) {
  const TensorView& row = input.row_TK;
  if (!row.defined()) return;
  MOIETY_CHECK(input.source_R.defined(), "{}: row_TK is {}, its inverse source_R is missing", kName,
               row.describe());
  check_tensor(kName, "row_TK", row, DType::kInt32, {input.x.size(0), -1});
  MOIETY_CHECK(row.stride(1) == 1 || row.size(1) <= 1, "{}: row_TK is {}", kName, row.describe());
}

// The sizes, from x and `h` (H or dH), after the checks that every call needs.
Sizes check(const GroupedMlp& mlp, const MlpInput& input, const TensorView& h) {
  const TensorView& x = input.x;
  MOIETY_CHECK(x.dims() == 2 && h.dims() == 2, "{}: x is {}, h is {}", kName, x.describe(),
               h.describe());
  check_groups(kName, input.groups);
  check_sm_limit(kName, mlp.sm_limit);
  const int64_t capacity = input.groups.capacity, hidden = h.size(1);
  const int64_t parts = mlp.activation.hidden(1);
  MOIETY_CHECK(hidden % parts == 0, "{}: h is {}, an odd number of columns", kName, h.describe());
  const Sizes s = {
      x.dtype(), capacity, x.size(0), x.size(1), hidden / parts, hidden, input.row_TK.defined()};
  MOIETY_CHECK(
      s.dtype == DType::kFloat32 || s.dtype == DType::kBFloat16 || s.dtype == DType::kFloat64,
      "{}: x is {}, expected float32 or bfloat16", kName, x.describe());
  MOIETY_CHECK(mlp.path == MlpPath::kReference || s.dtype != DType::kFloat64, "{}: path {} with {}",
               kName, name(mlp.path), name(s.dtype));
  check_maps(input);
  check_rows(kName, "x", {x, input.source_R}, s.dtype, capacity, s.model);
  check_matrix("h", h, s.dtype, capacity, hidden);
  check_interleave(kName, mlp.interleave, s.ffn);
  const int64_t experts = input.groups.experts;
  mlp.w1.check(kName, "w1", s.dtype, experts, hidden, s.model);
  mlp.w2.check(kName, "w2", s.dtype, experts, s.model, s.ffn);
  if (mlp.b1_EH.defined()) check_matrix("b1_EH", mlp.b1_EH, s.dtype, experts, hidden);
  if (mlp.b2_ED.defined()) check_matrix("b2_ED", mlp.b2_ED, s.dtype, experts, s.model);
  if (input.prob_R.defined()) {
    check_tensor(kName, "prob_R", input.prob_R, scalar_dtype(s.dtype), {capacity});
  }
  return s;
}

// The two transient buffers: [R_cap, F], which kCpu has no need of, and, with sums, [R_cap, D].
// Without experts no row is live.
struct Transients {
  TensorView ffn, model;
  std::byte* segments;  // of dprob, on kSm90Fused
};

Transients transients(const GroupedMlp& mlp, const MlpInput& input, const Sizes& s,
                      const TensorView& workspace) {
  const int64_t need = grouped_mlp_workspace(mlp, input);
  MOIETY_CHECK(need == 0 || (workspace.dtype() == DType::kUInt8 && workspace.contiguous() &&
                             workspace.numel() >= need),
               "{}: workspace is {}, expected uint8[{}]", kName, workspace.describe(), need);
  std::byte* base = static_cast<std::byte*>(workspace.raw());
  const int64_t rows = input.groups.experts > 0 ? s.capacity : 0;
  Transients out{};
  out.ffn = TensorView(base, s.dtype, {rows, s.ffn}, workspace.device());
  int64_t used = mlp.path == MlpPath::kCpu ? 0 : padded_bytes(out.ffn.bytes());
  if (s.sums) {
    out.model = TensorView(base + used, s.dtype, {rows, s.model}, workspace.device());
    used += padded_bytes(out.model.bytes());
  }
  out.segments = base + used;
  return out;
}

GroupedGemmArgs linear(GroupedOp op, const Groups& groups, const GroupedTensor& a,
                       const GroupedWeight& w, const TensorView& out) {
  GroupedGemmArgs args;
  args.op = op;
  args.groups = groups;
  args.a = a;
  args.w = w;
  args.out = out;
  return args;
}

GroupedGemmArgs fc1(const GroupedMlp& mlp, const MlpInput& input, const TensorView& h) {
  GroupedGemmArgs args =
      linear(GroupedOp::kForward, input.groups, {input.x, input.source_R}, mlp.w1, h);
  args.bias_EN = mlp.b1_EH;
  return args;
}

ActivationBlock activation(const GroupedMlp& mlp, const MlpInput& input, const Sizes& s,
                           const TensorView& h, const TensorView& a) {
  ActivationBlock block;
  block.activation = mlp.activation;
  block.interleave = mlp.interleave;
  block.ffn = s.ffn;
  block.dtype = s.dtype;
  block.h = h.raw();
  block.h_stride = h.stride(0);
  block.prob = input.prob_R.raw();
  if (a.defined()) {
    block.a = a.raw();
    block.a_stride = a.stride(0);
  }
  return block;
}

// How the columns of H alternate.
int64_t gate_interleave(const GroupedMlp& mlp) {
  return mlp.activation.gated() ? mlp.interleave : 0;
}

// The activation's arguments on a GPU, where it has launches of its own.
ActivationArgs activation(const GroupedMlp& mlp, const MlpInput& input, const TensorView& h) {
  ActivationArgs args;
  args.activation = mlp.activation;
  args.interleave = mlp.interleave;
  args.groups = input.groups;
  args.h = h;
  args.prob_R = input.prob_R;
  return args;
}

void run_linear(const GroupedMlp& mlp, const GroupedGemmArgs& args) {
  if (mlp.path == MlpPath::kReference) {
    grouped_gemm_reference(args);
  } else {
    grouped_gemm_cpu(args, GemmEngine::kAuto);
  }
}

// FLOPs of both products, forward or backward.
double flops_per_row(const Sizes& s) { return 2.0 * s.model * (s.hidden + s.ffn); }

void record_input_faults(const MlpInput& input) {
  record_faults(input.groups, OperationId::kGroupedMlp, input.source_R, input.x.size(0));
}

// The same on a GPU, and a product there.
void record_faults_on_gpu(const MlpInput& input, const Stream& stream) {
  if constexpr (kCudaBuilt) {
    return record_faults_cuda(input.groups, OperationId::kGroupedMlp, {input.x, input.source_R}, {},
                              stream);
  }
  fail_without_cuda(kName);
}
GroupedGemmArgs limited(const GroupedMlp& mlp, GroupedGemmArgs product) {
  product.sm_limit = mlp.sm_limit;
  return product;
}
void run_on_gpu(const GroupedMlp& mlp, const GroupedGemmArgs& product, const Stream& stream) {
  const TileKernels kernels =
      mlp.path == MlpPath::kCudaPlain ? TileKernels::kPlain : TileKernels::kFastest;
  if constexpr (kCudaBuilt) return grouped_gemm_cuda(limited(mlp, product), kernels, stream);
  fail_without_cuda(kName);
}

// Whether F1 with F2, or B1 with B2, is one launch, if the views allow it.
bool fuses(const GroupedMlp& mlp, bool backward) {
  return mlp.path == MlpPath::kSm90Fused && (backward ? mlp.fused.backward : mlp.fused.forward);
}
bool run_fused(const GroupedMlp& mlp, const GroupedGemmArgs& product, const ActivationBlock& block,
               std::byte* segments, const Stream& stream) {
  if (!fuses(mlp, product.op == GroupedOp::kDgrad) || product.groups.experts == 0) return false;
  if constexpr (kCudaBuilt) {
    return grouped_activation_cuda(limited(mlp, product), block, segments, stream);
  }
  fail_without_cuda(kName);
}
// The bytes of dprob's segments.
int64_t segments_bytes(int64_t capacity, int64_t ffn) {
  return byte_size(DType::kFloat32, capacity * ((ffn + kDotSegment - 1) / kDotSegment));
}

// Whether the operation runs on a GPU, found while checking that everything it reads and writes is
// with the stream.
bool on_gpu(const GroupedMlp& mlp, const MlpInput& input, std::initializer_list<NamedView> more,
            const Stream& stream) {
  const auto first = [](const GroupedWeight& w) { return w.experts() > 0 ? w[0] : TensorView(); };
  const bool gpu = check_devices(kName,
                                 {{"x", input.x},
                                  {"prob_R", input.prob_R},
                                  {"source_R", input.source_R},
                                  {"row_TK", input.row_TK},
                                  {"groups.begin_E1", input.groups.begin_E1},
                                  {"groups.count_E", input.groups.count_E},
                                  {"groups.status", input.groups.status},
                                  {"w1", first(mlp.w1)},
                                  {"w2", first(mlp.w2)},
                                  {"b1_EH", mlp.b1_EH},
                                  {"b2_ED", mlp.b2_ED}},
                                 stream);
  check_devices(kName, more, stream);
  MOIETY_CHECK(gpu == (mlp.path != MlpPath::kReference && mlp.path != MlpPath::kCpu),
               "{}: path {} on a stream of {}", kName, name(mlp.path), name(stream.device()));
  return gpu;
}

// Records the faults of the indices and computes the sums.
void run_sum_rows(const TensorView& rows, const TensorView& row_TK, const TensorView& out,
                  const TensorView& status) {
  for (int64_t t = 0; status.defined() && t < row_TK.size(0); ++t) {
    for (int64_t k = 0; k < row_TK.size(1); ++k) {
      const int32_t i = row_TK.data<int32_t>()[t * row_TK.stride(0) + k];
      if (i < -1 || i >= rows.size(0)) {
        record_fault(status, kFaultIndex, OperationId::kSumRows, t, i);
      }
    }
  }
  rows.dtype() == DType::kFloat64 ? sum_rows_reference(rows, row_TK, out)
                                  : sum_rows_cpu(rows, row_TK, out);
}

void check_gradients(const GroupedMlp& mlp, const MlpInput& input, const MlpGradients& g,
                     const Sizes& s) {
  check_matrix("h", g.h, s.dtype, s.capacity, s.hidden);
  check_matrix("d_o", g.d_o, s.dtype, s.tokens, s.model);
  if (g.dx.defined()) check_matrix("dx", g.dx, s.dtype, s.results(), s.model);
  if (g.a.defined()) check_matrix("a", g.a, s.dtype, s.capacity, s.ffn);
  if (g.dprob_R.defined()) {
    check_tensor(kName, "dprob_R", g.dprob_R, scalar_dtype(s.dtype), {s.capacity});
  }
  MOIETY_CHECK(!g.db1_EH.defined() || mlp.b1_EH.defined(), "{}: db1 without b1", kName);
  MOIETY_CHECK(!g.db2_ED.defined() || mlp.b2_ED.defined(), "{}: db2 without b2", kName);
  check_scalar(kName, "bias_beta", g.bias_beta, input.groups.experts);
}

GroupedGemmArgs wgrad(const MlpInput& input, const GroupedTensor& dy, const GroupedTensor& x,
                      const GradTarget& target, int64_t rows, int64_t columns) {
  target.grad.check(kName, "gradient", target.grad.dtype(), input.groups.experts, rows, columns);
  check_scalar(kName, "beta", target.beta, input.groups.experts);
  GroupedGemmArgs args = linear(GroupedOp::kWgrad, input.groups, dy, target.grad, {});
  args.b = x;
  args.beta = target.beta;
  return args;
}

}  // namespace

void mlp_bias_gradients(const MlpInput& input, const MlpGradients& g, const TensorView& b2_ED,
                        const Stream& stream) {
  const GroupedTensor d_o = {g.d_o, input.source_R};
  if (b2_ED.defined() && g.dprob_R.defined()) {
    grouped_scale_grad({input.groups, d_o, b2_ED, g.dprob_R, true}, stream);
  }
  if (g.db2_ED.defined()) {
    grouped_bias_grad({input.groups, d_o, input.prob_R, g.db2_ED, g.bias_beta}, stream);
  }
  if (g.db1_EH.defined()) {
    grouped_bias_grad({input.groups, {g.dh, {}}, {}, g.db1_EH, g.bias_beta}, stream);
  }
}

void sum_rows(TensorView rows_RD, TensorView row_TK, TensorView out_TD, TensorView status,
              Stream stream) {
  const char* op = "sum_rows";
  check_tensor(op, "row_TK", row_TK, DType::kInt32, {-1, -1});
  check_tensor(op, "rows_RD", rows_RD, out_TD.dtype(), {-1, -1});
  check_tensor(op, "out_TD", out_TD, out_TD.dtype(), {row_TK.size(0), rows_RD.size(1)});
  if (status.defined()) check_tensor(op, "status", status, DType::kUInt32, {4});
  for (const TensorView* x : {&rows_RD, &row_TK, &out_TD}) {
    MOIETY_CHECK(x->stride(1) == 1 || x->size(1) <= 1, "{}: {} has columns that are not contiguous",
                 op, x->describe());
  }
  if (check_devices(
          op, {{"rows_RD", rows_RD}, {"row_TK", row_TK}, {"out_TD", out_TD}, {"status", status}},
          stream)) {
    if (out_TD.dtype() == DType::kFloat64) {
      fail(ErrorKind::kUnsupported, "{}: out_TD is {}, expected float32 or bfloat16 on a GPU", op,
           out_TD.describe());
    }
    if constexpr (kCudaBuilt) return sum_rows_cuda(rows_RD, row_TK, out_TD, status, stream);
    fail_without_cuda(op);
  }
  stream.run([=] { run_sum_rows(rows_RD, row_TK, out_TD, status); });
}

const char* name(MlpPath path) {
  switch (path) {
    case MlpPath::kReference:
      return "reference";
    case MlpPath::kCpu:
      return "cpu";
    case MlpPath::kCudaPlain:
      return "cuda_plain";
    case MlpPath::kSm90:
      return "sm90";
    case MlpPath::kSm90Fused:
      return "sm90_fused";
  }
  return "?";
}

std::string PathReport::describe() const {
  std::string why;
  for (const Rejected& r : rejected) {
    why += text("{}{}: {}", why.empty() ? " (" : "; ", name(r.path), r.reason);
  }
  std::string taken = name(path);
  if (path == MlpPath::kSm90Fused && !fused.both()) {
    taken = text("{} {}, {} {}", taken, fused.forward ? "forward" : "backward",
                 name(MlpPath::kSm90), fused.forward ? "backward" : "forward");
  }
  return taken + why + (why.empty() ? "" : ")");
}

namespace {

bool of_gpus(MlpPath path) { return path != MlpPath::kReference && path != MlpPath::kCpu; }

}  // namespace

void PathReport::require(MlpPath required) {
  if (path == required && (path != MlpPath::kSm90Fused || fused.both())) return;
  // Paths of a device are in ascending order, and the least of them computes whatever a better one
  // does.
  if (of_gpus(path) == of_gpus(required) && required < path) {
    std::erase_if(rejected, [&](const Rejected& r) { return r.path == path; });
    rejected.push_back({path, text("{} is required", name(required))});
    path = required;
    return;
  }
  const auto by_name = std::find_if(rejected.begin(), rejected.end(), [&](const Rejected& r) {
    return r.by_name && r.path == required;
  });
  if (by_name != rejected.end()) {
    rejected.erase(by_name);
    path = required;
    fused = {};
    return;
  }
  std::string why;
  for (const Rejected& r : rejected) why += text("; {}: {}", name(r.path), r.reason);
  if (of_gpus(path) != of_gpus(required)) {
    why += text("; {} is a path of {}", name(required), of_gpus(required) ? "GPUs" : "CPUs");
  }
  fail(ErrorKind::kUnsupported, "{}: path {} is required, {} was chosen{}", kName, name(required),
       name(path), why);
}

namespace {

void check(const GroupedMlpDesc& desc) {
  MOIETY_CHECK(desc.model >= 1 && desc.ffn >= 1, "{}: D={}, F={}", kName, desc.model, desc.ffn);
}
bool is_fast(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kBFloat16; }

// The passes in which activations beside products were faster (docs/adr/0014). Forward: where rows
// wait for it in tiles of 256 columns, and of models of at most 3072 columns in tiles of 192. Backward:
// of these models, and with matrices of more than 64 MiB, whose products alone do not work in pairs of
// blocks.
Passes faster_fused(const GroupedMlpDesc& desc) {
  constexpr int64_t kMostModel = 3072;
  const int columns = sm90::choose_fused({.n = 2 * desc.ffn, .k = desc.model}, true).columns;
  const bool narrow = desc.model <= kMostModel;
  return {.forward = columns == sm90::kHeldColumns || (narrow && columns > 128),
          .backward = narrow || desc.model * desc.ffn > sm90::kMostInPairs};
}

// The reason why Hopper's kernels do not compute these experts; empty if they do.
std::string why_not_sm90(const GroupedMlpDesc& desc, const GpuProperties& gpu) {
  constexpr int64_t kElements = 8;  // of 16 bytes
  if (gpu.major != 9 || gpu.minor != 0) {
    return text("capability {}.{} is not 9.0", gpu.major, gpu.minor);
  }
  if (desc.dtype != DType::kBFloat16) return text("dtype {} is not bfloat16", name(desc.dtype));
  for (const auto& [size, value] : {std::pair{"D", desc.model}, std::pair{"F", desc.ffn}}) {
    if (value % kElements != 0) return text("{}={} is no multiple of {}", size, value, kElements);
  }
  return {};
}

}  // namespace

PathReport choose_grouped_mlp(const GroupedMlpDesc& desc, const GpuProperties& gpu) {
  check(desc);
  if (!is_fast(desc.dtype)) {
    fail(ErrorKind::kUnsupported, "{}: dtype {}, expected float32 or bfloat16 on a GPU", kName,
         name(desc.dtype));
  }
  PathReport report;
  report.path = MlpPath::kSm90Fused;
  if (const std::string why = why_not_sm90(desc, gpu); !why.empty()) {
    report.path = MlpPath::kCudaPlain;
    report.rejected = {{MlpPath::kSm90Fused, why}, {MlpPath::kSm90, why}};
  } else if (desc.interleave != 0) {
    report.path = MlpPath::kSm90;
    report.rejected = {{MlpPath::kSm90Fused, text("interleave {} is not 0", desc.interleave)}};
  } else {
    report.fused = faster_fused(desc);
    const auto [forward, backward] = report.fused;
    if (!forward && !backward) report.path = MlpPath::kSm90;
    if (!report.fused.both()) {
      const char* what = forward ? "backward" : backward ? "forward" : "it";
      report.rejected = {{MlpPath::kSm90Fused,
                          text("with D={} and F={} {} was slower", desc.model, desc.ffn, what),
                          true}};
    }
  }
  return report;
}

PathReport choose_grouped_mlp(const GroupedMlpDesc& desc, Device device) {
  if (device.type == DeviceType::kCuda) {
    return choose_grouped_mlp(desc, gpu_properties(device.index));
  }
  check(desc);
  PathReport report;
  if (!is_fast(desc.dtype)) {
    report.rejected.push_back(
        {MlpPath::kCpu, text("dtype {} is not float32 or bfloat16", name(desc.dtype))});
  } else if (automatic_engine(desc.dtype) == GemmEngine::kReference) {
    report.rejected.push_back(
        {MlpPath::kCpu, text("this CPU has no AVX2 with FMA, and no oneDNN is built in that "
                             "multiplies {}",
                             name(desc.dtype))});
  } else {
    report.path = MlpPath::kCpu;
  }
  return report;
}

int64_t grouped_mlp_workspace(const GroupedMlp& mlp, const MlpInput& input) {
  if (mlp.w2.experts() == 0) return 0;
  const DType dtype = input.x.dtype();
  const int64_t capacity = input.groups.capacity, ffn = mlp.w2[0].size(1);
  const int64_t model = input.row_TK.defined() ? input.x.size(1) : 0;
  const int64_t segments = fuses(mlp, true) ? segments_bytes(capacity, ffn) : 0;
  const int64_t hidden = mlp.path == MlpPath::kCpu ? 0 : byte_size(dtype, capacity * ffn);
  return padded_bytes(hidden) + padded_bytes(byte_size(dtype, capacity * model)) +
         padded_bytes(segments);
}

void grouped_mlp_forward(const GroupedMlp& mlp, const MlpInput& input, TensorView h, TensorView o,
                         TensorView workspace, Stream stream) {
  const Sizes s = check(mlp, input, h);
  check_matrix("o", o, s.dtype, s.results(), s.model);
  const Transients t = transients(mlp, input, s, workspace);
  MlpForwardSteps steps;
  steps.fc1 = fc1(mlp, input, h);
  steps.activation = activation(mlp, input, s, h, t.ffn);
  steps.fc2 = linear(GroupedOp::kForward, input.groups, {t.ffn, {}}, mlp.w2, s.sums ? t.model : o);
  if (mlp.b2_ED.defined()) {
    steps.fc2.bias_EN = mlp.b2_ED;
    steps.fc2.bias_scale_R = input.prob_R;
  }
  if (on_gpu(mlp, input, {{"h", h}, {"o", o}, {"workspace", workspace}}, stream)) {
    record_faults_on_gpu(input, stream);
    if (!run_fused(mlp, steps.fc1, steps.activation, nullptr, stream)) {
      run_on_gpu(mlp, steps.fc1, stream);
      if (input.groups.experts > 0) activation_forward(activation(mlp, input, h), t.ffn, stream);
    }
    run_on_gpu(mlp, steps.fc2, stream);
    if (s.sums) sum_rows(t.model, input.row_TK, o, input.groups.status, stream);
    return;
  }
  stream.run([=, path = mlp.path] {
    TraceSpan span(TraceLane::kCompute, "grouped_mlp");
    trace_rows(span, input.groups, flops_per_row(s));
    record_input_faults(input);
    if (path == MlpPath::kReference) {
      grouped_mlp_forward_reference(steps);
    } else {
      grouped_mlp_forward_cpu(steps);
    }
    if (s.sums) run_sum_rows(t.model, input.row_TK, o, input.groups.status);
  });
}

void grouped_mlp_hidden(const GroupedMlp& mlp, const MlpInput& input, TensorView h, Stream stream) {
  check(mlp, input, h);
  const GroupedGemmArgs product = fc1(mlp, input, h);
  if (on_gpu(mlp, input, {{"h", h}}, stream)) {
    record_faults_on_gpu(input, stream);
    return run_on_gpu(mlp, product, stream);
  }
  stream.run([=] {
    record_input_faults(input);
    run_linear(mlp, product);
  });
}

void grouped_mlp_backward_data(const GroupedMlp& mlp, const MlpInput& input,
                               const MlpGradients& gradients, TensorView workspace, Stream stream) {
  const MlpGradients& g = gradients;
  const Sizes s = check(mlp, input, g.dh);
  check_gradients(mlp, input, g, s);
  const Transients t = transients(mlp, input, s, workspace);
  MlpBackwardSteps steps;
  steps.fc2_dgrad = linear(GroupedOp::kDgrad, input.groups, {g.d_o, input.source_R}, mlp.w2, t.ffn);
  steps.activation = activation(mlp, input, s, g.h, g.a);
  steps.activation.da = t.ffn.raw();
  steps.activation.da_stride = t.ffn.stride(0);
  steps.activation.dh = g.dh.raw();
  steps.activation.dh_stride = g.dh.stride(0);
  steps.activation.dprob = g.dprob_R.raw();
  const bool input_gradient = g.dx.defined(), sums = input_gradient && s.sums;
  if (input_gradient) {
    steps.fc1_dgrad =
        linear(GroupedOp::kDgrad, input.groups, {g.dh, {}}, mlp.w1, sums ? t.model : g.dx);
    steps.interleave = gate_interleave(mlp);
  }
  if (on_gpu(mlp, input,
             {{"d_o", g.d_o},
              {"h", g.h},
              {"dh", g.dh},
              {"a", g.a},
              {"dx", g.dx},
              {"dprob_R", g.dprob_R},
              {"db1_EH", g.db1_EH},
              {"db2_ED", g.db2_ED},
              {"bias_beta", g.bias_beta.per_group},
              {"workspace", workspace}},
             stream)) {
    record_faults_on_gpu(input, stream);
    if (!run_fused(mlp, steps.fc2_dgrad, steps.activation, t.segments, stream)) {
      run_on_gpu(mlp, steps.fc2_dgrad, stream);
      if (input.groups.experts > 0) {
        activation_backward(activation(mlp, input, g.h), t.ffn, g.dh, g.a, g.dprob_R, stream);
      }
    }
    if (input_gradient) run_on_gpu(mlp, steps.fc1_dgrad, stream);
    if (sums) sum_rows(t.model, input.row_TK, g.dx, input.groups.status, stream);
    return mlp_bias_gradients(input, g, mlp.b2_ED, stream);
  }
  stream.run([=] {
    TraceSpan span(TraceLane::kCompute, "grouped_mlp_backward_data");
    trace_rows(span, input.groups, flops_per_row(s));
    record_input_faults(input);
    if (mlp.path == MlpPath::kReference) {
      grouped_mlp_backward_reference(steps);
    } else {
      grouped_mlp_backward_cpu(steps);
    }
    if (sums) run_sum_rows(t.model, input.row_TK, g.dx, input.groups.status);
    mlp_bias_gradients(input, g, mlp.b2_ED, Stream());
  });
}

void grouped_mlp_backward_input(const GroupedMlp& mlp, const MlpInput& input,
                                const MlpGradients& gradients, Stream stream) {
  const Sizes s = check(mlp, input, gradients.dh);
  MOIETY_CHECK(!s.sums, "{}: row_TK is {}, but B4 alone sums no rows", kName,
               input.row_TK.describe());
  check_matrix("dx", gradients.dx, s.dtype, s.capacity, s.model);
  const GroupedGemmArgs product =
      linear(GroupedOp::kDgrad, input.groups, {gradients.dh, {}}, mlp.w1, gradients.dx);
  if (on_gpu(mlp, input, {{"dh", gradients.dh}, {"dx", gradients.dx}}, stream)) {
    return run_on_gpu(mlp, product, stream);
  }
  stream.run([=] {
    if (mlp.path == MlpPath::kReference) {
      grouped_mlp_input_reference(product, gate_interleave(mlp));
    } else {
      grouped_mlp_input_cpu(product, gate_interleave(mlp));
    }
  });
}

void grouped_mlp_backward_weights(const GroupedMlp& mlp, const MlpInput& input,
                                  const MlpGradients& gradients, const GradTarget& w2,
                                  const GradTarget& w1, Stream stream) {
  const Sizes s = check(mlp, input, gradients.dh);
  GroupedGemmArgs g2, g1;
  if (w2.grad.defined()) {
    check_matrix("d_o", gradients.d_o, s.dtype, s.tokens, s.model);
    check_matrix("a", gradients.a, s.dtype, s.capacity, s.ffn);
    g2 = wgrad(input, {gradients.d_o, input.source_R}, {gradients.a, {}}, w2, s.model, s.ffn);
  }
  if (w1.grad.defined()) {
    g1 = wgrad(input, {gradients.dh, {}}, {input.x, input.source_R}, w1, s.hidden, s.model);
  }
  if (on_gpu(mlp, input, {{"d_o", gradients.d_o}, {"dh", gradients.dh}, {"a", gradients.a}},
             stream)) {
    for (const GradTarget* target : {&w2, &w1}) {
      const TensorView grad = target->grad.experts() > 0 ? target->grad[0] : TensorView();
      check_devices(kName, {{"gradient", grad}, {"beta", target->beta.per_group}}, stream);
    }
    record_faults_on_gpu(input, stream);
    if (w2.grad.defined()) run_on_gpu(mlp, g2, stream);
    if (w1.grad.defined()) run_on_gpu(mlp, g1, stream);
    return;
  }
  stream.run([=] {
    TraceSpan span(TraceLane::kCompute, "grouped_mlp_backward_weights");
    trace_rows(span, input.groups, flops_per_row(s));
    record_input_faults(input);
    if (w2.grad.defined()) run_linear(mlp, g2);
    if (w1.grad.defined()) run_linear(mlp, g1);
  });
}

}  // namespace moiety::gemm
