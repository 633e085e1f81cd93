#include "moiety/nn/loss.h"

#include <algorithm>
#include <array>

#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/nn/element.h"
#include "moiety/nn/linear.h"

namespace moiety::nn {
namespace {

void check_targets(const TensorView& target_N, int64_t vocabulary) {
  const int32_t* target = target_N.data<int32_t>();
  for (int64_t t = 0; t < target_N.size(0); ++t) {
    MOIETY_CHECK(target[t] == kIgnoredTarget || (target[t] >= 0 && target[t] < vocabulary),
                 "cross_entropy: target {} at position {} is outside the vocabulary of {}",
                 target[t], t, vocabulary);
  }
}

// One chunk of linear_cross_entropy: all views hold only the chunk's tokens.
void chunk_loss(const LinearCrossEntropyArgs& a, bool accumulate, Stream stream) {
  const int64_t tokens = a.x_TD.size(0), vocabulary = a.head_VD.size(0);
  const TensorView logits = a.workspace.slice(0, 0, tokens);
  linear(a.x_TD, a.head_VD, logits, {}, stream);
  CrossEntropyArgs rows{.logits_NV = logits,
                        .target_N = a.target_T,
                        .mask_N = a.mask_T,
                        .loss_N = a.loss_T,
                        .dlogits_NV = {},
                        .z_coef = a.z_coef};
  if (!a.dx_TD.defined() && !a.grad_VD.defined()) return cross_entropy(rows, stream);
  const DType storage = a.x_TD.dtype();
  const int64_t stride = vocabulary * bits(logits.dtype()) / bits(storage);
  const std::array<int64_t, 2> sizes{tokens, vocabulary}, strides{stride, 1};
  rows.dlogits_NV = TensorView(logits.raw(), storage, sizes, strides, logits.device());
  cross_entropy(rows, stream);
  if (a.dx_TD.defined()) linear_input_gradient(rows.dlogits_NV, a.head_VD, a.dx_TD, {}, stream);
  if (!a.grad_VD.defined()) return;
  linear_weight_gradient(rows.dlogits_NV, a.x_TD, a.grad_VD, accumulate, stream);
}

}  // namespace

void cross_entropy(const CrossEntropyArgs& a, Stream stream) {
  const DType compute = a.logits_NV.dtype();
  MOIETY_CHECK(compute == DType::kFloat32 || compute == DType::kFloat64,
               "cross_entropy: logits are {}, expected float32", name(compute));
  check_tensor("cross_entropy", "logits", a.logits_NV, compute, {-1, -1});
  const int64_t rows = a.logits_NV.size(0), vocabulary = a.logits_NV.size(1);
  MOIETY_CHECK(vocabulary >= 1 && a.logits_NV.stride(1) == 1, "cross_entropy: logits are {}",
               a.logits_NV.describe());
  check_tensor("cross_entropy", "target", a.target_N, DType::kInt32, {rows});
  if (a.mask_N.defined()) check_tensor("cross_entropy", "mask", a.mask_N, DType::kUInt8, {rows});
  check_tensor("cross_entropy", "loss", a.loss_N, compute, {rows});
  if (a.dlogits_NV.defined()) {
    check_element("cross_entropy", a.dlogits_NV.dtype());
    MOIETY_CHECK(compute_dtype(a.dlogits_NV.dtype()) == compute && a.dlogits_NV.stride(1) == 1,
                 "cross_entropy: dlogits are {}", a.dlogits_NV.describe());
    check_tensor("cross_entropy", "dlogits", a.dlogits_NV, a.dlogits_NV.dtype(),
                 {rows, vocabulary});
  }
  if (on_gpu("cross_entropy", compute,
             {{"logits", a.logits_NV},
              {"target", a.target_N},
              {"mask", a.mask_N},
              {"loss", a.loss_N},
              {"dlogits", a.dlogits_NV}},
             stream)) {
    if constexpr (kCudaBuilt) return cross_entropy_cuda(a, stream);
    fail_without_cuda("cross_entropy");
  }
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, "cross_entropy",
                         {{"tokens", rows}, {"vocabulary", vocabulary}});
    check_targets(a.target_N, vocabulary);
    compute == DType::kFloat64 ? cross_entropy_ref(a) : cross_entropy_cpu(a);
  });
}

void linear_cross_entropy(const LinearCrossEntropyArgs& a, Stream stream) {
  const char* operation = "linear_cross_entropy";
  const DType storage = a.x_TD.dtype(), compute = compute_dtype(storage);
  check_element(operation, storage);
  check_tensor(operation, "x", a.x_TD, storage, {-1, -1});
  const int64_t tokens = a.x_TD.size(0), d_model = a.x_TD.size(1);
  check_tensor(operation, "head", a.head_VD, storage, {-1, d_model});
  const int64_t vocabulary = a.head_VD.size(0);
  check_tensor(operation, "target", a.target_T, DType::kInt32, {tokens});
  if (a.mask_T.defined()) check_tensor(operation, "mask", a.mask_T, DType::kUInt8, {tokens});
  check_tensor(operation, "loss", a.loss_T, compute, {tokens});
  if (a.dx_TD.defined()) check_tensor(operation, "dx", a.dx_TD, storage, {tokens, d_model});
  if (a.grad_VD.defined()) {
    check_tensor(operation, "grad", a.grad_VD, compute, {vocabulary, d_model});
  }
  check_tensor(operation, "workspace", a.workspace, compute, {-1, vocabulary});
  const int64_t chunk = a.workspace.size(0);
  MOIETY_CHECK(chunk >= 1 && a.workspace.contiguous(), "{}: workspace is {}", operation,
               a.workspace.describe());
  // A step of zero tokens still overwrites the gradient.
  for (int64_t begin = 0; begin == 0 || begin < tokens; begin += chunk) {
    const int64_t end = std::min(begin + chunk, tokens);
    const auto part = [&](const TensorView& x) { return x.defined() ? x.slice(0, begin, end) : x; };
    LinearCrossEntropyArgs piece = a;
    piece.x_TD = part(a.x_TD);
    piece.target_T = part(a.target_T);
    piece.mask_T = part(a.mask_T);
    piece.loss_T = part(a.loss_T);
    piece.dx_TD = part(a.dx_TD);
    chunk_loss(piece, a.accumulate || begin > 0, stream);
  }
}

int64_t loss_chunk(int64_t requested, int64_t tokens, int64_t vocabulary, Device device) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  const int64_t least = device.type == DeviceType::kCuda ? 4096 : 1;
  const int64_t fits = std::max(least, kBytes / (4 * vocabulary));
  return std::clamp<int64_t>(requested > 0 ? requested : fits, 1, std::max<int64_t>(tokens, 1));
}

}  // namespace moiety::nn
