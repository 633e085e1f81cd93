#include <algorithm>

#include "moiety/base/number_text.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/json.h"
#include "moiety/hf/export.h"

namespace moiety::hf {
namespace {

using checkpoint::JsonDocument, checkpoint::JsonValue, checkpoint::refuse;

const char* word(bool b) { return b ? "true" : "false"; }

// A number as JSON, in float32 where the model has it so.
std::string number(double x) {
  const std::string s = number_text(x);
  return s.find_first_of(".e") == s.npos ? s + ".0" : s;
}
std::string number(float x) {
  const std::string s = number_text(x);
  return s.find_first_of(".e") == s.npos ? s + ".0" : s;
}

// An id, a list of ids, or null.
std::string ids_text(const JsonDocument& json, const JsonValue& v) {
  if (std::holds_alternative<int64_t>(v.value)) return std::to_string(json.integer(v));
  if (std::holds_alternative<std::monostate>(v.value)) return "null";
  std::string out;
  for (const JsonValue& id : json.array(v)) {
    out += (out.empty() ? "" : ", ") + std::to_string(json.integer(id));
  }
  return "[" + out + "]";
}

// The coefficient of transformers' balancing loss, which pools layers, that weighs as ours does.
double aux_coef(const model::Config& c) {
  const moe::RouterConfig& r = c.router;
  if (r.aux == moe::AuxLoss::kHf) return std::stod(number_text(r.aux_coef));
  if (r.aux != moe::AuxLoss::kSwitch) return 0;
  return double(r.aux_coef) * double(c.moe_layers()) / double(r.top_k);
}

// The fields that are no part of the model, from the file that travelled.
struct Kept {
  std::string bos = "null", eos = "null", pad = "null";
  int64_t positions;
};
Kept kept_fields(const std::string& travelled, int64_t positions, const SpecialIds& special) {
  Kept kept{.positions = positions};
  if (travelled.empty()) {
    if (special.bos) kept.bos = std::to_string(*special.bos);
    if (special.eos) kept.eos = std::to_string(*special.eos);
    if (special.pad) kept.pad = std::to_string(*special.pad);
    return kept;
  }
  const JsonDocument json("files/config.json", travelled, 16);
  const auto take = [&](const char* key, std::string& field) {
    if (const JsonValue* v = json.find(json.root(), key)) field = ids_text(json, *v);
  };
  take("bos_token_id", kept.bos);
  take("eos_token_id", kept.eos);
  take("pad_token_id", kept.pad);
  kept.positions = parse_config(travelled, "files/config.json").max_positions;
  return kept;
}

}  // namespace

Family export_family(const model::Config& c) {
  const auto refuse_key = [](const std::string& key, const std::string& why) {
    refuse("export: {}: {}", key, why);
  };
  const bool qwen = c.qk_norm;
  const char* family = qwen ? "qwen3_moe" : "mixtral";
  const auto no_place = [&](const std::string& key) {
    refuse_key(key, text("a {} folder has no place for it", family));
  };
  if (c.moe_layers() == 0) {
    std::string layers;
    for (const int64_t l : c.dense_layers)
      layers += (layers.empty() ? "" : ", ") + std::to_string(l);
    refuse_key(text("model.dense_layers = [{}]", layers),
               "a model without experts is not exported; moiety import --upcycle makes it MoE");
  }
  if (!qwen && c.moe_layers() < c.layers) {
    no_place(text("model.dense_layers, model.moe_every = {}", c.moe_every));
  }
  const gemm::Activation swiglu = gemm::swiglu(), &a = c.activation;
  if (a.kind != swiglu.kind || a.alpha != swiglu.alpha || a.limit != swiglu.limit ||
      a.offset != swiglu.offset) {
    no_place("moe.activation other than \"swiglu\"");
  }
  if (c.expert_bias) no_place("moe.expert_bias = true");
  if (c.shared_d_ffn > 0) no_place(text("moe.shared_d_ffn = {}", c.shared_d_ffn));
  const moe::RouterConfig& r = c.router;
  if (r.score != moe::Score::kSoftmax) no_place("router.score = \"sigmoid\"");
  if (r.scale != 1) no_place(text("router.scale = {}", number_text(r.scale)));
  if (r.groups > 1 && r.group_top_k < r.groups) no_place(text("router.groups = {}", r.groups));
  if (!qwen && !r.renormalize) no_place("router.renormalize = false");
  return qwen ? Family::kQwen3Moe : Family::kMixtral;
}

std::string config_text(const model::Config& c, Family family, DType dtype, int64_t positions,
                        const std::string& travelled, const SpecialIds& special) {
  const bool qwen = family == Family::kQwen3Moe;
  const Kept kept = kept_fields(travelled, positions, special);
  const char* type = dtype == DType::kFloat32 ? "float32" : "bfloat16";
  std::string dense;
  for (const int64_t l : c.dense_layers) dense += (dense.empty() ? "" : ", ") + std::to_string(l);
  std::string out = "{\n";
  const auto add = [&out](const std::string& key, const std::string& json) {
    out += text("{}  \"{}\": {}", out.size() > 2 ? ",\n" : "", key, json);
  };
  const auto size = [&add](const char* key, int64_t n) { add(key, std::to_string(n)); };
  add("architectures", qwen ? "[\"Qwen3MoeForCausalLM\"]" : "[\"MixtralForCausalLM\"]");
  if (qwen) add("attention_bias", "false");
  add("attention_dropout", "0.0");
  add("bos_token_id", kept.bos);
  if (qwen) size("decoder_sparse_step", c.moe_every);
  add("dtype", text("\"{}\"", type));
  add("eos_token_id", kept.eos);
  size("head_dim", c.head_size());
  add("hidden_act", "\"silu\"");
  size("hidden_size", c.d_model);
  add("initializer_range", number(c.init_std));
  size("intermediate_size", !qwen ? c.d_ffn : c.d_ffn_dense > 0 ? c.d_ffn_dense : c.d_ffn);
  size("max_position_embeddings", kept.positions);
  if (qwen) add("mlp_only_layers", "[" + dense + "]");
  add("model_type", text("\"{}\"", name(family)));
  if (qwen) size("moe_intermediate_size", c.d_ffn);
  if (qwen) add("norm_topk_prob", word(c.router.renormalize));
  size("num_attention_heads", c.heads);
  size("num_experts", c.router.experts);
  size("num_experts_per_tok", c.router.top_k);
  size("num_hidden_layers", c.layers);
  size("num_key_value_heads", c.kv_heads);
  size("num_local_experts", c.router.experts);
  add("output_router_logits", "false");
  add("pad_token_id", kept.pad);
  add("rms_norm_eps", number(c.norm_eps));
  add("rope_parameters",
      text("{{\"rope_theta\": {}, \"rope_type\": \"default\"}}", number(c.rope_theta)));
  add("rope_scaling", "null");
  add("rope_theta", number(c.rope_theta));
  add("router_aux_loss_coef", number(aux_coef(c)));
  if (!qwen) add("router_jitter_noise", "0.0");
  add("sliding_window", "null");
  add("tie_word_embeddings", word(c.tie_embeddings));
  add("torch_dtype", text("\"{}\"", type));
  add("use_cache", "true");
  if (qwen) add("use_sliding_window", "false");
  size("vocab_size", c.vocab);
  return out + "\n}\n";
}

}  // namespace moiety::hf
