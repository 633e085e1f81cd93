// Shapes of whole models that the tests run: small, each hard in one way.
#pragma once

#include <vector>

#include "moiety/model/config.h"

namespace moiety::model {

struct ModelCase {
  const char* name = "";
  Config config = {};
  int64_t sequences = 2, seq_len = 12;
  bool documents = false;
  double bias = 0;  // of expert 0's choice
};

inline Config small_config() {
  Config c;
  c.vocab = 40;
  c.d_model = 32;
  c.layers = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 8;
  c.d_ffn = 16;
  c.router.experts = 4;
  c.init_std = 0.15f;
  c.router.aux_coef = 0.3f;
  return c;
}

// Dense layers and experts, a shared one with a gate, and losses of the router over all ranks.
inline void take_all_kinds_of_layers(Config& c) {
  c.layers = 4;
  c.dense_layers = {1};
  c.d_ffn_dense = 24;
  c.shared_d_ffn = 16;
  c.shared_gate = true;
  c.router.z_coef = 0.01f;
  c.aux_scope = AuxScope::kGlobal;
}

// One dense layer and two of experts, for recipes.
inline Config layers_of_all_kinds() {
  Config c = small_config();
  c.layers = 3;
  c.dense_layers = {0};
  c.d_ffn_dense = 48;
  c.shared_d_ffn = 16;
  c.shared_gate = true;
  return c;
}

// The experts of GPT-OSS, with a limit that test weights reach.
inline void take_gpt_oss_experts(Config& c) {
  c.activation = gemm::qgeglu(1.702f, 0.6f, 1);
  c.expert_bias = true;
}

template <class F>
ModelCase model_case(const char* name, F&& change, ModelCase rest = {}) {
  ModelCase out = rest;
  out.name = name;
  out.config = small_config();
  change(out.config);
  return out;
}

inline std::vector<ModelCase> model_cases() {
  using C = Config;
  return {
      model_case("qwen_like",
                 [](C& c) {
                   c.vocab = 128;
                   c.d_model = 64;
                   c.head_dim = 16;
                   c.d_ffn = 32;
                   c.router.experts = 8;
                   c.router.aux = moe::AuxLoss::kHf;
                 }),
      model_case("mixtral_like",
                 [](C& c) {
                   c.qk_norm = false;
                   c.norm_eps = 1e-5f;
                   c.router.aux = moe::AuxLoss::kHf;
                 }),
      model_case("one_expert", [](C& c) { c.router.experts = c.router.top_k = 1; }),
      model_case("all_experts", [](C& c) { c.router.top_k = 4; }),
      model_case("expert_without_tokens", [](C&) {}, {.bias = -100}),
      model_case("all_tokens_to_one_expert", [](C&) {}, {.bias = 100}),
      model_case("one_token", [](C&) {}, {.sequences = 1, .seq_len = 1}),
      model_case("sequences_of_one_token", [](C&) {}, {.sequences = 5, .seq_len = 1}),
      model_case("one_sequence", [](C&) {}, {.sequences = 1, .seq_len = 70}),
      model_case("odd_vocabulary", [](C& c) { c.vocab = 257; }),
      model_case("no_grouping", [](C& c) { c.kv_heads = 4; }),
      model_case("one_layer", [](C& c) { c.layers = 1; }),
      model_case("dense_and_moe",
                 [](C& c) {
                   c.layers = 4;
                   c.moe_every = 2;
                   c.dense_layers = {3};
                   c.d_ffn_dense = 24;
                 }),
      model_case("all_dense",
                 [](C& c) {
                   c.dense_layers = {0, 1};
                   c.d_ffn_dense = 20;
                 }),
      model_case("shared_expert", [](C& c) { c.shared_d_ffn = 12; }),
      model_case("shared_expert_with_gate",
                 [](C& c) {
                   c.shared_d_ffn = 12;
                   c.shared_gate = true;
                 }),
      model_case("tied", [](C& c) { c.tie_embeddings = true; }),
      model_case("documents", [](C&) {}, {.documents = true}),
      model_case("sigmoid_in_groups",
                 [](C& c) {
                   c.router.experts = 8;
                   c.router.score = moe::Score::kSigmoid;
                   c.router.scale = 2.5f;
                   c.router.groups = 4;
                   c.router.group_top_k = 2;
                   c.router.aux = moe::AuxLoss::kSequence;
                 },
                 {.bias = 0.05}),
      model_case("without_renormalization",
                 [](C& c) {
                   c.router.renormalize = false;
                   c.router.z_coef = 0.01f;
                   c.loss_z_coef = 0.02f;
                   c.loss_chunk = 5;
                 }),
      model_case("squared_relu",
                 [](C& c) {
                   c.activation = gemm::squared_relu();
                   c.router.aux = moe::AuxLoss::kNone;
                 }),
      model_case("gpt_oss_like",
                 [](C& c) {
                   take_gpt_oss_experts(c);
                   c.qk_norm = false;
                   c.router.experts = 8;
                   c.router.top_k = 4;
                   c.dense_layers = {0};
                   c.d_ffn_dense = 24;
                 }),
      model_case("squared_relu_everywhere",
                 [](C& c) {
                   c.activation = gemm::squared_relu();
                   c.expert_bias = true;
                   c.dense_layers = {1};
                   c.d_ffn_dense = 24;
                   c.shared_d_ffn = 12;
                   c.shared_gate = true;
                 }),
      model_case("interleaved_and_indexed",
                 [](C& c) {
                   c.activation = gemm::clamped_swiglu(1);
                   c.expert_bias = true;
                   c.glu_interleave = 8;
                   c.indexed_experts = true;
                   c.shared_d_ffn = 12;
                 }),
  };
}

}  // namespace moiety::model
