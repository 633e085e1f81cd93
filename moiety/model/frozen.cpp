#include "moiety/model/frozen.h"

#include <algorithm>
#include <map>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/model/config.h"
#include "moiety/model/parameters.h"

namespace moiety::model {
namespace {

struct Named {
  std::string tensor;     // in checkpoints
  std::string parameter;  // in memory
  int64_t block = 0;
  bool is_parameter = true;
};

// Everything that checkpoints name, in the order of the model.
std::vector<Named> named_tensors(const Config& c) {
  std::vector<Named> all;
  const auto add = [&](int64_t block, const std::string& name) {
    all.push_back({name, name, block});
  };
  add(kEmbeddingBlock, "embed.weight");
  for (int64_t l = 0; l < c.layers; ++l) {
    const std::string layer = layer_prefix(l), attn = layer + "attn.", moe = layer + "moe.";
    const int64_t attention = attention_block(l), ffn = ffn_block(l);
    add(attention, layer + "attn_norm.weight");
    for (const char* part : {"q", "k", "v"}) {
      all.push_back({attn + part + ".weight", attn + "qkv.weight", attention});
    }
    add(attention, attn + "o.weight");
    if (c.qk_norm) {
      for (const char* norm : {"q_norm", "k_norm"}) add(attention, attn + norm + ".weight");
    }
    add(ffn, layer + "mlp_norm.weight");
    if (!c.is_moe(l)) {
      for (const char* fc : {"fc1", "fc2"}) add(ffn, layer + "mlp." + fc + ".weight");
      continue;
    }
    add(ffn, moe + "router.weight");
    all.push_back({moe + "router.bias", moe + "router.bias", ffn, false});
    for (const char* fc : {"fc1", "fc2"}) {
      add(ffn, moe + "experts." + fc + ".weight");
      if (c.expert_bias) add(ffn, moe + "experts." + fc + ".bias");
      if (c.shared_d_ffn > 0) add(ffn, moe + "shared." + fc + ".weight");
    }
    if (c.shared_gate) add(ffn, moe + "shared.gate.weight");
  }
  add(head_block(c.layers), "final_norm.weight");
  if (!c.tie_embeddings) add(head_block(c.layers), "head.weight");
  return all;
}

}  // namespace

bool glob_matches(std::string_view glob, std::string_view name) {
  // After a mismatch the last star takes one character more.
  size_t g = 0, n = 0, star = std::string_view::npos, taken = 0;
  while (n < name.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      taken = n;
    } else if (g < glob.size() && (glob[g] == '?' || glob[g] == name[n])) {
      ++g;
      ++n;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      n = ++taken;
    } else {
      return false;
    }
  }
  return glob.find_first_not_of('*', g) == std::string_view::npos;
}

Frozen::Frozen(const Config& c) {
  if (c.freeze.empty()) return;
  const std::vector<Named> all = named_tensors(c);
  std::vector<bool> frozen(all.size());
  for (const std::string& glob : c.freeze) {
    bool any = false;
    for (size_t i = 0; i < all.size(); ++i) {
      if (!glob_matches(glob, all[i].tensor)) continue;
      any = frozen[i] = true;
    }
    MOIETY_CHECK(any,
                 "train.freeze: \"{}\" matches no tensor; names are such as {}, and `moiety info "
                 "CHECKPOINT --tensors` lists them",
                 glob, all[1].tensor);
  }
  std::map<std::string_view, size_t> first_part;  // by parameter
  bool trained = false;
  for (size_t i = 0; i < all.size(); ++i) {
    const size_t other = first_part.emplace(all[i].parameter, i).first->second;
    MOIETY_CHECK(frozen[i] == frozen[other],
                 "train.freeze: {} is frozen and {} is not; they are one matrix in memory, freeze "
                 "both or neither",
                 all[frozen[i] ? i : other].tensor, all[frozen[i] ? other : i].tensor);
    if (frozen[i]) names_.insert(all[i].parameter);
    if (frozen[i] || trained || !all[i].is_parameter) continue;
    trained = true;
    first_ = all[i].block;
  }
  MOIETY_CHECK(trained, "train.freeze: all parameters are frozen, nothing is left to train");
}

}  // namespace moiety::model
