#include "moiety/nn/attention_kernel.h"

#include <cmath>

namespace moiety::nn {
namespace {

HeadStrides strides_of(const TensorView& x) {
  return {x.raw(), x.stride(0), x.stride(1), x.stride(2), x.dims() == 5 ? x.stride(3) : 0};
}

AttentionJob job_of(const char* operation, const AttentionArgs& a) {
  const TensorView& q = a.q_BSGMC;
  AttentionJob job;
  job.dtype = q.dtype();
  if (job.dtype == DType::kFloat64) {
    fail(ErrorKind::kUnsupported, "{}: {} heads are for CPUs alone", operation, name(job.dtype));
  }
  job.sequences = q.size(0);
  job.queries = q.size(1);
  job.groups = q.size(2);
  job.heads = q.size(3);
  job.head_dim = q.size(4);
  job.keys = a.k_BSGC.size(1);
  job.scale = 1 / std::sqrt(static_cast<float>(job.head_dim));
  job.q = strides_of(q);
  job.k = strides_of(a.k_BSGC);
  job.v = strides_of(a.v_BSGC);
  job.o = strides_of(a.o_BSGMC);
  job.lse = a.lse_BGMS.data<float>();
  job.cudnn = a.cudnn;
  if (a.document_start_BS.defined()) job.document_start = a.document_start_BS.data<int32_t>();
  return job;
}

}  // namespace

AttentionJob job_of(const AttentionArgs& args) { return job_of("attention", args); }

AttentionJob job_of(const AttentionBackwardArgs& a) {
  AttentionJob job = job_of("attention_backward", a.forward);
  job.backward = true;
  job.d_out = strides_of(a.do_BSGMC);
  job.dq = strides_of(a.dq_BSGMC);
  job.dk = strides_of(a.dk_BSGC);
  job.dv = strides_of(a.dv_BSGC);
  job.delta = a.delta_BGMS.data<float>();
  return job;
}

bool suits_tensor_cores(const AttentionJob& job) {
  if (job.dtype != DType::kBFloat16) return false;
  for (const HeadStrides* x :
       {&job.q, &job.k, &job.v, &job.o, &job.d_out, &job.dq, &job.dk, &job.dv}) {
    const int64_t strides = x->sequence | x->row | x->group | x->head;
    if ((reinterpret_cast<uintptr_t>(x->data) | static_cast<uintptr_t>(strides * 2)) % 16 != 0) {
      return false;
    }
  }
  return true;
}

std::vector<AttentionKernel> choose_kernels(const AttentionJob& job) {
  const int64_t c = job.head_dim;
  const bool tiles = suits_tensor_cores(job) && (c == 32 || c == 64 || c == 128);
  const AttentionPath path = tiles ? AttentionPath::kTiles : AttentionPath::kPlain;
  const auto kernel = [&](AttentionPass pass) {
    return AttentionKernel{path, pass, job.dtype, tiles ? c : 0};
  };
  using enum AttentionPass;
  if (!job.backward) return {kernel(kForward)};
  if (!tiles) return {kernel(kQueryGradient), kernel(kKeyGradient)};
  return {kernel(kDots), kernel(kQueryGradient), kernel(kKeyGradient)};
}

}  // namespace moiety::nn
