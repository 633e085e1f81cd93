#include "moiety/train/memory/weight_memory.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "moiety/formats/quantized.h"
#include "moiety/gtp/codec.h"
#include "moiety/model/weight_layout.h"

namespace moiety::train {
namespace {

// A weight that gtp or egtp may cut.
struct BigWeight {
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
  std::vector<BigWeight> all(c.tie_embeddings ? 1 : 2,
                             BigWeight{.layout = model::vocabulary_layout(c, tp)});
  for (int64_t l = 0; l < c.layers; ++l) {
    const int64_t ffn = c.is_moe(l) ? c.shared_d_ffn : c.d_ffn_dense;
    all.push_back({.layout = model::qkv_layout(c, tp), .layer = l, .attention = true});
    all.push_back({.layout = model::o_layout(c, tp), .layer = l, .attention = true});
    if (ffn > 0) {
      all.push_back({.layout = model::fc1_layout(c, ffn, tp), .layer = l});
      all.push_back({.layout = model::fc2_layout(c, ffn, tp), .layer = l});
    }
    if (!c.is_moe(l)) continue;
    const int64_t hidden = c.activation.hidden(c.d_ffn), local = c.router.experts / grid.ep;
    for (const auto& [rows, cols] : {std::pair(hidden, c.d_model), std::pair(c.d_model, c.d_ffn)}) {
      all.push_back(
          {.layout = {.rows = rows, .cols = cols}, .layer = l, .members = local, .expert = true});
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

}  // namespace

KeptWeights::KeptWeights(const model::Config& c, const Grid& grid, DType storage,
                         std::span<const model::Precision> precisions) {
  copied = c.d_model * (2 * c.layers + 1) + (c.qk_norm ? 2 * c.layers * c.head_size() : 0) +
           c.moe_layers() * c.d_model * (c.router.experts + (c.shared_gate ? 1 : 0));
  if (c.expert_bias) {
    expert_copied =
        c.moe_layers() * (c.router.experts / grid.ep) * (c.activation.hidden(c.d_ffn) + c.d_model);
  }
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
    (w.expert ? expert : dense) += w.members * rows * cols;
    for (size_t i = 0; i < precisions.size(); ++i) {
      const auto format = w.format(precisions[i], c.layers);
      of_precision[i] += w.members * (format ? quantized_bytes(*format, rows, cols)
                                             : byte_size(storage, rows * cols));
    }
  }
  bytes = byte_size(storage, copied + expert_copied) + *std::ranges::max_element(of_precision);
}

}  // namespace moiety::train
