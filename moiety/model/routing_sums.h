// The counts and sums that a pass adds to the sums of its step (step_stats.h). They are the same
// bits on a GPU: integers are exact, and the order of doubles is fixed.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/model/step_stats.h"

namespace moiety::model {

// own = {valid targets, tokens}, int64; scope = own if `in_scope`, else zeros. Targets (int32) and
// masks (uint8) are as in loss.h; absent targets count no tokens, and padding (routed = 0, uint8,
// optional), which has no targets, is no token.
struct TargetCount {
  TensorView target_T;
  TensorView mask_T;
  TensorView own_2;
  TensorView scope_2;
  bool in_scope = true;
  TensorView routed_T = {};
};
void count_targets(const TargetCount& args, Stream stream);

// Adds a micro-batch's counts to count, pairs and layer words.
struct RoutingCounts {
  TensorView own_2;  // from count_targets; absent if another rank reports
  // int64 [L, S, E + 1], as in RouterStats; the last column belongs to no expert
  TensorView count_LSE;
  TensorView info_LW;  // int64 [L, 16], words of moe::InfoWord
};
void add_counts(const RoutingCounts& counts, const StepSums& sums, Stream stream);

// out = the sum of x over its layers, ascending; int64 or float64.
void sum_layers(TensorView x_LSE, TensorView out_SE, Stream stream);

// aux_sum and z_sum += weight[0] * loss, where weight is int64 [2] and loss is float64 {aux, z}.
void add_routing_losses(TensorView weight_2, TensorView loss_2, const StepSums& sums,
                        Stream stream);

// loss_sum += the sum of loss_T (float32), in float64: lane t mod 1024 takes its elements in
// ascending order, then lanes are folded by halves (l += l + 512, 256 ... 1).
inline constexpr int kLossLanes = 1024;
void add_losses(TensorView loss_T, const StepSums& sums, Stream stream);

void count_targets_cuda(const TargetCount& args, const Stream& stream);
void add_counts_cuda(const RoutingCounts& counts, const StepSums& sums, const Stream& stream);
void sum_layers_cuda(TensorView x_LSE, TensorView out_SE, const Stream& stream);
void add_routing_losses_cuda(TensorView weight_2, TensorView loss_2, const StepSums& sums,
                             const Stream& stream);
void add_losses_cuda(TensorView loss_T, const StepSums& sums, const Stream& stream);

}  // namespace moiety::model
