// Attention on GPUs. Internal to moiety/model. Contract: attention.h.
#pragma once

#include "moiety/model/attention.h"

namespace moiety::model {

// One tensor of heads, [B, S, G, M, C] or [B, S, G, C] (then `head` is 0): elements between
// neighbours of every dimension but the last.
struct HeadStrides {
  void* data = nullptr;
  int64_t sequence = 0, row = 0, group = 0, head = 0;
};

struct AttentionJob {
  DType dtype = DType::kBFloat16;
  int64_t sequences = 0, queries = 0, keys = 0, groups = 0, heads = 0, head_dim = 0;
  float scale = 1;
  HeadStrides q, k, v, o;
  HeadStrides d_out, dq, dk, dv;            // backward
  float* lse = nullptr;                     // [B, G, M, Sq]
  float* delta = nullptr;                   // backward: likewise
  const int32_t* document_start = nullptr;  // [B, Sq]; null: one document
};

void attention_cuda(const AttentionArgs& args, const Stream& stream);
void attention_backward_cuda(const AttentionBackwardArgs& args, const Stream& stream);

// By tensor cores: bf16, heads of 32, 64 or 128, all addresses and strides multiples of 16 bytes.
void attention_tiles_cuda(const AttentionJob& job, const Stream& stream);
void attention_tiles_backward_cuda(const AttentionJob& job, const Stream& stream);
// All else of fp32 and bf16, a warp for every query or key.
void attention_plain_cuda(const AttentionJob& job, const Stream& stream);
void attention_plain_backward_cuda(const AttentionJob& job, const Stream& stream);

}  // namespace moiety::model
