#include "moiety/model/needs.h"

#include "moiety/model/parameters.h"

namespace moiety::model {
namespace {

// The needs of a network within a block that backward comes to.
NetworkNeeds network_needs(const Frozen& frozen, const std::string& prefix, bool input, bool prob) {
  const bool fc1 = !frozen(prefix + "fc1.weight"), fc2 = !frozen(prefix + "fc2.weight");
  return {.input = input, .inner = input || prob || fc1, .fc1 = fc1, .fc2 = fc2};
}

}  // namespace

AttentionNeeds attention_needs(const Config& c, const Frozen& frozen, int64_t layer) {
  if (!frozen.any()) return {};
  const std::string prefix = layer_prefix(layer), attn = prefix + "attn.";
  const int64_t block = attention_block(layer);
  if (!frozen.reaches(block)) return {false, false, false, false, false};
  AttentionNeeds n;
  n.below = frozen.passes(block);
  n.input = n.below || !frozen(prefix + "attn_norm.weight");
  n.qkv = !frozen(attn + "qkv.weight");
  n.o = !frozen(attn + "o.weight");
  n.core = n.input || n.qkv ||
           (c.qk_norm && !(frozen(attn + "q_norm.weight") && frozen(attn + "k_norm.weight")));
  return n;
}

FfnNeeds ffn_needs(const Config& c, const Frozen& frozen, int64_t layer) {
  FfnNeeds n;
  if (!frozen.any()) return n;
  const std::string prefix = layer_prefix(layer), moe = prefix + "moe.";
  const int64_t block = ffn_block(layer);
  const bool reached = frozen.reaches(block);
  const auto trained = [&](const std::string& name) { return reached && !frozen(name); };
  n.below = frozen.passes(block);
  n.input = n.below || trained(prefix + "mlp_norm.weight");
  n.router = trained(moe + "router.weight");
  n.routed = n.input || n.router;
  n.fc1 = trained(moe + "experts.fc1.weight");
  n.fc2 = trained(moe + "experts.fc2.weight");
  const bool biases =
      c.expert_bias && (trained(moe + "experts.fc1.bias") || trained(moe + "experts.fc2.bias"));
  n.experts = n.routed || n.fc1 || n.fc2 || biases;
  n.gate = trained(moe + "shared.gate.weight");
  n.gate_prob = n.input || n.gate;
  if (!reached) {
    n.network = {false, false, false, false};
  } else if (c.is_moe(layer)) {
    n.network = network_needs(frozen, moe + "shared.", n.input, c.shared_gate && n.gate_prob);
  } else {
    n.network = network_needs(frozen, prefix + "mlp.", n.input, false);
  }
  return n;
}

HeadNeeds head_needs(const Config& c, const Frozen& frozen) {
  return {.input = frozen.passes(head_block(c.layers)) || !frozen("final_norm.weight"),
          .weight = !frozen(c.tie_embeddings ? "embed.weight" : "head.weight")};
}

}  // namespace moiety::model
