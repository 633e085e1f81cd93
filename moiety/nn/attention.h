// Causal grouped-query attention, optionally within documents, and its backward pass; scores are
// made block by block and never stored (Dao et al., "FlashAttention", 2022).
//
// There are B sequences with Sq queries and Sk >= Sq keys each; the queries are the last Sq of the
// Sk positions (training: Sq = Sk; decoding: keys from a cache). G key/value heads have M query
// heads each; query head j = g M + m uses kv head g. Views may be strided in all but the last
// dimension.
//   s_ij = C^(-1/2) q_i.k_j for document_start_i <= j <= position_i
//   p = softmax_j(s)     o_i = sum_j p_ij v_j     lse_i = log sum_j exp(s_ij)
// Backward:
//   delta = dO.O     P = exp(s - lse)     dS = C^(-1/2) P (dO V^T - delta)
//   dV = P^T dO      dQ = dS K            dK = dS^T Q
// dK and dV sum the heads of a group in ascending order. The same inputs give the same bits with
// any number of threads. (On the fast path an Inf or NaN in a key or value may also reach queries
// of its sequence that do not see it.)
//
// The error bound of reference and fast path, against exact arithmetic on the same stored inputs,
// uses these quantities, where r is half an ulp of the stored result:
//   u = 2^-23     N = Sk     a_i = C^(-1/2) max_j sum_c |q_ic k_jc|
//   e_i = u (2 (C + 4) a_i + N + 16 + 2 |lse_i|)
//   b_i = max_j sum_c |dO_ic v_jc| + sum_c |dO_ic O_ic|
//   t_ij = C^(-1/2) p_ij b_i (e_i + u (C + N M + 16))
// The bounds themselves, with j over the keys that i sees, and sums over i also over the heads of a
// group:
//   lse: e_i + half an ulp     o: r + e_i max_j |v_jc|
//   dV_jc: r + sum_i (e_i + u N M) p_ij |dO_ic|
//   dQ_ic: r + sum_j t_ij |k_jc|     dK_jc: r + sum_i t_ij |q_ic|
//
// On GPUs tensor cores multiply bf16 heads of 32, 64 or 128 elements whose addresses and strides
// are multiples of 16 bytes. Where cuDNN is there, its fused kernels also take heads of other
// multiples of 32, if there are as many queries as keys, at least 128, and no documents. Both round
// p and dS to bf16 before they multiply, which adds, with w = 2^-8:
//   o: w sum_j p_ij |v_jc|       dV: w sum_i p_ij |dO_ic|
//   dQ: w sum_j |dS_ij k_jc|     dK: w sum_i |dS_ij q_ic|
// cuDNN rounds dK and dV of each head of a group before it sums them: there w counts twice. All
// other heads are computed in fp32 within the first bounds. Every path gives the same bits every
// time, and trusts document_start to be ascending and not after the query's position. Without
// `workspace` the area that cuDNN works in belongs to the stream, so that graphs which were captured
// on one stream may not run side by side; with it a call has no memory of its own.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::nn {

struct AttentionArgs {
  TensorView q_BSGMC;  // storage, C even, 8 to 256
  TensorView k_BSGC;
  TensorView v_BSGC;
  // optional int32 [B, Sq], ascending: the first key that a query sees
  TensorView document_start_BS;
  TensorView o_BSGMC;
  TensorView lse_BGMS;  // fp32
  // On GPUs, false keeps cuDNN out: the bits of Moiety's kernels do not depend on cuDNN's version.
  bool cudnn = true;
  // uint8 [at least attention_workspace bytes], optional, on a GPU aligned to 256. No result depends
  // on it.
  TensorView workspace = {};
};
void attention(const AttentionArgs& args, Stream stream);

struct AttentionBackwardArgs {
  AttentionArgs forward;  // with the forward's o and lse
  TensorView do_BSGMC;
  TensorView dq_BSGMC;
  TensorView dk_BSGC;
  TensorView dv_BSGC;
  TensorView delta_BGMS = {};  // on GPUs: scratch of the shape and dtype of lse
  TensorView workspace = {};   // of attention_backward_workspace bytes; as in AttentionArgs
};
void attention_backward(const AttentionBackwardArgs& args, Stream stream);

// Bytes of `workspace` for these arguments on this stream's device; 0 on a CPU.
int64_t attention_workspace(const AttentionArgs& args, Stream stream);
int64_t attention_backward_workspace(const AttentionBackwardArgs& args, Stream stream);

// The heads of a fused projection [T, (H + 2G) C] in kv-group order (M = H/G query heads, k, v).
struct QkvHeads {
  TensorView q_BSGMC;
  TensorView k_BSGC;
  TensorView v_BSGC;
  TensorView qk_TGNC;  // the M query heads and the key head of each group, for rope
};
QkvHeads split_heads(const TensorView& qkv, int64_t sequences, int64_t heads, int64_t kv_heads,
                     int64_t head_dim);

// The scalar reference (also double) and the fast path.
void attention_ref(const AttentionArgs& args);
void attention_backward_ref(const AttentionBackwardArgs& args);
void attention_cpu(const AttentionArgs& args);
void attention_backward_cpu(const AttentionBackwardArgs& args);

}  // namespace moiety::nn
