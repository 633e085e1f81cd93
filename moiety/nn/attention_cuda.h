// Attention on GPUs: the job that the kernels take, and the three paths to compute it. Internal to
// moiety/nn; the contract is in attention.h.
#pragma once

#include <string>

#include "moiety/nn/attention.h"

namespace moiety::nn {

// One tensor of heads, [B, S, G, M, C] or [B, S, G, C] (then `head` is 0), with the distance in
// elements between neighbours of every dimension except the last.
struct HeadStrides {
  void* data = nullptr;
  int64_t sequence = 0, row = 0, group = 0, head = 0;
};

struct AttentionJob {
  DType dtype = DType::kBFloat16;
  bool backward = false;
  int64_t sequences = 0, queries = 0, keys = 0, groups = 0, heads = 0, head_dim = 0;
  float scale = 1;
  HeadStrides q, k, v, o;
  HeadStrides d_out, dq, dk, dv;            // backward
  float* lse = nullptr;                     // [B, G, M, Sq]
  float* delta = nullptr;                   // backward, [B, G, M, Sq]
  const int32_t* document_start = nullptr;  // [B, Sq]; null: one document
  bool cudnn = true;                        // whether cuDNN may take the job
};

void attention_cuda(const AttentionArgs& args, const Stream& stream);
void attention_backward_cuda(const AttentionBackwardArgs& args, const Stream& stream);
int64_t attention_workspace_cuda(const AttentionArgs& args, const Stream& stream);
int64_t attention_backward_workspace_cuda(const AttentionBackwardArgs& args, const Stream& stream);

// The path that computes a call on a GPU.
enum class AttentionPath { kCudnn, kTiles, kPlain };
constexpr const char* name(AttentionPath path) {
  return path == AttentionPath::kCudnn   ? "cudnn"
         : path == AttentionPath::kTiles ? "tiles"
                                         : "plain";
}
AttentionPath attention_path(const AttentionArgs& args);
AttentionPath attention_backward_path(const AttentionBackwardArgs& args);

// Whether cuDNN's fused kernels take the job: forward or backward, in bf16,
// with heads of a multiple of 32, as many queries as keys and at least 128, no documents, and a
// shape that its heuristics take.
//
// cuDNN plans, and compiles, a shape once; its plan depends only on the shape, the GPU and cuDNN's
// version. If q's heads have no single stride, each sequence is a launch of its own; where such
// launches would be small, q is packed in the workspace (and dq spread from it). The workspace of
// backward has 2 bytes for every score of a launch; a launch is then a sequence, or a group of
// heads if the workspace would exceed 2 GiB. Where the caller gives none, a workspace is allocated
// at a stream's first call (also while the stream is captured) and kept until the process ends.
bool cudnn_takes(const AttentionJob& job, int device);
// For jobs that cudnn_takes; `workspace` may be undefined.
void attention_cudnn(const AttentionJob& job, const TensorView& workspace, const Stream& stream);
// Bytes of that workspace; 0 where cuDNN does not take the job.
int64_t attention_cudnn_workspace(const AttentionJob& job, int device);
// Bytes of the workspace of bf16 backward passes over sequences of one document each; 0 where cuDNN
// does not take them.
struct AttentionSizes {
  int64_t sequences = 0, length = 0, heads = 0, kv_heads = 0, head_dim = 0;
};
int64_t cudnn_workspace(const AttentionSizes& sizes);

// Whether cuDNN is available, or why not.
struct CudnnStatus {
  bool available = false;
  size_t version = 0;  // 91400 is 9.14
  std::string text;
};
const CudnnStatus& cudnn_status();

}  // namespace moiety::nn
