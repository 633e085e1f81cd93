// The first half of a layer: out = x + o(attention(rope(qk_norm(qkv(norm(x)))))).
#pragma once

#include <span>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/model/config.h"
#include "moiety/model/linear_layer.h"
#include "moiety/model/needs.h"
#include "moiety/model/parameters.h"
#include "moiety/model/pass.h"
#include "moiety/model/weight_layout.h"
#include "moiety/nn/attention.h"
#include "moiety/nn/norm_rope.h"

namespace moiety::model {

// Keys and values of earlier tokens in one layer: P positions for each of B sequences.
struct KvCache {
  Tensor k_BPGC;
  Tensor v_BPGC;
};

// Consecutive rows of a pass that continue a sequence of the cache at its position `length`.
struct CacheRun {
  int64_t sequence = 0;
  int64_t length = 0;
  int64_t rows = 0;
};

class AttentionBlock {
 public:
  // The block of the heads that `place` gives to this rank.
  AttentionBlock(const Config& config, int64_t layer, TpPlace place, const Frozen& frozen = {});

  // Specs of norm, fused qkv in kv-group order and o, and with qk_norm q_norm and k_norm.
  std::vector<optim::ParamSpec> specs() const;
  void bind(ParameterCursor& parameters);
  void set_recipe(const LinearRecipe& recipe);

  // Tensors that backward needs besides x: for all tokens and this rank's heads; on the arena.
  struct Saved {
    TensorView qkv;  // before qk_norm and rope; without qk_norm: after rope
    TensorView o;
    TensorView lse_BGMS;
  };
  // x_TD and out_TD are of own tokens.
  Saved forward(const Pass& pass, TensorView x_TD, TensorView out_TD) const;
  // d_TD, of own tokens, is the gradient of out on entry and that of x on return, if the blocks
  // before this one need it.
  void backward(const Pass& pass, TensorView x_TD, const Saved& saved, TensorView d_TD) const;

  // The forward pass of tokens whose earlier keys lie in the cache, to which theirs are added. The
  // runs cover the rows of the pass, whose positions are given.
  void forward_cached(const Pass& pass, std::span<const CacheRun> runs, const KvCache& cache,
                      TensorView x_TD, TensorView out_TD) const;

 private:
  // The norm of own tokens and the projection of all; without qk_norm also rope.
  void project(const Pass& pass, TensorView x_TD, TensorView qkv) const;
  // The heads that attention reads; with qk_norm they are normalized and rotated copies of q and k.
  nn::QkvHeads heads(const Pass& pass, TensorView qkv) const;
  nn::QkvHeads split(const Pass& pass, TensorView qkv) const;
  nn::HeadAngles angles(const Pass& pass) const;
  void rotate(const Pass& pass, TensorView qkv, bool inverse) const;
  // With qk_norm: makes the gradient of attention's q and k, in dqkv, that of the projection's, and
  // adds to those of the norms' weights.
  void heads_gradient(const Pass& pass, TensorView qkv, TensorView dqkv) const;
  TensorView head_rows(const Pass& pass, TensorView o) const;
  // Given the gradient of the block's output, computes that of `o`, if it is defined, and that of
  // the output weight.
  void output_backward(const Pass& pass, TensorView d_TD, TensorView o, TensorView d_o) const;
  gtp::Work core_work(const Pass& pass, int products) const;
  nn::AttentionArgs attention_args(const Pass& pass, const nn::QkvHeads& heads,
                                   const Saved& saved) const;

  optim::ParamSpec qkv_spec(const std::string& prefix) const;

  int64_t layer_, d_model_, heads_, kv_heads_, head_dim_;  // heads of this rank
  float eps_, std_, out_std_;
  bool qk_norm_;
  AttentionNeeds needs_;
  optim::Parameter* norm_ = nullptr;
  LinearLayer qkv_, o_;
  optim::Parameter* q_norm_ = nullptr;
  optim::Parameter* k_norm_ = nullptr;
};

}  // namespace moiety::model
