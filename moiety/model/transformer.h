// The model: embedding, layers of attention and experts (or a dense network), norm, head and loss,
// with forward and backward written out. The architecture follows Qwen3-MoE and Mixtral.
//
// The model reads weights and writes gradients of parameters that somebody else owns (the
// optimizer, or a test): parameter_specs says which ones, bind says where they are. Gradients are
// those of
//   sum_t CE_t + loss_z_coef sum_t lse_t^2 + n (aux_coef aux + z_coef z)
// over the micro-batch, where n is the number of its valid targets, without any scale. They are
// added to main_grad, or overwrite it where Parameter::overwrite is set, which is then cleared.
//
// A step runs forward and backward for every micro-batch in turn. Activations lie on the arena,
// above the caller's; they may be released after backward. Both passes are collective over the
// expert-parallel group, the tensor-parallel ranks and, with AuxScope::kGlobal, all ranks.
//
// With Overlap::kMicroBatch backward of a micro-batch and forward of the next one take turns: where
// the rows of one have set out among the experts' ranks, the other computes. All that adds up over
// micro-batches (gradients, sums, losses) does so in the same order as one after the other, so the
// bits are the same.
//
// On a GPU (ModelContext::device) the code is the same. Nothing waits for the host, and once a
// batch of the same shape has been run, passes neither allocate (arena.h) nor read pageable memory,
// so they can be captured. Tokens and targets outside the vocabulary give a loss of NaN there. A
// model on a GPU has one rank.
//
// With tensor parallelism (tensor_parallel.h) the ranks of ModelContext::tp see the same batch, and
// each holds a part of its sequences; the gradients of weights that are not cut are then partial
// sums too. One of the ranks reports losses and tokens.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "moiety/model/attention_block.h"
#include "moiety/model/config.h"
#include "moiety/model/feed_forward.h"
#include "moiety/model/frozen.h"
#include "moiety/model/moe_block.h"
#include "moiety/model/routing.h"
#include "moiety/model/step_stats.h"
#include "moiety/model/weights.h"
#include "moiety/nn/embedding.h"

namespace moiety::model {

// A batch of B sequences of S tokens.
struct Batch {
  TensorView token_BS;   // int32
  TensorView target_BS;  // int32; kIgnoredTarget: no target
  // optional, uint8; 0: no target. Attention and routing see the token all the same.
  TensorView mask_BS;
  // optional, int32: place in the token's document. The query at s attends to the keys s - position
  // ... s of its sequence.
  TensorView position_BS;
  // optional, uint8; 0: padding, without a target: no expert gets it and no statistic has it
  TensorView routed_BS = {};
  // The place in the run, for stochastic rounding: the number of the micro-step, and the place of
  // these tokens among those of all data ranks in it, so that random numbers do not depend on the
  // layout. first_token is a multiple of 16; all_tokens 0 means that these are all.
  uint64_t micro_step = 0;
  TensorView micro_step_at = {};  // optional, uint64 [1]: replaces micro_step, read in stream order
  int64_t first_token = 0, all_tokens = 0;
};

// The parts of its rank that the model borrows.
struct ModelContext {
  moe::EpGroup* experts = nullptr;   // needed if there are MoE layers
  comm::Communicator* tp = nullptr;  // the ranks that cut weights; null if there is only this one
  comm::Communicator* world = nullptr;  // all ranks of a micro-step; needed for AuxScope::kGlobal
  Device device = {};                   // place of batches, weights, gradients, arenas and streams
};

// The limits that a model's group must have for `tokens` own tokens of a rank.
moe::EpLimits ep_limits(const Config& config, DType storage, int64_t tokens);
// The bytes of rows that a pass asks of lent memory (Arena::lend), for experts that take `capacity`
// rows; `quantized` says that all rows travel quantized.
int64_t lent_bytes(const Config& config, DType storage, int64_t capacity, bool quantized);

class Transformer {
 public:
  // `storage`, of activations and weights, is float32 or bfloat16. Throws Error(kInvalidArgument)
  // naming the key if the config is not legal.
  Transformer(const Config& config, DType storage, const ModelContext& context);

  // Sets which linears are quantized from now on; at first none is. Only bf16 storage has recipes.
  // The formats in parameter_specs() follow, and so must the parameters that are bound.
  void set_precision(const Precision& precision);

  // The parameters of this rank: all parameters except the experts of other ranks.
  std::vector<optim::ParamSpec> parameter_specs() const;
  // Takes the parameters, in the order of the specs; their memory outlives the model's use.
  // Parameters without gradients allow only evaluation. `executor` serves those that are cut
  // (optim::Parameter::bundle); passes are then inside its steps.
  void bind(std::span<optim::Parameter> parameters, gtp::Executor* executor = nullptr);

  // State that is no parameter and is always saved: the router's bias of every MoE layer, float32
  // [E], at first 0.
  struct State {
    std::string name;
    TensorView view;
  };
  std::vector<State> states() const;
  // Balances without an auxiliary loss, after an optimizer step. `pairs` is [MoE layers, E] int64
  // over the whole global batch. `skip` is an optional int32 [1], read in stream order; if it is
  // not 0 nothing changes.
  void update_router_bias(TensorView pairs_LE, float rate, Stream stream, TensorView skip = {});

  // The scales of delayed scaling, if the precision has any; null: it has none.
  DelayedScales* delayed_scales() { return scales_.get(); }
  // Ends a step for them: takes what all ranks of ModelContext::world recorded since the last call,
  // unless `skip` (optional, int32 [1], read in stream order) is not 0. Collective, and nothing if
  // the recipe has no delayed scaling.
  void update_scales(const TensorView& skip, const Stream& stream);

  // Sums for the passes of a step.
  StepSums make_sums() const {
    return StepSums(config_.moe_layers(), config_.router.experts, context_.device);
  }
  // Called on the way of a batch forward, each time with a larger `end`, before the stream reads
  // weights of the parameters [0, end), in the order of the specs; at last with all of them.
  using AwaitWeights = std::function<void(int end)>;
  // Runs forward and adds to `sums` in stream order. `capacity` is the number of rows that this
  // rank's experts take, per layer. The head's gradient is formed here, with the loss.
  void forward(const Batch& batch, int64_t capacity, const StepSums& sums, Arena& arena,
               Stream stream, const AwaitWeights& await = {});
  // Told on the way back of a batch, each time with a smaller `first`, that in the order of the
  // stream this batch adds no more to gradients of the parameters [first, end), in the order of the
  // specs; at last with 0.
  using GradientsReady = std::function<void(int first)>;
  // Runs backward for the batch of the last forward, whose arena still holds what forward left.
  void backward(const Batch& batch, Stream stream, const GradientsReady& ready = {});
  // Whether two micro-batches take turns: Overlap::kMicroBatch, where rows travel among ranks.
  bool takes_turns() const;
  // Runs backward for the batch of the last forward, and forward for `next` on an arena of its own,
  // which is the last forward then. One after the other unless they take turns, and under a probe.
  void backward_and_forward(const Batch& batch, const Batch& next, int64_t capacity,
                            const StepSums& sums, Arena& next_arena, Stream stream);
  // Computes only the losses; nothing stays on the arena.
  void evaluate(const Batch& batch, int64_t capacity, const StepSums& sums, Arena& arena,
                Stream stream);

  // Throws if a token of the step or evaluation that ends was outside the vocabulary. (Where the
  // table is at hand, the pass has thrown already; on a GPU the loss is NaN.)
  void check_tokens();

  // Sets the probe that sees what forward and backward store; null for none. It outlives its use.
  void set_probe(TensorProbe* probe) { probe_ = probe; }

  // Rows for `factor` times the balanced load if every rank has `tokens` own tokens; with factor <
  // 0, enough rows for any routing.
  int64_t moe_capacity(double factor, int64_t tokens) const;

  // The path that computes experts without a recipe, the same in all MoE layers, and why no better
  // one does; null: there are no such layers.
  const gemm::PathReport* expert_path() const;
  // Where those experts read rows; kAuto if there are none.
  moe::RowLayout row_layout() const;

  const Config& config() const { return config_; }
  DType storage() const { return storage_; }

 private:
  friend class Decoder;

  struct Layer {
    AttentionBlock attention;
    std::variant<DenseBlock, MoeBlock> ffn;
    int64_t moe_index = -1;           // number among the MoE layers
    int first = 0, first_of_ffn = 0;  // parameters, in the order of the specs
  };
  // The tensors of a layer that outlive its forward. Under Recompute::kFull only x and the routing
  // do; mid is then one workspace of all layers. Of layers that backward does not come to nothing
  // does.
  struct LayerSaved {
    TensorView x_TD, mid_TD;
    AttentionBlock::Saved attention;
    TensorView dense;
    MoeBlock::Saved moe;
  };
  // A batch from forward to the end of backward.
  struct Saved {
    Pass pass;
    int64_t capacity = 0;
    std::vector<LayerSaved> layers;
    Routing routing;
    TensorView mid_TD = {};  // kFull, and layers that backward does not come to
    TensorView x_TD = {};    // the way forward: output of the last layer
    TensorView d_TD = {};    // the gradient on its way back
    std::optional<DelayedExperts> delayed = {};
    // The place on the way through the layers: a layer, and the part of it that comes next.
    int64_t layer = 0;
    int part = 0;
    MoeBlock::ForwardPass forward = {};
    MoeBlock::BackwardPass backward = {};
    AttentionBlock::Saved attention = {};
    Arena::Mark temporaries = {};
    const AwaitWeights* await = nullptr;  // null: nobody asks, as below
    const GradientsReady* ready = nullptr;
  };

  static TensorView flat(const TensorView& x_BS) {
    return x_BS.defined() ? x_BS.reshape({x_BS.numel()}) : TensorView();
  }
  static Routing::Counted counted(const Batch& batch) {
    return {flat(batch.target_BS), flat(batch.mask_BS), flat(batch.routed_BS)};
  }
  TpPlace place() const;
  void check_device() const;
  std::unique_ptr<DelayedScales> make_scales(int64_t length) const;
  void check_batch(const Batch& batch) const;
  void grow_rope_table(int64_t positions, const Stream& stream);
  Pass begin_pass(int64_t sequences, int64_t seq_len, Arena& arena, Stream stream);
  Pass begin_pass(const Batch& batch, Arena& arena, Stream stream);
  bool full_recompute() const { return config_.recompute == Recompute::kFull; }
  // Begins forward: the embedding. `go_forward` then runs layers until rows have set out; false if
  // it has run the last one. `end_forward` computes the loss.
  std::unique_ptr<Saved> begin_forward(const Batch& batch, int64_t capacity, Arena& arena,
                                       Stream stream, const AwaitWeights* await = nullptr);
  bool go_forward(Saved& s) const;
  void end_forward(Saved& s, const Batch& batch, const StepSums& sums);
  // The same for backward, of which `end_backward` is the embedding's gradient.
  void begin_backward(Saved& s, Stream stream) const;
  bool go_backward(Saved& s) const;
  void end_backward(Saved& s, const Batch& batch) const;
  void tell_ready(const Saved& s, int first) const;
  static void await_weights(const Saved& s, int end) {
    if (s.await && *s.await) (*s.await)(end);
  }
  // The first parameter behind the layers before `layer`.
  int first_of(int64_t layer) const {
    return layer < config_.layers ? layers_[layer].first : first_of_end_;
  }
  // Runs attention of the layer in training, before its second half.
  void attention_forward(Saved& s, LayerSaved& saved) const;
  void attention_backward(Saved& s) const;
  // Runs the second half of a layer of which nothing is kept.
  void ffn_passed(const Pass& pass, const Layer& layer, const Routing& routing, TensorView x_TD,
                  TensorView out_TD, int64_t capacity) const;
  // Runs a layer of which nothing is kept; its output takes the place of x.
  void layer_passed(const Pass& pass, const Layer& layer, const Routing& routing, TensorView x_TD,
                    TensorView mid_TD, int64_t capacity) const;
  // The memory for weight gradients of experts that wait, if any wait in this pass.
  std::optional<DelayedExperts> make_delayed(const Saved& s) const;
  MoeBlock::Forward moe_forward(const Routing& routing, int64_t moe_index, TensorView x_TD,
                                TensorView out_TD, int64_t capacity) const;
  void enter(int64_t layer, bool backward) const {
    if (probe_) probe_->enter(layer, backward);
  }
  // Whether rows of the embedding are looked up at peers, and their gradients sent, instead of the
  // table.
  bool moves_rows() const;
  void embed(const Pass& pass, const Batch& batch, TensorView x_TD) const;
  void embed_gradient(const Pass& pass, const Batch& batch, TensorView d_TD) const;
  // Computes the loss, the gradient of the last norm's output, if `d_TD` is defined, and that of
  // the head.
  void loss(const Pass& pass, const Batch& batch, TensorView x_TD, TensorView d_TD,
            bool head_gradient, const StepSums& sums) const;
  struct LossHead {
    TensorView weight_VD;
    GradientSum gradient;  // gradient of the rows that are tokens; without a view in evaluation
  };
  void whole_loss(const Pass& pass, const Batch& batch, const LossHead& head, TensorView d_TD,
                  TensorView loss_T) const;
  void parallel_loss(const Pass& pass, const Batch& batch, const LossHead& head, TensorView d_TD,
                     TensorView loss_T) const;
  gtp::Work embedding_work(const Pass& pass) const {
    return elementwise_work(2 * pass.tokens() * config_.d_model, storage_);
  }
  optim::Parameter& head_parameter() const { return config_.tie_embeddings ? *embed_ : *head_; }
  // The rows of an embedding's or head's weight or gradient that belong to tokens; padding follows
  // them.
  TensorView token_rows(const TensorView& table) const {
    return table.slice(0, 0, vocabulary_.real_rows());
  }
  nn::VocabularySlice vocabulary_slice() const {
    return {vocabulary_.tp_rank * vocabulary_.slice_rows(), config_.vocab};
  }

  Config config_;
  Frozen frozen_;
  HeadNeeds head_needs_;
  DType storage_;
  ModelContext context_;
  gtp::Layout vocabulary_;            // layout of embedding and head
  std::shared_ptr<TpWindow> window_;  // of ranks on GPUs that cut weights
  std::vector<Layer> layers_;
  gtp::Executor* executor_ = nullptr;
  optim::Parameter* embed_ = nullptr;
  optim::Parameter* final_norm_ = nullptr;
  optim::Parameter* head_ = nullptr;
  int first_of_end_ = 0;  // the parameter behind those of layers
  int end_ = 0;           // behind all parameters
  bool trainable_ = false;
  TensorProbe* probe_ = nullptr;
  std::unique_ptr<DelayedScales> scales_;  // of delayed scaling
  bool uses_scales_ = false;               // whether the recipe casts with them
  Tensor token_faults_;                    // of rows that are moved (gtp/embedding.h)
  uint64_t seed_ = 0;                      // seed of stochastic rounding
  Tensor rope_table_;                      // made for the longest sequence so far
  std::unique_ptr<Saved> saved_;           // of a forward that waits for its backward
  Stream exchange_;                        // of the exchanges of batches that take turns
};

}  // namespace moiety::model
