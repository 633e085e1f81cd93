#include "moiety/train/memory/weight_memory.h"

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "moiety/formats/quantized.h"
#include "moiety/gtp/codec.h"
#include "moiety/model/frozen.h"
#include "moiety/model/parameters.h"
#include "moiety/model/weight_layout.h"

namespace moiety::train {
namespace {

// A weight that gtp or egtp may cut.
struct BigWeight {
  std::string name;
  gtp::Layout layout;   // layout as tp cuts the weight
  int64_t layer = -1;   // -1: embedding or head
  int64_t members = 1;  // experts of this rank
  bool expert = false, attention = false;

  std::optional<QuantSpec> format(const model::Precision& precision, int64_t layers) const {
    const bool kept = layer < precision.kept.first || layer >= layers - precision.kept.last;
    if (!precision.recipe || layer < 0 || kept) return {};
    if (attention && !precision.attention_linears) return {};
    return model::kept_format(*precision.recipe, layout.slice_cols());
  }
};

std::vector<BigWeight> big_weights(const model::Config& c, const Grid& grid) {
  const model::TpPlace tp{0, grid.tp};
  const gtp::Layout vocabulary = model::vocabulary_layout(c, tp);
  std::vector<BigWeight> all{{.name = "embed.weight", .layout = vocabulary}};
  if (!c.tie_embeddings) all.push_back({.name = "head.weight", .layout = vocabulary});
  for (int64_t l = 0; l < c.layers; ++l) {
    const std::string layer = model::layer_prefix(l);
    const auto add = [&](const std::string& name, const gtp::Layout& layout, bool attention) {
      all.push_back(
          {.name = layer + name + ".weight", .layout = layout, .layer = l, .attention = attention});
    };
    const int64_t ffn = c.is_moe(l) ? c.shared_d_ffn : c.d_ffn_dense;
    const std::string network = c.is_moe(l) ? "moe.shared." : "mlp.";
    add("attn.qkv", model::qkv_layout(c, tp), true);
    add("attn.o", model::o_layout(c, tp), true);
    if (ffn > 0) {
      add(network + "fc1", model::fc1_layout(c, ffn, tp), false);
      add(network + "fc2", model::fc2_layout(c, ffn, tp), false);
    }
    if (!c.is_moe(l)) continue;
    const int64_t hidden = c.activation.hidden(c.d_ffn), local = c.router.experts / grid.ep;
    for (const auto& [fc, rows, cols] :
         {std::tuple("fc1", hidden, c.d_model), std::tuple("fc2", c.d_model, c.d_ffn)}) {
      all.push_back({.name = layer + "moe.experts." + fc + ".weight",
                     .layout = {.rows = rows, .cols = cols},
                     .layer = l,
                     .members = local,
                     .expert = true});
    }
  }
  return all;
}

int64_t quantized_bytes(const QuantSpec& spec, int64_t rows, int64_t cols) {
  const QuantizedSizes sizes =
      quantized_sizes(spec, rows, cols, {true, spec.format == Format::kMxfp8});
  return sizes.row_data.bytes() + sizes.row_scales.bytes() + sizes.col_data.bytes() +
         sizes.col_scales.bytes();
}

// Counts what neither tp nor gtp cuts, by name.
template <class Of>
void count_small(const model::Config& c, const Grid& grid, const Of& of) {
  of("final_norm.weight").copied += c.d_model;
  const int64_t local = c.router.experts / grid.ep;
  for (int64_t l = 0; l < c.layers; ++l) {
    const std::string layer = model::layer_prefix(l);
    for (const char* norm : {"attn_norm", "mlp_norm"}) {
      of(layer + norm + ".weight").copied += c.d_model;
    }
    for (const char* norm : {"q_norm", "k_norm"}) {
      if (c.qk_norm) of(layer + "attn." + norm + ".weight").copied += c.head_size();
    }
    if (!c.is_moe(l)) continue;
    of(layer + "moe.router.weight").copied += c.d_model * c.router.experts;
    if (c.shared_gate) of(layer + "moe.shared.gate.weight").copied += c.d_model;
    if (!c.expert_bias) continue;
    of(layer + "moe.experts.fc1.bias").expert_copied += local * c.activation.hidden(c.d_ffn);
    of(layer + "moe.experts.fc2.bias").expert_copied += local * c.d_model;
  }
}

}  // namespace

KeptWeights::KeptWeights(const model::Config& c, const Grid& grid, DType storage,
                         std::span<const model::Precision> precisions) {
  const model::Frozen is_frozen(c);
  const auto of = [&](const std::string& name) -> KeptElements& {
    return is_frozen(name) ? frozen : trained;
  };
  count_small(c, grid, of);
  std::vector<int64_t> of_precision(precisions.size());
  for (const BigWeight& w : big_weights(c, grid)) {
    gtp::Layout layout = w.layout;
    layout.gtp_size = w.expert ? grid.egtp : grid.gtp;
    const bool sharded = layout.gtp_size > 1;
    for (const model::Precision& p : precisions) {
      const auto format = w.format(p, c.layers);
      const gtp::Codec codec = format ? gtp::Codec(*format) : gtp::Codec();
      if (sharded) layout.align = std::max(layout.align, codec.align());
    }
    const int64_t rows = sharded ? layout.shard_rows() : layout.slice_rows();
    const int64_t cols = layout.slice_cols();
    const int64_t elements = w.members * rows * cols;
    const auto add = [&](KeptElements& to) { (w.expert ? to.expert : to.dense) += elements; };
    add(of(w.name));
    const bool quantized = std::ranges::any_of(
        precisions, [&](const model::Precision& p) { return w.format(p, c.layers).has_value(); });
    if (quantized && is_frozen(w.name)) add(frozen_codes);
    for (size_t i = 0; i < precisions.size(); ++i) {
      const auto format = w.format(precisions[i], c.layers);
      of_precision[i] += w.members * (format ? quantized_bytes(*format, rows, cols)
                                             : byte_size(storage, rows * cols));
    }
  }
  const int64_t small =
      trained.copied + trained.expert_copied + frozen.copied + frozen.expert_copied;
  bytes = byte_size(storage, small) + *std::ranges::max_element(of_precision);
}

}  // namespace moiety::train
