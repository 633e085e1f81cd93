// The router of an MoE layer: logits, choice of K experts per token, weights, the losses that keep
// experts balanced, and the backward pass (docs/spec/trainer.md#router).
//
// Letters: T tokens, D model size, E experts, K choices, S segments of the statistics. Segment s is
// tokens [s*T/S, (s+1)*T/S). The loss kind `sequence` has one segment per sequence, the others have
// one.
//
// Scores, choice, weights and losses are fp32 with fixed bits (base/math; row sums by lane_sum);
// only the matrix products have the bound of gemm.h. Sums over tokens are taken in blocks of 64
// from a segment's start, ascending, then the blocks' sums are added in ascending order (in fp64),
// whatever the number of threads.
//
// On a GPU everything except the products has these bits (a NaN is any NaN), nothing waits for the
// host, and every call can be captured. The gradient of the logits stays fp32 when it meets bf16.
// CPUs widen the other operand; on a GPU the gradient becomes three bf16 pieces, whose products are
// exact in fp32: dx w is then a product of K = 3E, and dx^T h is the sum of three of K = T.
//
// A step runs router_forward on each rank; then, where the scope of the losses is larger than one
// rank, the caller sums `count`, `sum` (and `scope`) over the ranks; then router_losses for the
// values, and router_backward. For kind `hf` backward takes the counts summed over all MoE layers.
//
// `scope` is int64 [2] = {n, N}: valid targets and tokens (unmasked) over which the losses are
// taken, those of a micro-batch or of all data ranks. A loss enters the objective with the factor
// n.
#pragma once

#include <cstdint>
#include <optional>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::moe {

enum class Score { kSoftmax, kSigmoid };

// The auxiliary loss, sum_e f_e P_e. f_e is from the shares of the pairs and carries no gradient;
// P_e is the mean of q_te (RouterStats) over N tokens.
enum class AuxLoss {
  kNone,
  kSwitch,    // f_e = E c_e / (K N): 1 when balanced (Fedus et al., Switch Transformers, 2021)
  kHf,        // f_e = E c_e / N over the tokens of all MoE layers together: K (transformers)
  kSequence,  // as kSwitch within each sequence, averaged over the tokens (DeepSeek-V3, 2024)
};

struct RouterConfig {
  int64_t experts = 0;  // 1..4096
  int64_t top_k = 0;    // 1..min(experts, 32)
  Score score = Score::kSoftmax;
  bool renormalize = true;  // weights of a token sum to `scale`
  float scale = 1.0f;       // > 0
  int64_t groups = 1;  // divides experts; only experts of the best `group_top_k` groups are chosen
  int64_t group_top_k = 1;  // 1..groups, group_top_k * experts / groups >= top_k
  AuxLoss aux = AuxLoss::kNone;
  float aux_coef = 0.0f;
  float z_coef = 0.0f;         // factor of the mean of lse_t^2, lse_t = log(sum_e exp(logit_te))
  bool force_balance = false;  // choice k of token t is (t*K + k) mod E: for benchmarks
};

// Throws Error(kInvalidArgument) naming the first value out of range.
void check(const RouterConfig& config);

// The facts about the choice that the losses need. Both tensors may be summed over ranks as they
// are.
struct RouterStats {
  // int64 [S, E+1]: pairs (token, choice) of each expert before any drop; the last column has
  // tokens.
  TensorView count;
  // float64 [S, E+1]: sums over tokens of q_te (softmax: p; sigmoid: p divided by its row sum); the
  // last column has the sum of lse_t^2.
  TensorView sum;
};

// On a GPU, the statistics as sums over blocks of tokens, which are still to be added: by a launch of
// its own, or beside the plan of the same tokens (PrepareArgs::statistics).
struct BlockSums {
  const int32_t* block_count = nullptr;  // [segments * rows, columns]
  const float* block_sum = nullptr;
  int64_t segments = 0, rows = 0, columns = 0;  // rows: blocks of a segment
  int64_t* count = nullptr;                     // [segments, columns]: results
  double* sum = nullptr;
};

struct RouterForwardArgs {
  TensorView h_TD;       // float32 or bfloat16
  TensorView w_ED;       // in h's dtype
  TensorView bias_E;     // float32, added to the scores only for the choice; optional
  TensorView mask_T;     // uint8, 0: the token is routed nowhere and is in no statistic; optional
  TensorView logits_TE;  // result, float32; backward needs it
  TensorView idx_TK;     // result, int32: K distinct experts by descending score; all -1 if masked
  TensorView weight_TK;  // result, float32; 0 if masked
  RouterStats stats;     // result, overwritten
  TensorView workspace;  // uint8, at least router_forward_workspace bytes, aligned to 4
  // Optional: gets the sums of blocks, in workspace, whose caller then fills stats; on a CPU none,
  // since it fills stats here.
  BlockSums* later = nullptr;
};

// Routes tokens. The choice is the K largest of score + bias, equal ones by ascending index, with
// -0 equal to +0 and NaN last; so any input gives K distinct experts. A group's score is the sum of
// its two largest. T = 0 is legal.
void router_forward(const RouterConfig& config, const RouterForwardArgs& args, Stream stream);
int64_t router_forward_workspace(const RouterConfig& config, int64_t tokens, int64_t segments);

// The part of router_forward behind its product, for logits that are already there: the same bits.
struct RouterChooseArgs {
  TensorView logits_TE;       // float32
  TensorView bias_E, mask_T;  // as above
  // int32, optional: the choice is this one, such as that of a run before, and weights and
  // statistics are those of the logits, as ever. A token with an index outside [0, E) counts as
  // masked.
  TensorView given_idx_TK = {};
  TensorView idx_TK, weight_TK;  // results, as above
  RouterStats stats;             // result
  TensorView workspace;          // as above
};

void router_choose(const RouterConfig& config, const RouterChooseArgs& args, Stream stream);

struct RouterLossArgs {
  RouterStats stats;  // one layer's, or (hf) the sum over all MoE layers
  TensorView scope;   // int64 [2]
  TensorView loss_2;  // float64 [2], added to: {aux, sum of lse^2 / N}, without coefficients
};

void router_losses(const RouterConfig& config, const RouterLossArgs& args, Stream stream);

// The part of router_backward before its products: the gradient of the logits, that of the losses
// included.
struct RouterChooseBackwardArgs {
  TensorView logits_TE, idx_TK;  // as in forward
  TensorView dweight_TK;         // float32
  TensorView count, scope;       // as below
  TensorView dlogits_TE;         // result, float32
};

void router_choose_backward(const RouterConfig& config, const RouterChooseBackwardArgs& args,
                            Stream stream);

// What the experts' backward pass leaves in slots, in place of `dweight_TK` and `addend_TD`, for a
// GPU that sums rows beside the router's products (router_sums_slots): the bits are those of
// dispatch_backward's sums in a group of one rank, with Reduction::kRank.
struct RouterSlots {
  TensorView rows_CD;    // bfloat16; absent: none of this
  TensorView dweight_C;  // float32
  TensorView slot_TK;    // int32, -1: the pair has no slot
};

struct RouterBackwardArgs {
  TensorView h_TD, w_ED, logits_TE, idx_TK;  // as in forward
  TensorView dweight_TK;                     // float32, the gradient of weight_TK
  TensorView count;      // int64 [S, E+1] over the losses' scope; (hf) summed over the MoE layers
  TensorView scope;      // int64 [2]
  TensorView dw_ED;      // float32 or bfloat16: dw := dw_beta * dw + dx^T h; not computed if absent
  float dw_beta = 0.0f;  // 0 or 1; 0 never reads dw
  TensorView addend_TD;  // in h's dtype or float32, optional; may be dh itself
  TensorView dh_TD;      // result, in h's dtype: round(dx w + addend)
  TensorView workspace;  // uint8, at least router_backward_workspace bytes, aligned to 4; 16: fast
  RouterSlots slots = {};
};

// Whether router_backward takes these slots, and operands, on the stream's device.
bool router_sums_slots(const RouterBackwardArgs& args, const Stream& stream);
void router_backward(const RouterConfig& config, const RouterBackwardArgs& args, Stream stream);
// For one of the two kinds of devices, or without it for either.
int64_t router_backward_workspace(const RouterConfig& config, DType dtype, int64_t tokens,
                                  int64_t model, std::optional<DeviceType> device = {});

// The auxiliary-loss-free balance of DeepSeek-V3, once per optimizer step: bias_e += rate *
// sign(mean(c) - c_e), with c = int64 [E], pairs of the whole global batch. `skip` is an optional
// int32 [1], read when the operation runs; if it is not 0, nothing changes.
void router_update_bias(TensorView bias_E, TensorView count_E, float rate, Stream stream,
                        TensorView skip = {});

}  // namespace moiety::moe
