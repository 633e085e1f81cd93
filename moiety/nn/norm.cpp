#include "moiety/nn/norm.h"

#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/nn/element.h"
#include "moiety/nn/rows.h"

namespace moiety::nn {
namespace {

// Checks that `y` has the dtype and sizes of `x` and contiguous rows.
void check_like(const char* operation, const char* argument, const TensorView& y,
                const TensorView& x) {
  bool same = y.defined() && y.dtype() == x.dtype() && y.dims() == x.dims();
  for (int d = 0; same && d < x.dims(); ++d) same = y.size(d) == x.size(d);
  MOIETY_CHECK(same && y.stride(-1) == 1, "{}: {} is {}, expected the dtype and sizes of {}",
               operation, argument, y.describe(), x.describe());
}

}  // namespace

void norm(const NormArgs& a, Stream stream) {
  check_element("norm", a.x.dtype());
  MOIETY_CHECK(a.x.dims() >= 1 && a.x.size(-1) >= 1, "norm: x is {}", a.x.describe());
  check_like("norm", "x", a.x, a.x);
  check_like("norm", "y", a.y, a.x);
  check_tensor("norm", "weight", a.weight_D, a.x.dtype(), {a.x.size(-1)});
  a.sink.check("norm", a.y.dtype(), 1);
  if (on_gpu("norm", a.x.dtype(),
             {{"x", a.x}, {"weight", a.weight_D}, {"y", a.y}, {"sink.amax", a.sink.amax}},
             stream)) {
    if constexpr (kCudaBuilt) return norm_cuda(a, stream);
    fail_without_cuda("norm");
  }
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, "norm", {{"rows", row_count(a.x)}});
    a.sink.clear();
    a.x.dtype() == DType::kFloat64 ? norm_ref(a) : norm_cpu(a);
  });
}

void norm_backward(const NormBackwardArgs& a, Stream stream) {
  check_element("norm_backward", a.x.dtype());
  MOIETY_CHECK(a.x.dims() >= 1 && a.x.size(-1) >= 1, "norm_backward: x is {}", a.x.describe());
  const DType compute = compute_dtype(a.x.dtype());
  check_like("norm_backward", "x", a.x, a.x);
  check_like("norm_backward", "dy", a.dy, a.x);
  check_like("norm_backward", "dx", a.dx, a.x);
  if (a.addend.defined()) check_like("norm_backward", "addend", a.addend, a.x);
  check_tensor("norm_backward", "weight", a.weight_D, a.x.dtype(), {a.x.size(-1)});
  check_tensor("norm_backward", "grad", a.grad_D, compute, {a.x.size(-1)});
  check_tensor("norm_backward", "workspace", a.workspace, compute,
               {norm_blocks(row_count(a.x), a.x.size(-1)), a.x.size(-1)});
  if (on_gpu("norm_backward", a.x.dtype(),
             {{"x", a.x},
              {"weight", a.weight_D},
              {"dy", a.dy},
              {"addend", a.addend},
              {"dx", a.dx},
              {"grad", a.grad_D},
              {"workspace", a.workspace}},
             stream)) {
    if constexpr (kCudaBuilt) return norm_backward_cuda(a, stream);
    fail_without_cuda("norm_backward");
  }
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, "norm_backward", {{"rows", row_count(a.x)}});
    a.x.dtype() == DType::kFloat64 ? norm_backward_ref(a) : norm_backward_cpu(a);
  });
}

}  // namespace moiety::nn
