// One mixture-of-experts layer: router, dispatch, experts, combine, and the way back
// (docs/spec/trainer.md#forward). It owns only its configuration: weights, gradients and
// activations are views, and one EpGroup serves all layers of a model.
//
//    h -> router -> idx, w -> prepare -> dispatch h, w -> grouped MLP with p = w -> combine -> out
//
// With RowLayout::kRank experts read rows through a map of the plan's slots, with the bits of rows
// that are copied to the order of experts. In a group of one rank nothing needs to travel: they read
// h, and the gradient of out, where they lie, and forward keeps maps, routing and hidden activation
// alone. In other groups they read one copy of each row that came, M rows at most (mapped_rows), and
// forward keeps these beside them. With a recipe it keeps column codes of rows instead (set_kept).
//
// Tensors that backward needs lie on the caller's arena, allocated first, until the caller releases
// them after backward; temporaries are given back before the call returns. Rows that peers could
// reach where they lie (EpOptions::zero_copy) are in memory lent to the arena (Arena::lend), if
// there is any: the rows that come, unless they travel quantized, and under kToken what experts
// make of them. Gradients are never there. Collective over the group, also with T = 0 on a rank.
// Letters are those of router.h, and: L local experts, F ffn size, H columns of the hidden
// activation (2F or F), C capacity in rows.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "moiety/base/arena.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_probe.h"
#include "moiety/gemm/quantized_mlp.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/dispatch.h"
#include "moiety/moe/ep_group.h"
#include "moiety/moe/expert_map.h"
#include "moiety/moe/router.h"
#include "moiety/moe/row_layout.h"
#include "moiety/moe/slot_maps.h"

namespace moiety::moe {

struct MoeConfig {
  DType dtype = DType::kFloat32;  // dtype of activations and weights: float32 or bfloat16
  int64_t model = 0;              // D
  int64_t ffn = 0;                // F
  RouterConfig router;
  gemm::Activation activation = gemm::swiglu();
  int64_t interleave = 0;  // of W1's rows and of H's columns (gemm/swiglu.h)
  std::optional<gemm::MlpPath> path = std::nullopt;  // the path that is required; absent: the best
  Reduction reduction = Reduction::kRank;
  OverflowPolicy overflow = OverflowPolicy::kError;
  int64_t alignment = 1;  // multiple to which an expert's rows are padded
  Overlap overlap = Overlap::kNone;
  RowLayout layout = RowLayout::kAuto;
  std::optional<RowCopies> copies = {};  // for measurements: instead of choose_row_copies
};

struct MoeWeights {
  TensorView router_ED;
  TensorView router_bias_E;  // float32, optional
  gemm::GroupedWeight w1;    // [L, H, D]
  gemm::GroupedWeight w2;    // [L, D, F]
  // With a recipe these replace w1 and w2.
  gemm::QuantizedLinear quantized_1 = {}, quantized_2 = {};
  TensorView b1_LH = {}, b2_LD = {};  // optional
};

// The targets of weight gradients, main_grad in float32 or bfloat16. The gradient of an undefined
// target is not computed. beta 0 overwrites, 1 adds.
struct MoeGrads {
  TensorView router_ED;
  float router_beta = 0;
  gemm::GradTarget w1, w2;
  TensorView b1_LH, b2_LD;
  gemm::GroupScalar bias_beta = {0, {}};
};

// The input of a rank's experts, and their hidden activation.
struct MoeRows {
  // The tokens that came to this rank's experts: in kRank [M, D]; absent: not kept, or h.
  TensorView rows_CD;
  // In place of those, for the weight gradient of w1, which alone reads them again: their column
  // codes (MoeLayer::set_kept).
  QuantizedView columns = {};
  TensorView source_C;   // kRank: which rows of those, or of h, these are (slot_maps.h)
  TensorView slot_w;     // [C]: the weights of those tokens
  TensorView hidden_CH;  // FC1's output; backward overwrites it with its gradient
};

// The gradients of those rows, made by backward; what is absent and wanted is a temporary of its
// own. Weight gradients read dy and `inner`, and from MoeRows rows and hidden; dx is free again when
// backward returns.
struct MoeGradientRows {
  TensorView dy_CD;     // gradient of the experts' outputs, in kRank [M or more, D]; absent: of out
  TensorView inner_CF;  // FC2's input; absent if nobody wants the gradient of w2
  TensorView dx_CD;     // gradient of the experts' inputs; workspace, if that is not wanted
  TensorView source_C = {};  // as in MoeRows, where dy came by the map
};

// The part of a layer that backward needs from forward: views into the arena, and the plan.
struct MoeSaved {
  EpPlan plan;
  TensorView logits_TE, idx_TK;
  TensorView weight_TK;  // only with MoeForwardArgs::recompute
  MoeRows rows;          // only without it
};

// The group's load, from the info words of a forward pass in host memory.
struct MoeStats {
  int64_t required = 0;  // rows that the fullest rank of the group needs to drop nothing
  int64_t capacity = 0;  // rows of this rank
  int64_t dropped = 0;   // pairs dropped in the group
  bool overflow = false;
};
MoeStats moe_stats(const TensorView& info);

// The limits that a group needs for such layers and `tokens_max` tokens of a rank.
EpLimits moe_limits(const MoeConfig& config, int64_t tokens_max);

struct MoeForwardArgs {
  MoeWeights weights;  // of those of experts, `begin_forward` needs none
  TensorView h_TD;
  TensorView mask_T;     // uint8, optional: router.h
  TensorView addend;     // optional [T, D]: out = y + addend with one rounding (combine.h)
  int64_t capacity = 0;  // C
  TensorView out_TD;     // in the layer's dtype or float32
  RouterStats stats;     // result
  TensorView info;       // result, optional: int64 [16], the plan's info words (InfoWord)
  // Nobody wants the gradient of w1, which alone reads the rows again: they are not kept.
  bool frozen_w1 = false;
  // Keep only the routing in `saved`: `rows_again` makes the rows once more, with the same plan and
  // bits; nothing is counted or dropped anew.
  bool recompute = false;
  TensorProbe* probe = nullptr;
  // Optional: a stream of exchanges alone, for a pass in parts. All passes that are under way at a
  // time have the same one.
  std::optional<Stream> exchange = {};
};

struct MoeBackwardArgs {
  MoeWeights weights;
  MoeGrads grads;
  TensorView h_TD;     // as in forward
  TensorView dout_TD;  // in the layer's dtype; in kExpert not read if `gradient` is given
  TensorView addend;   // optional [T, D], in the layer's dtype or float32: added to dh
  TensorView count;    // int64 [S, E+1], over the scope of the losses (router.h)
  TensorView scope;    // int64 [2]
  // Result, in the layer's dtype, rounded once; in place it is neither h nor dout. Absent: neither
  // it nor the router's gradient is wanted, so that nothing goes back through rows and
  // probabilities.
  TensorView dh_TD;
  TensorProbe* probe = nullptr;
  MoeRows rows = {};                    // from `rows_again`; absent: as forward saved them
  MoeGradientRows gradient = {};        // through `receive_gradient`; absent: temporaries
  std::optional<Stream> exchange = {};  // as in forward
};

// A stream beside the main one for operations that follow what is there, up to `end`, and come
// before what follows `join`; unless it is apart, the main stream itself. Others may use the stream
// after `end`.
class Beside {
 public:
  Beside() = default;
  Beside(bool apart, const Stream& side, const Stream& main, EpGroup& group);
  bool apart() const { return apart_; }
  const Stream& stream() const { return side_; }
  void end();
  void join() const;

 private:
  bool apart_ = false;
  EpGroup* group_ = nullptr;
  Stream side_, main_;
  Event end_;
};

// The experts' input as it came: rows [C], or in kRank [T]; with their codes if it came quantized.
struct MoeCame {
  TensorView x;
  QuantizedView codes;
};

// A pass of a layer in parts. A part ends where rows have set out; what the caller computes before
// the next part runs beside that, if the exchange has a stream of its own. Nothing is released on
// the arena meanwhile.
struct MoeForwardPass {
  MoeForwardArgs args;
  MoeSaved saved;
  MoeRows rows;
  MoeCame came;
  gemm::QuantizedLinear fc1 = {};  // without the weight
  Beside there, home;
  Arena* arena = nullptr;
  Stream stream;
  Arena::Mark all, temporaries;
};
struct MoeBackwardPass {
  MoeBackwardArgs args;
  TensorView gx_TD, dweight_TK;
  bool ended = false;  // there is dh already
  Beside home;
  Arena* arena = nullptr;
  Stream stream;
  Arena::Mark temporaries;
};

class MoeLayer {
 public:
  // Borrows the group, which must have enough experts, model size, K and the reduction.
  MoeLayer(const MoeConfig& config, EpGroup& group);

  // Makes h travel to the experts quantized from now on (kFp8Block1x128 or kMxfp8, in layers of
  // bfloat16): each row once, whatever the ranks, and never again. FC1 multiplies these very codes
  // if this is its recipe's format for inputs. Otherwise, and for its weight gradient, it reads
  // them dequantized (quant/dequantize.h), rounded to bfloat16: MoeRows::rows_CD, or in kRank a
  // temporary of T rows. All other rows travel in the layer's dtype; gradients are those of h, as if
  // it had not been quantized. Equal on all ranks of the group.
  void set_dispatch(const std::optional<QuantSpec>& format);
  const std::optional<QuantSpec>& dispatch_format() const { return dispatch_; }
  // The format in which FC1's recipe casts its input, if there is one: of rows that came, forward
  // then keeps the column codes alone, where these are smaller (keeps_columns).
  void set_kept(const std::optional<QuantSpec>& format) { kept_ = format; }

  // Runs forward and fills `saved` with tensors on the arena; without it (evaluation) nothing
  // stays. Under kError the caller asks `group.check(saved.plan.epoch)` once per step.
  void forward(const MoeForwardArgs& args, MoeSaved* saved, Arena& arena, Stream stream) const;
  // The same in parts: router and the way to the experts; the experts, with these weights, and the
  // way home; the end. `addend` needs its values before the second part ends.
  void begin_forward(const MoeForwardArgs& args, MoeForwardPass& pass, Arena& arena,
                     Stream stream) const;
  void forward_experts(const MoeWeights& weights, MoeForwardPass& pass) const;
  void end_forward(MoeForwardPass& pass, MoeSaved* saved) const;
  // Brings h once more to `rows` and runs FC1 again, after a forward under `recompute`;
  // `weights` only needs w1.
  void rows_again(const MoeWeights& weights, TensorView h_TD, const MoeSaved& saved,
                  const MoeRows& rows, TensorProbe* probe, Arena& arena, Stream stream,
                  const std::optional<Stream>& exchange = {}) const;
  // Runs backward and consumes `saved`, except for the tensors that weight gradients read.
  void backward(const MoeBackwardArgs& args, const MoeSaved& saved, Arena& arena,
                Stream stream) const;
  // The same in parts: the experts and the way of their gradients home, and the end.
  void backward_experts(const MoeBackwardArgs& args, const MoeSaved& saved, MoeBackwardPass& pass,
                        Arena& arena, Stream stream) const;
  void end_backward(const MoeSaved& saved, MoeBackwardPass& pass) const;

  // Runs only the first exchange of backward, for a caller that puts work between it and the rest.
  // There is none if rows are in place.
  void receive_gradient(const MoeSaved& saved, TensorView dout_TD, const MoeGradientRows& gradient,
                        TensorProbe* probe, Stream stream) const;
  // Computes the weight gradients alone, any time after a `backward` that had no targets for them,
  // with the same bits. `rows` and `gradient` are those that it was given, as it left them. Only
  // the shapes and recipes of `weights` count.
  struct WeightGradients {
    MoeWeights weights = {};
    gemm::GradTarget w1, w2;
    MoeRows rows = {};  // absent: as forward saved them
    MoeGradientRows gradient;
    TensorView h_TD, dout_TD;  // in place, as they were
  };
  void backward_weights(const WeightGradients& args, const MoeSaved& saved, Arena& arena,
                        Stream stream) const;

  // Whether this is asked for, and there are ranks to exchange with.
  bool overlaps(Overlap what) const {
    return what != Overlap::kNone && config_.overlap == what && group_->ranks() > 1;
  }
  // A stream for an exchange, which is apart from the main one where `overlap` is asked for, or the
  // caller has one.
  Beside beside(Overlap overlap, const std::optional<Stream>& exchange, const Stream& main) const {
    if (exchange && group_->ranks() > 1) return {true, *exchange, main, *group_};
    return {overlaps(overlap), side_, main, *group_};
  }

  // `copies`: with rows_CD, where there is one.
  MoeRows make_rows(int64_t capacity, Arena& arena, bool copies = true) const;
  // What forward keeps; `frozen_w1` as in MoeForwardArgs.
  MoeRows make_kept_rows(int64_t capacity, Arena& arena, bool frozen_w1) const;
  // `frozen_w2`: nobody wants the gradient of w2. `swaps`: dy and dx may change places.
  MoeGradientRows make_gradient_rows(int64_t capacity, Arena& arena, bool frozen_w2 = false,
                                     bool swaps = false) const;

  // kExpert or kRank.
  RowLayout layout() const { return layout_; }
  // Whether experts read h and the gradient of out themselves.
  bool in_place() const { return by_maps() && group_->ranks() == 1; }

  const MoeConfig& config() const { return config_; }
  // Rows for `factor` times the balanced load of `group_tokens` tokens.
  int64_t capacity_for(double factor, int64_t group_tokens) const;
  // The path that computes experts without a recipe, and why no better one does.
  const gemm::PathReport& path() const { return path_; }

 private:
  struct Experts;  // of a rank, with or without a recipe

  bool by_maps() const { return layout_ == RowLayout::kRank; }
  // `codes` are the rows that came, if they came quantized.
  Experts experts(const MoeWeights& weights, const QuantizedView& codes = {}) const;
  gemm::MlpInput mlp_input(const EpPlan& plan, const MoeRows& rows, TensorView x_TD) const;
  // The rows of memory for what comes, and that memory; none in place.
  int64_t rows_that_come(int64_t capacity) const;
  TensorView make_copies(int64_t capacity, Arena& arena) const;
  using Came = MoeCame;
  // Sends h and its weights to the experts, by `move`; what has no place in `rows` is on the arena.
  using Move = std::function<void(const DispatchArgs&)>;
  // Whether what came leaves its column codes to backward.
  bool leaves_columns(int64_t capacity) const;
  Came send(const Move& move, TensorView h_TD, TensorView weight_TK, const MoeRows& rows,
            Arena& arena, const Beside& exchange) const;
  EpPlan plan_and_send(const PrepareArgs& routing, const DispatchArgs& rows, TensorView plan_memory,
                       Stream stream) const;
  // Makes the plan and brings h and its weights to the experts, by either layout.
  Came first_exchange(const PrepareArgs& routing, TensorView plan_memory, TensorView h_TD,
                      TensorView weight_TK, const MoeRows& rows, EpPlan& plan, Arena& arena,
                      const Beside& exchange) const;
  // In kRank: h as it would come, which is h itself unless it travels quantized.
  Came send_nowhere(TensorView h_TD, Arena& arena, Stream stream) const;
  TensorView rows_of(const TensorView& dy_CD, const EpPlan& plan) const;
  void show_rows_that_came(TensorProbe* probe, Stream stream, const MoeSaved& saved,
                           const Came& came, TensorView h_TD) const;
  TensorView make_outputs(int64_t capacity, Arena& arena) const;
  // Whether F1 reads a copy of rows in kRank; and its input, with that copy in `copy_CD`.
  bool copies_forward(const Experts& experts) const;
  gemm::MlpInput forward_input(const Experts& experts, const EpPlan& plan, const MoeRows& rows,
                               const Came& came, TensorView copy_CD, Stream stream) const;
  // Copies for products in kRank: all rows of h, or of the gradient of out, in the order of experts.
  void copy_rows(const EpPlan& plan, TensorView h_TD, TensorView rows_CD, Stream stream) const;
  void copy_gradient(const EpPlan& plan, TensorView dout_TD, TensorView rows_CD,
                     Stream stream) const;
  // In place: dx and, unless it is there or nobody wants it, FC2's input, which on a GPU lies in dx's
  // memory where it may.
  void make_gradients_in_place(const Experts& experts, int64_t capacity, bool wants_w2,
                               MoeGradientRows& gradient, Arena& arena) const;
  // B1, B2 and, if its result is defined, B4; in kRank G2 before it, if that reads the copy that B1
  // reads, or what lies in dx's memory. Returns whether it did. `dx_CD` is where B4 writes, workspace
  // before.
  bool data_gradients(const Experts& experts, const MoeRows& rows, const EpPlan& plan,
                      TensorView h_TD, TensorView dx_CD, gemm::MlpGradients gradients,
                      const gemm::GradTarget& w2, Arena& arena, Stream stream) const;
  // `free_CD` may be overwritten; if it is absent, memory of its size is taken where it is needed.
  void weight_gradients(Experts experts, const WeightGradients& args, const MoeRows& rows,
                        const EpPlan& plan, TensorView free_CD, Arena& arena, Stream stream) const;
  // The gradients of the router, but for what comes from the experts.
  RouterBackwardArgs router_gradients(const MoeSaved& saved, const MoeBackwardArgs& args) const;
  void router_backward(RouterBackwardArgs args, Arena& arena, const Stream& stream) const;
  // In place, on GPUs that can: the router's gradients, which sum the rows' gradients on the way,
  // with the same bits. Returns whether it did.
  bool end_in_place(const MoeSaved& saved, const gemm::MlpGradients& gradients,
                    MoeBackwardPass& pass) const;
  // Sends the rows' gradients back through dispatch.
  void send_home(const MoeSaved& saved, const gemm::MlpGradients& gradients,
                 MoeBackwardPass& pass) const;
  ExpertRows expert_rows(const MoeSaved& saved) const;

  MoeConfig config_;
  std::optional<QuantSpec> dispatch_, kept_;
  EpGroup* group_;
  Stream side_;         // of the exchange that has something beside it
  int sms_beside_ = 0;  // that the experts' weight gradients take beside an exchange; 0: all
  RowLayout layout_;
  gemm::PathReport path_;
  RowCopies copies_;  // without a recipe
};

}  // namespace moiety::moe
