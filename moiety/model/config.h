// The description of a model: sizes, kinds of layers, routing. The trainer, the plan and the model
// itself share this struct; the names in error texts are the keys of the trainer's configuration.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/gemm/grouped_mlp.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/prepare.h"
#include "moiety/moe/router.h"
#include "moiety/moe/row_layout.h"

namespace moiety::model {

// The tokens over which the routing losses are taken: those of one data rank's micro-batch, or
// those of all data ranks in the micro-step.
enum class AuxScope { kMicroBatch, kGlobal };

// The results of forward that backward computes again, with the same bits, instead of keeping them.
// Outputs of norms, activations, and normalized and rotated heads are never kept.
enum class Recompute {
  kNone,
  kMoe,   // rows of experts and fc1's outputs of MoE layers; only their routing is kept
  kFull,  // everything in a layer except its input and its routing
};

struct Config {
  // The keys of [model].
  int64_t vocab = 0;  // V
  int64_t d_model = 256;
  int64_t layers = 4;
  int64_t heads = 8;
  int64_t kv_heads = 2;
  int64_t head_dim = 0;  // 0: d_model / heads
  bool qk_norm = true;
  double rope_theta = 1e6;
  float norm_eps = 1e-6f;
  bool tie_embeddings = false;
  std::vector<int64_t> dense_layers;
  int64_t moe_every = 1;    // layer l has experts if (l + 1) % moe_every == 0 and it is not dense
  int64_t d_ffn_dense = 0;  // Fd

  // The keys of [moe] and [router]; experts, top_k and the losses are in `router`.
  moe::RouterConfig router{
      .experts = 8, .top_k = 2, .aux = moe::AuxLoss::kSwitch, .aux_coef = 1e-3f};
  AuxScope aux_scope = AuxScope::kMicroBatch;
  int64_t d_ffn = 512;       // F
  int64_t shared_d_ffn = 0;  // Fs; 0: no shared expert
  bool shared_gate = false;
  gemm::Activation activation = gemm::swiglu();  // of the experts, the shared one and dense layers
  bool expert_bias = false;  // b1 and b2 of the experts; b2 is scaled by the token's weight
  moe::Reduction combine = moe::Reduction::kRank;
  moe::OverflowPolicy overflow = moe::OverflowPolicy::kError;
  moe::RowLayout row_layout = moe::RowLayout::kAuto;  // moe.layout

  // How the experts' weights lie in memory; checkpoints hold them packed in plain order.
  int64_t glu_interleave = 0;              // rows of gate and up that alternate in fc1 (swiglu.h)
  bool indexed_experts = false;            // one view for each expert instead of one of all
  std::optional<gemm::MlpPath> path = {};  // the path required of the experts; absent: the best

  // Keys of [init], [optim], [train] and [memory], moe.delay_wgrad and ep.overlap.
  float init_std = 0.02f;
  bool residual_scale = true;  // attn.o and every fc2 get std / sqrt(2 layers)
  bool decay_embeddings = true;
  float loss_z_coef = 0;
  int64_t loss_chunk = 0;  // tokens whose logits exist at a time; 0: the default of nn::loss_chunk
  Recompute recompute = Recompute::kNone;
  // Globs over the names of checkpoints' tensors that training leaves as they are (frozen.h).
  std::vector<std::string> freeze = {};
  bool delay_wgrad = false;                    // weight gradients of experts wait: moe_block.h
  moe::Overlap overlap = moe::Overlap::kNone;  // ep.overlap

  int64_t head_size() const { return head_dim ? head_dim : d_model / heads; }
  int64_t qkv_size() const { return (heads + 2 * kv_heads) * head_size(); }
  bool is_moe(int64_t layer) const;
  int64_t moe_layers() const;
};

// Throws Error(kInvalidArgument) naming the first key whose value is out of range.
void check(const Config& config);

// The config of a known model: "tiny" (the defaults), "qwen3-30b-a3b", "qwen3-235b-a22b" or
// "mixtral-8x7b".
Config preset(std::string_view name);

// The number of trained values; the router's bias is not one of them.
int64_t parameter_count(const Config& config);
// The same without the experts that a token does not go to.
int64_t active_parameter_count(const Config& config);

// Model FLOPs of one training step per token in sequences of `seq_len` tokens, with 2 FLOPs per
// multiply-add: the matrix products of the forward pass, and as many again for the gradient of
// inputs and for that of weights. Gradients that frozen parameters leave out do not count. With
// `causal` only the half of the scores that the mask leaves counts.
double flops_per_token(const Config& config, int64_t seq_len, bool causal = true);
// The part of flops_per_token that one (token, expert) pair takes, on average over the MoE layers.
double flops_per_pair(const Config& config);

}  // namespace moiety::model
