#include "apps/moiety/config/imported_options.h"

#include "moiety/base/number_text.h"

namespace moiety::app {
namespace {

std::string list_text(const std::vector<int64_t>& list) {
  std::string out;
  for (const int64_t n : list) out += (out.empty() ? "" : ", ") + std::to_string(n);
  return "[" + out + "]";
}

// A float key takes what looks like one.
std::string float_text(double x) {
  const std::string s = number_text(x);
  return s.find_first_of(".en") == s.npos ? s + ".0" : s;
}

}  // namespace

Config imported_config(const ImportedModel& imported) {
  const model::Config& c = imported.config;
  Options o;
  o.data.tokenizer = imported.tokenizer;
  const std::string tokenizer = value_text(find_key("data.tokenizer", "import"), o);
  std::string toml = text(
      "[run]\nseed = {}\n[data]\nseq_len = {}\ntokenizer = {}\n[precision]\nrecipe = \"{}\"\n"
      "[model]\npreset = \"\"\nvocab = {}\nd_model = {}\nlayers = {}\nheads = {}\nkv_heads = {}\n"
      "head_dim = {}\nqk_norm = {}\nrope_theta = {}\nnorm_eps = {}\ntie_embeddings = {}\n"
      "dense_layers = {}\nmoe_every = {}\nd_ffn_dense = {}\n[init]\nstd = {}\n",
      imported.seed, imported.seq_len, tokenizer, imported.recipe, c.vocab, c.d_model, c.layers,
      c.heads, c.kv_heads, c.head_size(), c.qk_norm, float_text(c.rope_theta),
      float_text(double(std::stod(number_text(c.norm_eps)))), c.tie_embeddings,
      list_text(c.dense_layers), c.moe_every, c.d_ffn_dense,
      float_text(std::stod(number_text(c.init_std))));
  if (c.moe_layers() > 0) {
    toml += text(
        "[moe]\nexperts = {}\ntop_k = {}\nd_ffn = {}\n"
        "[router]\nrenormalize = {}\naux = \"hf\"\naux_coef = {}\n",
        c.router.experts, c.router.top_k, c.d_ffn, c.router.renormalize,
        float_text(std::stod(number_text(c.router.aux_coef))));
  }
  Config config = parse_config(toml, imported.source);
  // The lines are those of the text above, which nobody sees.
  for (size_t i = 0; i < config.source.size(); ++i) {
    if (config.source[i] == "default") continue;
    const std::string_view section = option_keys()[i].section;
    const bool is_of_model = section != "run" && section != "data";
    config.source[i] = is_of_model ? imported.source : "moiety import";
  }
  return config;
}

}  // namespace moiety::app
