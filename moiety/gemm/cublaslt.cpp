#include <array>
#include <map>
#include <mutex>

#include "moiety/base/gpu.h"
#include "moiety/base/outside_capture.h"
#include "moiety/base/per_device.h"
#include "moiety/base/trace.h"
#include "moiety/gemm/cublaslt_loader.h"
#include "moiety/gemm/gemm_cuda.h"

namespace moiety::gemm {
namespace {

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  fail(ErrorKind::kCuda, "gemm: {}: {}", call, cublaslt().status_string(status));
}

cudaDataType_t cuda_type(DType t) { return t == DType::kFloat32 ? CUDA_R_32F : CUDA_R_16BF; }

// The facts that an algorithm depends on. Matrices are stored by columns: out^T = b^T a^T of
// gemm.h.
struct Problem {
  GemmOp op;
  DType out_dtype;
  int64_t m, n, k, a_stride, b_stride, old_stride, out_stride;
  auto operator<=>(const Problem&) const = default;
};

struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, old = nullptr, out = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  int64_t workspace = 0;
  bool found = false;
};

cublasLtMatrixLayout_t layout(DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  cublasLtMatrixLayout_t out = nullptr;
  check(cublaslt().create_layout(&out, cuda_type(dtype), static_cast<uint64_t>(columns),
                                 static_cast<uint64_t>(rows), stride),
        "cublasLtMatrixLayoutCreate");
  return out;
}

template <class Value>
void prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
            Value value) {
  check(cublaslt().set_preference(preference, attribute, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
}

void choose_algorithm(cublasLtHandle_t handle, Plan& plan) {
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublaslt().create_preference(&preference), "cublasLtMatmulPreferenceCreate");
  prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kCublasLtWorkspace});
  // The parts of a split reduction are added in fp32, not in the output's dtype.
  prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    prefer(preference, attribute, uint32_t{16});
  }
  cublasLtMatmulHeuristicResult_t result{};
  int count = 0;
  const cublasStatus_t status = cublaslt().heuristic(
      handle, plan.operation, plan.b, plan.a, plan.old, plan.out, preference, 1, &result, &count);
  cublaslt().destroy_preference(preference);
  plan.found =
      status == CUBLAS_STATUS_SUCCESS && count == 1 && result.state == CUBLAS_STATUS_SUCCESS;
  plan.algorithm = result.algo;
  plan.workspace = static_cast<int64_t>(result.workspaceSize);
}

Plan make_plan(cublasLtHandle_t handle, const Problem& p) {
  Plan plan;
  check(cublaslt().create_operation(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  // cuBLASLt's first matrix is b.
  const int32_t first = p.op == GemmOp::kTN ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int32_t second = p.op == GemmOp::kNT ? CUBLAS_OP_T : CUBLAS_OP_N;
  for (const auto& [attribute, value] : {std::pair{CUBLASLT_MATMUL_DESC_TRANSA, first},
                                         std::pair{CUBLASLT_MATMUL_DESC_TRANSB, second}}) {
    check(cublaslt().set_operation(plan.operation, attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute");
  }
  const bool a_deep = p.op != GemmOp::kNT, b_deep = p.op == GemmOp::kTN;
  plan.a = layout(DType::kBFloat16, a_deep ? p.m : p.k, a_deep ? p.k : p.m, p.a_stride);
  plan.b = layout(DType::kBFloat16, b_deep ? p.n : p.k, b_deep ? p.k : p.n, p.b_stride);
  plan.old = layout(p.out_dtype, p.m, p.n, p.old_stride);
  plan.out = layout(p.out_dtype, p.m, p.n, p.out_stride);
  choose_algorithm(handle, plan);
  return plan;
}

// The state that a GPU keeps between products.
class Context {
 public:
  const Plan& plan(const Problem& problem) {
    const std::lock_guard lock(mutex_);
    const auto [it, is_new] = plans_.try_emplace(problem);
    if (is_new) {
      const OutsideCapture relaxed;
      if (!handle_) check(cublaslt().create(&handle_), "cublasLtCreate");
      it->second = make_plan(handle_, problem);
    }
    return it->second;
  }
  void* workspace(cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    void*& out = workspaces_[stream];
    if (!out) {
      const OutsideCapture relaxed;
      MOIETY_CUDA_CHECK(cudaMalloc(&out, kCublasLtWorkspace));
    }
    return out;
  }
  cublasLtHandle_t handle() const { return handle_; }

 private:
  std::mutex mutex_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Problem, Plan> plans_;
  std::map<cudaStream_t, void*> workspaces_;
};

bool aligned(const void* data, int64_t stride, DType dtype) {
  return (reinterpret_cast<uintptr_t>(data) | uintptr_t(byte_size(dtype, stride))) % 16 == 0;
}

// The state of the stream's GPU and what cuBLASLt computes a product with there; no plan if it does
// not.
struct Chosen {
  Context* context = nullptr;
  const Plan* plan = nullptr;
};

Chosen choose(const Product& g, int device) {
  const Epilogue& e = g.epilogue;
  const bool reads = e.beta.value != 0;
  // When it adds to bf16 in place, cuBLASLt rounds before it adds (13.1).
  if (reads && e.old == e.out && e.out_dtype == DType::kBFloat16) return {};
  if (g.dtype != DType::kBFloat16 || g.a_scales.data || e.a_scale.data || e.b_scale.data ||
      g.k == 0 || (reads && e.old_dtype != e.out_dtype) ||
      !aligned(g.a.data, g.a.stride, g.dtype) || !aligned(g.b.data, g.b.stride, g.dtype) ||
      !aligned(e.out, e.out_stride, e.out_dtype) ||
      (reads && !aligned(e.old, e.old_stride, e.old_dtype)) || !cublaslt().available) {
    return {};
  }
  Context& context = per_device<Context>(device);
  const Plan& plan = context.plan({g.op, e.out_dtype, g.m, g.n, g.k, g.a.stride, g.b.stride,
                                   reads ? e.old_stride : e.out_stride, e.out_stride});
  if (!plan.found) return {};
  return {&context, &plan};
}

}  // namespace

bool gemm_cublaslt(const Product& g, const Stream& stream, const TensorView& workspace) {
  const CudaDeviceGuard guard(stream.device().index);
  const auto [context, plan] = choose(g, stream.device().index);
  if (!plan) return false;
  const bool given = workspace.defined();
  MOIETY_CHECK(!given || workspace.bytes() >= plan->workspace,
               "gemm: workspace is {}, expected at least {} bytes", workspace.describe(),
               plan->workspace);
  const TraceSpan span(TraceLane::kCompute, "gemm cublaslt",
                       {{"m", g.m}, {"n", g.n}, {"k", g.k}, {"flops", 2.0 * g.m * g.n * g.k}});
  const auto cuda_stream = static_cast<cudaStream_t>(stream.cuda_stream());
  void* area = workspace.raw();
  if (!given && plan->workspace > 0) area = context->workspace(cuda_stream);
  const Epilogue& e = g.epilogue;
  const bool reads = e.beta.value != 0;
  check(cublaslt().matmul(context->handle(), plan->operation, &e.alpha.value, g.b.data, plan->b,
                          g.a.data, plan->a, &e.beta.value, reads ? e.old : e.out, plan->old, e.out,
                          plan->out, &plan->algorithm, area, static_cast<size_t>(plan->workspace),
                          cuda_stream),
        "cublasLtMatmul");
  return true;
}

int64_t cublaslt_workspace(const Product& g, const Stream& stream) {
  const CudaDeviceGuard guard(stream.device().index);
  const Chosen chosen = choose(g, stream.device().index);
  return chosen.plan ? chosen.plan->workspace : 0;
}

const CublasLtStatus& cublaslt_status() {
  static const CublasLtStatus status{cublaslt().available, cublaslt().text};
  return status;
}

}  // namespace moiety::gemm
