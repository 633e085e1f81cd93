#include "moiety/hf/config.h"

#include <algorithm>
#include <array>
#include <span>

#include "moiety/base/number_text.h"
#include "moiety/base/printable.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/json.h"

namespace moiety::hf {
namespace {

using checkpoint::JsonArray, checkpoint::JsonDocument, checkpoint::JsonObject;
using checkpoint::JsonValue, checkpoint::json_string, checkpoint::refuse;

constexpr int kDeepest = 16;
constexpr int64_t kMostSize = int64_t{1} << 24;
constexpr double kMostTheta = 1e12;
constexpr size_t kMostShown = 200;  // of a value, in errors

// The defaults of transformers' configuration classes. 0: as many heads of keys as of queries, and
// the size of a head is hidden_size / num_attention_heads.
struct Defaults {
  Family family;
  const char* model_type;
  int64_t vocab, hidden, intermediate, layers, kv_heads, head_dim, positions, window;
  double norm_eps, rope_theta;
};
constexpr std::array kDefaults{
    Defaults{Family::kQwen3Moe, "qwen3_moe", 151936, 2048, 6144, 24, 4, 0, 32768, 4096, 1e-6, 1e4},
    Defaults{Family::kMixtral, "mixtral", 32000, 4096, 14336, 32, 8, 0, 131072, 0, 1e-5, 1e6},
    Defaults{Family::kLlama, "llama", 32000, 4096, 11008, 32, 0, 0, 2048, 0, 1e-6, 1e4},
    Defaults{Family::kMistral, "mistral", 32000, 4096, 14336, 32, 8, 0, 131072, 4096, 1e-6, 1e4},
    Defaults{Family::kQwen3, "qwen3", 151936, 4096, 22016, 32, 32, 128, 32768, 4096, 1e-6, 1e4},
};
constexpr int64_t kDefaultHeads = 32;  // of all of them

const Defaults& defaults_of(Family family) {
  return *std::ranges::find(kDefaults, family, &Defaults::family);
}

std::string value_text(const JsonDocument& json, const JsonValue& v) {
  if (const auto* s = std::get_if<std::string>(&v.value)) {
    return json_string(printable(*s, kMostShown));
  }
  if (const auto* b = std::get_if<bool>(&v.value)) return *b ? "true" : "false";
  if (const auto* n = std::get_if<int64_t>(&v.value)) return std::to_string(*n);
  if (const auto* x = std::get_if<double>(&v.value)) return number_text(*x);
  if (std::holds_alternative<std::monostate>(v.value)) return "null";
  return printable(std::string(json.raw(v)), kMostShown);
}

// The fields of the object. A null counts as absent, as it does in transformers.
class Fields {
 public:
  Fields(std::string_view text, const std::string& path)
      : path_(path), json_(path, text, kDeepest), object_(&json_.root()) {
    json_.object(*object_);
  }

  // A field by either of its names; both may be there, with one value.
  const JsonValue* find(std::string_view key, std::string_view also = {}) const {
    const JsonValue* first = find_in(*object_, key);
    const JsonValue* second = also.empty() ? nullptr : find_in(*object_, also);
    if (first && second && value_text(json_, *first) != value_text(json_, *second)) {
      refuse("{}: {} = {} and {} = {}: two values of one thing", path_, key,
             value_text(json_, *first), also, value_text(json_, *second));
    }
    return first ? first : second;
  }
  const JsonValue* find_in(const JsonValue& object, std::string_view key) const {
    const JsonValue* v = json_.find(object, key);
    return v && !std::holds_alternative<std::monostate>(v->value) ? v : nullptr;
  }

  // Where classes of transformers take a null for another thing than an absent field.
  bool is_null(std::string_view key) const {
    const JsonValue* v = json_.find(*object_, key);
    return v && std::holds_alternative<std::monostate>(v->value);
  }

  int64_t size(std::string_view key, int64_t standard, std::string_view also = {},
               int64_t most = kMostSize) const {
    const JsonValue* v = find(key, also);
    if (!v) return standard;
    const int64_t n = json_.integer(*v);
    if (n < 1 || n > most) refuse("{}: {} = {}: must be in 1..{}", path_, key, n, most);
    return n;
  }
  // The inner size of a feed-forward part.
  int64_t inner_size(std::string_view key, int64_t standard) const {
    const int64_t n = size(key, standard, {}, int64_t{1} << 20);
    if (n % 8 != 0) refuse("{}: {} = {}: must be a multiple of 8", path_, key, n);
    return n;
  }
  double number(std::string_view key, double standard, double most) const {
    const JsonValue* v = find(key);
    const double x = v ? json_.number(*v) : standard;
    if (x < 0 || x > most) {
      refuse("{}: {} = {}: must be in 0..{}", path_, key, number_text(x), number_text(most));
    }
    return x;
  }
  bool flag(std::string_view key, bool standard) const {
    const JsonValue* v = find(key);
    return v ? json_.boolean(*v) : standard;
  }
  std::string word(std::string_view key, std::string_view standard,
                   std::string_view also = {}) const {
    const JsonValue* v = find(key, also);
    return v ? json_.string(*v) : std::string(standard);
  }

  [[noreturn]] void refuse_value(std::string_view key, const JsonValue& v,
                                 std::string_view why) const {
    refuse("{}: {} = {}: {}", path_, key, value_text(json_, v), why);
  }
  // Refuses the field if it is there with a value other than false, 0 and an empty list.
  void want_none(std::string_view key, std::string_view why) const {
    const JsonValue* v = find(key);
    if (!v) return;
    const auto* b = std::get_if<bool>(&v->value);
    const auto* n = std::get_if<int64_t>(&v->value);
    const auto* x = std::get_if<double>(&v->value);
    const auto* list = std::get_if<JsonArray>(&v->value);
    const bool none = (b && !*b) || (n && *n == 0) || (x && *x == 0) || (list && list->empty());
    if (!none) refuse_value(key, *v, why);
  }

  const JsonDocument& json() const { return json_; }
  const std::string& path() const { return path_; }

 private:
  const std::string& path_;
  JsonDocument json_;
  const JsonValue* object_;
};

Family family_of(const Fields& f) {
  const JsonValue* type = f.find("model_type");
  if (!type) refuse("{}: field \"model_type\" is missing", f.path());
  const std::string& word = f.json().string(*type);
  std::string known;
  for (const Defaults& d : kDefaults) {
    if (word == d.model_type) return d.family;
    known += (known.empty() ? "" : ", ") + std::string(d.model_type);
  }
  const bool latent = word.starts_with("deepseek");
  refuse("{}: model_type = {}: {}the model types that are read are {}", f.path(),
         json_string(printable(word, kMostShown)), latent ? "latent attention is not built; " : "",
         known);
}

// The fields that ask for what Moiety does not compute.
void refuse_foreign(const Fields& f) {
  if (const JsonValue* act = f.find("hidden_act"); act && f.json().string(*act) != "silu") {
    f.refuse_value("hidden_act", *act, "the activation must be \"silu\"");
  }
  f.want_none("attention_bias", "attention has no biases here");
  f.want_none("mlp_bias", "feed-forward parts have no biases here");
  f.want_none("attention_dropout", "there is no dropout here");
  f.want_none("router_jitter_noise", "routers have no jitter here");
  for (const char* key : {"kv_lora_rank", "q_lora_rank"}) {
    f.want_none(key, "latent attention is not built");
  }
  for (const char* key :
       {"n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size"}) {
    f.want_none(key, "shared experts are not read from these families");
  }
  f.want_none("num_nextn_predict_layers", "layers that predict further tokens are not built");
  if (const JsonValue* q = f.find("quantization_config")) {
    f.refuse_value("quantization_config", *q, "weights must be BF16, F16 or F32");
  }
}

// The base of the rotary embedding, in the spelling of either generation.
double rope_theta(const Fields& f, double standard) {
  double theta = f.number("rope_theta", standard, kMostTheta);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const JsonValue* rope = f.find(key);
    if (!rope) continue;
    for (const auto& [field, value] : f.json().object(*rope)) {
      const std::string name = std::string(key) + "." + field;
      if (field == "rope_type" || field == "type") {
        if (f.json().string(value) != "default") {
          f.refuse_value(name, value, "scaled positions are not built, expected \"default\"");
        }
      } else if (field == "rope_theta") {
        const double given = f.json().number(value);
        if (f.find("rope_theta") && given != theta) {
          refuse("{}: rope_theta = {} and {} = {}: two values of one thing", f.path(),
                 number_text(theta), name, number_text(given));
        }
        if (given > kMostTheta) f.refuse_value(name, value, "must be at most 1e12");
        theta = given;
      } else if (field != "partial_rotary_factor" || f.json().number(value) != 1) {
        f.refuse_value(name, value, "scaled or partial positions are not built");
      }
    }
  }
  if (const JsonValue* part = f.find("partial_rotary_factor");
      part && f.json().number(*part) != 1) {
    f.refuse_value("partial_rotary_factor", *part, "partial positions are not built");
  }
  return theta;
}

// The tokens that attention sees, 0 for all. Qwen's classes have a window only if
// use_sliding_window says so, and then in some layers; a single one bounds the model.
int64_t window_of(const Fields& f, Family family, const Defaults& d) {
  const bool qwen = family == Family::kQwen3Moe || family == Family::kQwen3;
  if (family == Family::kLlama) return 0;
  if (qwen && !f.flag("use_sliding_window", false)) return 0;
  if (f.is_null("sliding_window")) return 0;
  return f.size("sliding_window", d.window, {}, int64_t{1} << 40);
}

std::vector<int64_t> layer_list(const Fields& f, std::string_view key, int64_t layers) {
  std::vector<int64_t> list;
  const JsonValue* v = f.find(key);
  if (!v) return list;
  for (const JsonValue& item : f.json().array(*v)) {
    const int64_t layer = f.json().integer(item);
    if (layer >= layers) {
      f.refuse_value(key, *v, text("there are layers 0..{}", layers - 1));
    }
    list.push_back(layer);
  }
  std::ranges::sort(list);
  return list;
}

void read_experts(const Fields& f, Family family, const Defaults& d, model::Config& c) {
  const bool qwen = family == Family::kQwen3Moe;
  c.router.experts = f.size("num_experts", qwen ? 128 : 8, "num_local_experts", 4096);
  c.router.top_k = f.size("num_experts_per_tok", qwen ? 8 : 2, {}, 32);
  if (c.router.top_k > c.router.experts) {
    refuse("{}: num_experts_per_tok = {}: there are {} experts", f.path(), c.router.top_k,
           c.router.experts);
  }
  c.router.renormalize = qwen ? f.flag("norm_topk_prob", false) : true;
  c.router.aux = moe::AuxLoss::kHf;
  c.router.aux_coef = float(f.number("router_aux_loss_coef", 0.001, 1));
  c.d_ffn = qwen ? f.inner_size("moe_intermediate_size", 768)
                 : f.inner_size("intermediate_size", d.intermediate);
  if (!qwen) return;
  c.moe_every = f.size("decoder_sparse_step", 1, {}, 1024);
  c.dense_layers = layer_list(f, "mlp_only_layers", c.layers);
  if (c.moe_layers() == c.layers) return;
  c.d_ffn_dense = f.inner_size("intermediate_size", d.intermediate);
}

void read_sizes(const Fields& f, const Defaults& d, model::Config& c) {
  c.vocab = f.size("vocab_size", d.vocab);
  c.d_model = f.size("hidden_size", d.hidden, {}, 65536);
  c.layers = f.size("num_hidden_layers", d.layers, {}, 1024);
  c.heads = f.size("num_attention_heads", kDefaultHeads, {}, 1024);
  const bool all_kv = d.kv_heads == 0 || f.is_null("num_key_value_heads");
  c.kv_heads = f.size("num_key_value_heads", all_kv ? c.heads : d.kv_heads, {}, 1024);
  const bool divided = d.head_dim == 0 || f.is_null("head_dim");
  c.head_dim = f.size("head_dim", divided ? c.d_model / c.heads : d.head_dim, {}, 256);
  c.qk_norm = d.family == Family::kQwen3Moe || d.family == Family::kQwen3;
  c.norm_eps = float(f.number("rms_norm_eps", d.norm_eps, 1));
  c.rope_theta = rope_theta(f, d.rope_theta);
  c.tie_embeddings = f.flag("tie_word_embeddings", false);
  c.init_std = float(f.number("initializer_range", 0.02, 1000));
}

std::optional<DType> dtype_of(const Fields& f) {
  const JsonValue* v = f.find("dtype", "torch_dtype");
  if (!v) return {};
  const std::string& word = f.json().string(*v);
  if (word == "bfloat16") return DType::kBFloat16;
  if (word == "float16") return DType::kFloat16;
  if (word == "float32") return DType::kFloat32;
  f.refuse_value(f.find("dtype") ? "dtype" : "torch_dtype", *v,
                 "weights must be bfloat16, float16 or float32");
}

}  // namespace

std::string_view name(Family family) { return defaults_of(family).model_type; }

Description parse_config(std::string_view json, const std::string& path) {
  const Fields f(json, path);
  Description out;
  out.family = family_of(f);
  const Defaults& d = defaults_of(out.family);
  refuse_foreign(f);
  read_sizes(f, d, out.config);
  if (has_experts(out.family)) {
    read_experts(f, out.family, d, out.config);
  } else {
    for (int64_t l = 0; l < out.config.layers; ++l) out.config.dense_layers.push_back(l);
    out.config.d_ffn_dense = f.inner_size("intermediate_size", d.intermediate);
  }
  out.dtype = dtype_of(f);
  out.max_positions = f.size("max_position_embeddings", d.positions, {}, int64_t{1} << 40);
  out.window = window_of(f, out.family, d);
  try {
    model::check(out.config);
  } catch (const Error& e) {
    refuse("{}: {}", path, e.what());
  }
  return out;
}

void check_window(const Description& d, int64_t seq_len, const std::string& path) {
  if (d.window == 0 || d.window >= seq_len) return;
  refuse("{}: sliding_window = {}: attention sees all of a sequence here, and data.seq_len is {}",
         path, d.window, seq_len);
}

}  // namespace moiety::hf
