#include "moiety/nn/attention_device.cuh"

namespace moiety::nn {
namespace {

AttentionPath path_of(const AttentionJob& job, Device device) {
  const bool cudnn = suits_tensor_cores(job) && cudnn_takes(job, device.index);
  return cudnn ? AttentionPath::kCudnn : choose_kernels(job).front().path;
}

AttentionStart start_of(const AttentionKernel& kernel, const AttentionJob& job) {
  return kernel.path == AttentionPath::kTiles ? tile_attention_start(kernel, job)
                                              : plain_attention_start(kernel, job);
}

int64_t workspace_of(const AttentionJob& job, Device device) {
  const bool cudnn = path_of(job, device) == AttentionPath::kCudnn;
  return cudnn ? attention_cudnn_workspace(job, device.index) : 0;
}

}  // namespace

AttentionPath attention_path(const AttentionArgs& args) {
  return path_of(job_of(args), args.q_BSGMC.device());
}

AttentionPath attention_backward_path(const AttentionBackwardArgs& args) {
  return path_of(job_of(args), args.forward.q_BSGMC.device());
}

int64_t attention_workspace_cuda(const AttentionArgs& args, const Stream& stream) {
  return workspace_of(job_of(args), stream.device());
}

int64_t attention_backward_workspace_cuda(const AttentionBackwardArgs& args, const Stream& stream) {
  return workspace_of(job_of(args), stream.device());
}

void attention_cuda(const AttentionArgs& args, const Stream& stream) {
  const AttentionJob job = job_of(args);
  if (path_of(job, stream.device()) == AttentionPath::kCudnn) {
    return attention_cudnn(job, args.workspace, stream);
  }
  for (const AttentionKernel& kernel : choose_kernels(job)) {
    const AttentionStart start = start_of(kernel, job);
    launch("attention", start.kernel, start.shape, stream, job);
  }
}

void attention_backward_cuda(const AttentionBackwardArgs& args, const Stream& stream) {
  const AttentionJob job = job_of(args);
  if (path_of(job, stream.device()) == AttentionPath::kCudnn) {
    return attention_cudnn(job, args.workspace, stream);
  }
  for (const AttentionKernel& kernel : choose_kernels(job)) {
    const AttentionStart start = start_of(kernel, job);
    launch("attention_backward", start.kernel, start.shape, stream, job);
  }
}

}  // namespace moiety::nn
