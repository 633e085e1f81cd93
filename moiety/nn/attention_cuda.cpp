#include "moiety/nn/attention_cuda.h"

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

AttentionJob job_of(const AttentionBackwardArgs& a) {
  AttentionJob job = job_of("attention_backward", a.forward);
  job.d_out = strides_of(a.do_BSGMC);
  job.dq = strides_of(a.dq_BSGMC);
  job.dk = strides_of(a.dk_BSGC);
  job.dv = strides_of(a.dv_BSGC);
  job.delta = a.delta_BGMS.data<float>();
  return job;
}

// Whether addresses and strides of these tensors suit the tensor cores.
bool aligned(const AttentionJob& job) {
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

AttentionPath path_of(const AttentionJob& job, Device device) {
  if (!aligned(job)) return AttentionPath::kPlain;
  if (cudnn_takes(job, device.index)) return AttentionPath::kCudnn;
  const bool tiles = job.head_dim == 32 || job.head_dim == 64 || job.head_dim == 128;
  return tiles ? AttentionPath::kTiles : AttentionPath::kPlain;
}

}  // namespace

AttentionPath attention_path(const AttentionArgs& args) {
  return path_of(job_of("attention", args), args.q_BSGMC.device());
}

AttentionPath attention_backward_path(const AttentionBackwardArgs& args) {
  return path_of(job_of(args), args.forward.q_BSGMC.device());
}

void attention_cuda(const AttentionArgs& args, const Stream& stream) {
  const AttentionJob job = job_of("attention", args);
  switch (path_of(job, stream.device())) {
    case AttentionPath::kCudnn:
      return attention_cudnn(job, stream);
    case AttentionPath::kTiles:
      return attention_tiles_cuda(job, stream);
    case AttentionPath::kPlain:
      return attention_plain_cuda(job, stream);
  }
}

void attention_backward_cuda(const AttentionBackwardArgs& args, const Stream& stream) {
  const AttentionJob job = job_of(args);
  switch (path_of(job, stream.device())) {
    case AttentionPath::kCudnn:
      return attention_cudnn(job, stream);
    case AttentionPath::kTiles:
      return attention_tiles_backward_cuda(job, stream);
    case AttentionPath::kPlain:
      return attention_plain_backward_cuda(job, stream);
  }
}

}  // namespace moiety::nn
