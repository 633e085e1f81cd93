// One mixture-of-experts layer: router, dispatch, experts, combine, and the way back
// (docs/spec/trainer.md#forward). It owns its configuration alone: weights, gradients and
// activations are views, and one EpGroup serves all layers of a model.
//
//   h -> router -> idx, w -> prepare -> dispatch h, w -> grouped MLP with p = w -> combine -> out
//
// What backward needs lies on the caller's arena, allocated first, until the caller releases it
// after backward; temporaries are given back before the call returns. Collective over the group,
// with T = 0 on a rank too. Letters as in router.h; L local experts, F ffn size, H columns of the
// hidden activation (2F or F), C capacity in rows.
#pragma once

#include <cstdint>
#include <optional>

#include "moiety/base/arena.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_probe.h"
#include "moiety/gemm/quantized_mlp.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/ep_group.h"
#include "moiety/moe/expert_map.h"
#include "moiety/moe/router.h"

namespace moiety::moe {

struct MoeConfig {
  DType dtype = DType::kFloat32;  // of activations and weights: float32 or bfloat16
  int64_t model = 0;              // D
  int64_t ffn = 0;                // F
  RouterConfig router;
  gemm::Activation activation = gemm::swiglu();
  Reduction reduction = Reduction::kRank;
  OverflowPolicy overflow = OverflowPolicy::kError;
  int64_t alignment = 1;  // of an expert's rows
};

struct MoeWeights {
  TensorView router_ED;
  TensorView router_bias_E;  // float32, optional
  gemm::GroupedWeight w1;    // [L, H, D]
  gemm::GroupedWeight w2;    // [L, D, F]
  // With a recipe these take the place of w1 and w2.
  gemm::QuantizedLinear quantized_1 = {}, quantized_2 = {};
  TensorView b1_LH, b2_LD;  // optional
};

// main_grad, float32 or bfloat16. A target that is not defined is not computed. beta: 0 overwrites,
// 1 adds.
struct MoeGrads {
  TensorView router_ED;
  float router_beta = 0;
  gemm::GradTarget w1, w2;
  TensorView b1_LH, b2_LD;
  gemm::GroupScalar bias_beta = {0, {}};
};

// What a rank's experts read and leave.
struct MoeRows {
  TensorView rows_CD;    // the tokens that came to this rank's experts
  TensorView slot_w;     // [C] and their weights
  TensorView hidden_CH;  // FC1's output; backward overwrites it with its gradient
};

// What backward makes of those rows. Weight gradients read dy and `inner`, and of MoeRows rows and
// hidden; dx is free again when backward returns.
struct MoeGradientRows {
  TensorView dy_CD;     // of the experts' outputs
  TensorView inner_CF;  // FC2's input
  TensorView dx_CD;     // of the experts' inputs
};

// From forward to backward of one layer: views into the arena, and the plan.
struct MoeSaved {
  EpPlan plan;
  TensorView logits_TE, idx_TK;
  TensorView weight_TK;  // with MoeForwardArgs::recompute alone
  MoeRows rows;          // without it alone
};

// How the group fared, from the info words of a forward pass, which lie in host memory.
struct MoeStats {
  int64_t required = 0;  // rows that the fullest rank of the group needs to drop nothing
  int64_t capacity = 0;  // rows of this rank
  int64_t dropped = 0;   // pairs dropped in the group
  bool overflow = false;
};
MoeStats moe_stats(const TensorView& info);

// What the group must hold for such layers and `tokens_max` tokens of a rank.
EpLimits moe_limits(const MoeConfig& config, int64_t tokens_max);

struct MoeForwardArgs {
  MoeWeights weights;
  TensorView h_TD;
  TensorView mask_T;     // uint8, optional: router.h
  TensorView addend;     // optional [T, D]: out = y + addend with one rounding (combine.h)
  int64_t capacity = 0;  // C
  TensorView out_TD;     // of the layer's dtype or float32
  RouterStats stats;     // out
  TensorView info;       // out, optional: int64 [16], the plan's info words (InfoWord)
  // `saved` keeps the routing alone: `rows_again` makes the rows by the same plan once more, to the
  // same bits; nothing is counted or dropped anew.
  bool recompute = false;
  TensorProbe* probe = nullptr;
};

struct MoeBackwardArgs {
  MoeWeights weights;
  MoeGrads grads;
  TensorView h_TD;     // as in forward
  TensorView dout_TD;  // of the layer's dtype; not read if `gradient` is given
  TensorView addend;   // optional [T, D], the layer's dtype or float32: added to dh
  TensorView count;    // int64 [S, E+1], of the scope of the losses (router.h)
  TensorView scope;    // int64 [2]
  TensorView dh_TD;    // out, of the layer's dtype, one rounding
  TensorProbe* probe = nullptr;
  MoeRows rows = {};              // of `rows_again`; absent: as forward saved them
  MoeGradientRows gradient = {};  // of `receive_gradient`; absent: temporaries
};

class MoeLayer {
 public:
  // Borrows the group, whose experts, model size, K and reduction must suffice.
  MoeLayer(const MoeConfig& config, EpGroup& group);

  // From now on h travels to the experts quantized (kFp8Block1x128 or kMxfp8, layers of bfloat16),
  // each row once and whatever the ranks, and is not quantized again: FC1 multiplies the very codes
  // if this is its recipe's format for inputs. Otherwise, and for its weight gradient, it reads
  // them dequantized (quant/dequantize.h), rounded to bfloat16: MoeRows::rows_CD. All else travels
  // in the layer's dtype; gradients are those of h, as if it had not been quantized. Equal on all
  // ranks of the group.
  void set_dispatch(const std::optional<QuantSpec>& format);
  const std::optional<QuantSpec>& dispatch_format() const { return dispatch_; }

  // Fills `saved` with tensors on the arena; without it (evaluation) nothing stays.
  // Under kError the caller asks `group.check(saved.plan.epoch)` once per step.
  void forward(const MoeForwardArgs& args, MoeSaved* saved, Arena& arena, Stream stream) const;
  // Of a forward under `recompute`: dispatches h once more to `rows` and runs FC1 again; of
  // `weights` that is w1.
  void rows_again(const MoeWeights& weights, TensorView h_TD, const MoeSaved& saved,
                  const MoeRows& rows, TensorProbe* probe, Arena& arena, Stream stream) const;
  // Consumes `saved`, but for what weight gradients read.
  void backward(const MoeBackwardArgs& args, const MoeSaved& saved, Arena& arena,
                Stream stream) const;

  // The first exchange of backward alone, for a caller that puts work between it and the rest.
  void receive_gradient(const MoeSaved& saved, TensorView dout_TD, const MoeGradientRows& gradient,
                        TensorProbe* probe, Stream stream) const;
  // The weight gradients alone, any time after a `backward` that had no targets for them: `rows`
  // and `gradient` are those that it was given, still as it left them. The same bits. Of `weights`
  // shapes and recipes count.
  struct WeightGradients {
    MoeWeights weights;
    gemm::GradTarget w1, w2;
    MoeRows rows;  // absent: as forward saved them
    MoeGradientRows gradient;
  };
  void backward_weights(const WeightGradients& args, const MoeSaved& saved, Arena& arena,
                        Stream stream) const;

  MoeRows make_rows(int64_t capacity, Arena& arena) const;
  MoeGradientRows make_gradient_rows(int64_t capacity, Arena& arena) const;

  const MoeConfig& config() const { return config_; }
  // Rows for `factor` times the balanced load of `group_tokens` tokens.
  int64_t capacity_for(double factor, int64_t group_tokens) const;
  // The path that computes experts without a recipe, and why no better one does.
  const gemm::PathReport& path() const { return path_; }

 private:
  gemm::GroupedMlp mlp(const MoeWeights& weights) const;
  // `rows`: what came, if it came quantized.
  gemm::QuantizedMlp quantized_mlp(const MoeWeights& weights, const QuantizedView& rows = {}) const;
  gemm::MlpInput mlp_input(const EpPlan& plan, const MoeRows& rows) const;
  // Sends h and its weights to the experts. Rows that travel quantized are returned, on the arena.
  QuantizedView send(const MoeSaved& saved, TensorView h_TD, TensorView weight_TK,
                     const MoeRows& rows, TensorProbe* probe, Arena& arena, Stream stream) const;
  ExpertRows expert_rows(const MoeSaved& saved) const;

  MoeConfig config_;
  std::optional<QuantSpec> dispatch_;
  EpGroup* group_;
  gemm::PathReport path_;
};

}  // namespace moiety::moe
