// The second half of a layer with experts: out = x + experts(h) + shared(h), with h = norm(x) and
// one rounding. The shared expert, if there is one, is sigmoid(h gate^T) ffn(h), where the gate is
// optional; the gate's value multiplies the activation, as the router's probabilities do.
//
// With Config::glu_interleave s the rows of the experts' fc1 and its bias lie in memory as blocks
// of s gate rows and s up rows; only their row maps know, so files do not.
#pragma once

#include <optional>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/model/feed_forward.h"
#include "moiety/moe/moe_layer.h"

namespace moiety::model {

// The configuration for moiety/moe that describes the same layer.
moe::MoeConfig moe_config(const Config& config, DType storage);

class MoeBlock;

// The experts' weight gradients that wait, those of the MoE layer whose backward was last
// (moe.delay_wgrad). They are computed when backward is at the next MoE layer, between its first
// exchange, which has nothing else to hide behind, and its first product; the last ones at the end
// of the micro-batch's backward. So one layer waits at a time, in the memory below. The bits do not
// change.
struct DelayedExperts {
  // Memory that lives through a backward pass. Where rows are copied, dy and dx change places from
  // layer to layer, so that a gradient may come in while weight gradients read the one before it.
  // Where experts read rows in place, there are copies of h and of the gradient of out instead.
  moe::MoeGradientRows gradient;
  TensorView h_TD, dout_TD;
  moe::MoeRows rows;  // with recomputation: rows of the waiting layer, then of the next one
  // The block that waits; null if none does.
  const MoeBlock* block = nullptr;
  const moe::MoeSaved* saved = nullptr;
};

class MoeBlock {
 public:
  // Borrows the group, which has the config's experts. Experts get own tokens; the shared expert's
  // inner columns are cut over tp.
  MoeBlock(const Config& config, DType storage, int64_t layer, moe::EpGroup& group, TpPlace place,
           const Frozen& frozen = {});

  // Specs of norm, router, this rank's experts and the shared expert.
  std::vector<optim::ParamSpec> specs() const;
  void bind(ParameterCursor& parameters);
  // `dispatch` is the format in which rows travel to the experts (moe_layer.h).
  void set_recipe(const LinearRecipe& recipe, const std::optional<QuantSpec>& dispatch);
  // The bias of the router's choice. It is state that balancing moves, not gradients.
  const Tensor& router_bias() const { return bias_E_; }
  std::string router_bias_name() const { return prefix_ + "moe.router.bias"; }
  const gemm::PathReport& expert_path() const { return layer_.path(); }
  moe::RowLayout row_layout() const { return layer_.layout(); }

  struct Forward {
    TensorView x_TD;
    TensorView out_TD;
    int64_t capacity = 0;
    moe::RouterStats stats;  // result
    TensorView info;         // result, int64 [16]
    bool recompute = false;  // keep only the routing and the gate in `saved`
  };
  struct Saved {
    moe::MoeSaved experts;
    TensorView shared_hidden;
    TensorView gate_T;  // fp32, the sigmoid of the gate
  };
  // Without `saved` (in evaluation) no backward can follow, and the caller releases the arena.
  void forward(const Pass& pass, const Forward& args, Saved* saved) const;
  // The same in parts (moe/moe_layer.h).
  struct ForwardPass {
    Forward args;
    Saved saved;
    bool shared_beside = false;  // the shared expert comes when h is on its way
    moe::MoeForwardPass experts;
  };
  void begin_forward(const Pass& pass, const Forward& args, ForwardPass& p) const;
  void forward_experts(const Pass& pass, ForwardPass& p) const;
  void end_forward(const Pass& pass, ForwardPass& p, Saved* saved) const;

  struct ExpertGradients {
    OpenGradient fc2, fc1;
  };
  struct Backward {
    TensorView x_TD;
    TensorView d_TD;   // the gradient of out, replaced by that of x if blocks before need it
    TensorView count;  // int64 [S, E+1], over the scope of the losses
    TensorView scope;  // int64 [2]
    DelayedExperts* delayed = nullptr;  // null: weight gradients are computed at once
  };
  void backward(const Pass& pass, const Backward& args, const Saved& saved) const;
  // The same in parts. `saved` stays until the end.
  struct BackwardPass {
    Backward args;
    const Saved* saved = nullptr;
    Arena::Mark temporaries;
    TensorView dh_TD;
    moe::MoeGradientRows gradient;
    TensorView b1_grad, b2_grad;
    ExpertGradients gradients;
    moe::Beside here;
    moe::MoeBackwardPass experts;
  };
  void begin_backward(const Pass& pass, const Backward& args, const Saved& saved,
                      BackwardPass& p) const;
  void backward_experts(const Pass& pass, BackwardPass& p) const;
  void end_backward(const Pass& pass, BackwardPass& p) const;
  int64_t layer() const { return index_; }
  // Memory on the arena for all MoE layers of a backward pass, whose rows are as many as in
  // `saved`.
  DelayedExperts make_delayed(const Pass& pass, const Saved& saved) const;
  // Computes the weight gradients that wait, if there are any.
  static void finish(const Pass& pass, DelayedExperts& delayed);

 private:
  // `interleave`: that of the rows of fc1; 0 for fc2.
  optim::ParamSpec expert_spec(const char* name, int64_t rows, int64_t columns, float std,
                               int64_t interleave) const;
  optim::ParamSpec bias_spec(const char* name, int64_t columns, int64_t interleave) const;
  optim::ParamSpec own_experts(optim::ParamSpec spec, int64_t rows, int64_t block) const;
  moe::MoeWeights weights(const Pass& pass, const gemm::LinearWeight& w1,
                          const gemm::LinearWeight& w2) const;
  // The weights of both expert layers, for a product with `rows` routed rows.
  moe::MoeWeights read_weights(const Pass& pass, gtp::Phase phase, int64_t rows) const;
  moe::MoeWeights router_weights() const;
  gtp::Work fc1_work(const Pass& pass, int64_t rows) const;
  gtp::Work fc2_work(const Pass& pass, int64_t rows) const;
  gtp::Work router_work(const Pass& pass) const;
  gtp::Work exchange_work(const Pass& pass, const std::optional<QuantSpec>& format = {}) const;
  gtp::Work activation_work(const Pass& pass) const;
  // (token, expert) pairs of own tokens, as if the ranks' experts were chosen equally often.
  int64_t pairs(TensorView x_TD) const { return x_TD.size(0) * layer_.config().router.top_k; }
  // The weights' shapes and recipes, without data.
  moe::MoeWeights weight_shapes(const Pass& pass) const;
  // The experts' rows, dispatched again from pass.h unless forward left them; `delayed` may have
  // the memory for them.
  moe::MoeRows expert_rows(const Pass& pass, const moe::MoeSaved& saved,
                           const DelayedExperts* delayed) const;
  // Leaves the weight gradients to `finish`.
  void delay(const Pass& pass, const Backward& args, const Saved& saved) const;
  // The gradients of everything but norm, shared expert and weights that wait.
  void experts_backward(const Pass& pass, BackwardPass& p) const;
  void end_experts(const Pass& pass, BackwardPass& p) const;
  gemm::GroupedWeight grouped(const TensorView& packed_LNK) const;
  gemm::GradTarget target(const OpenGradient& gradient) const;  // none if the weight is frozen
  // Which of the experts' weight gradients are computed together.
  struct Parts {
    bool fc2 = true, fc1 = true;
  };
  // Those of a backward pass itself, and those that wait, of `delays` layers.
  Parts at_once(bool delays) const;
  Parts later() const;
  ExpertGradients open_gradients(const Pass& pass, Parts parts) const;
  void close_gradients(const Pass& pass, const ExpertGradients& gradients, Parts parts) const;
  void show_gradient(const Pass& pass, const optim::Parameter& p, const TensorView& gradient) const;
  // Takes memory for the shared part of `saved`, which outlives what is allocated after it.
  void make_shared(const Pass& pass, const Forward& args, Saved& saved) const;
  // pass.wide = x + shared(h); fills the shared part of `saved`, and takes what memory it lacks.
  TensorView add_shared(const Pass& pass, const Forward& args, Saved& saved) const;
  // pass.wide = the gradient of h through the shared expert, if anybody needs it.
  void shared_backward(const Pass& pass, TensorView d_TD, const Saved& saved) const;

  std::string prefix_;
  int64_t index_;  // number of the layer
  int64_t d_model_, d_ffn_;
  float eps_, std_, out_std_;
  const moe::EpGroup* group_;
  moe::MoeLayer layer_;
  Tensor bias_E_;
  bool gated_, indexed_, biased_;
  FfnNeeds needs_;
  std::optional<FeedForward> shared_;
  optim::Parameter* norm_ = nullptr;
  optim::Parameter* router_ = nullptr;
  LinearLayer fc1_, fc2_;
  optim::Parameter *b1_ = nullptr, *b2_ = nullptr;
  optim::Parameter* gate_ = nullptr;
};

}  // namespace moiety::model
