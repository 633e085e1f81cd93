#include "moiety/model/weight_layout.h"

#include <algorithm>
#include <numeric>

#include "moiety/base/error.h"

namespace moiety::model {
namespace {

constexpr int64_t kVocabularyAlign = 16;

gtp::Layout cut(int64_t rows, int64_t cols, int axis, int64_t unit, TpPlace place) {
  return {.rows = rows,
          .cols = cols,
          .tp_axis = axis,
          .tp_rank = place.rank,
          .tp_size = place.size,
          .align = 1,
          .tp_unit = unit};
}

// Number of query heads per key head.
int64_t group_heads(const Config& c) { return c.heads / c.kv_heads; }

void check_blocks(const char* tensor, gtp::Layout layout, int64_t block) {
  layout.tp_unit = std::lcm(layout.tp_unit, block);
  try {
    gtp::check_layout(tensor, layout);
  } catch (const Error& e) {
    fail(e.kind(), "parallel.tp={}{}: {}", layout.tp_size,
         block > 1 ? " and the blocks of precision.recipe" : "", e.what());
  }
}

void check_ffn(const Config& c, const std::string& prefix, int64_t ffn, TpPlace place,
               int64_t block) {
  check_blocks((prefix + "fc1.weight").c_str(), fc1_layout(c, ffn, place),
               c.activation.hidden(1) * block);
  check_blocks((prefix + "fc2.weight").c_str(), fc2_layout(c, ffn, place), block);
}

}  // namespace

gtp::Layout vocabulary_layout(const Config& c, TpPlace place) {
  gtp::Layout layout = cut(c.vocab, c.d_model, 0, 1, place);
  if (place.size > 1) {
    layout.vocabulary = true;
    layout.align = kVocabularyAlign;
  }
  return layout;
}

gtp::Layout qkv_layout(const Config& c, TpPlace place) {
  return cut(c.qkv_size(), c.d_model, 0, (group_heads(c) + 2) * c.head_size(), place);
}

gtp::Layout o_layout(const Config& c, TpPlace place) {
  return cut(c.d_model, c.heads * c.head_size(), 1, group_heads(c) * c.head_size(), place);
}

gtp::Layout fc1_layout(const Config& c, int64_t ffn, TpPlace place) {
  return cut(c.activation.hidden(ffn), c.d_model, 0, c.activation.hidden(1), place);
}

gtp::Layout fc2_layout(const Config& c, int64_t ffn, TpPlace place) {
  return cut(c.d_model, ffn, 1, 1, place);
}

gtp::Box tp_slice(gtp::Layout layout) {
  layout.gtp_rank = 0;
  layout.gtp_size = 1;
  return layout.global_box(0);
}

void check_tp(const Config& c, const Precision& precision, int ranks) {
  if (ranks == 1) return;
  MOIETY_CHECK(c.heads % ranks == 0 && c.kv_heads % ranks == 0,
               "parallel.tp={} must divide model.heads={} and model.kv_heads={}", ranks, c.heads,
               c.kv_heads);
  const TpPlace place{0, ranks};
  // A format with one scale for a tensor has no blocks that a cut could part.
  const int64_t block =
      precision.recipe ? std::max(1, block_shape(precision.recipe->input.format).cols) : 1;
  const int64_t attention = precision.attention_linears ? block : 1;
  check_blocks("attn.qkv.weight", qkv_layout(c, place), attention);
  check_blocks("attn.o.weight", o_layout(c, place), attention);
  if (c.moe_layers() < c.layers) check_ffn(c, "mlp.", c.d_ffn_dense, place, block);
  if (c.moe_layers() > 0 && c.shared_d_ffn > 0) {
    check_ffn(c, "moe.shared.", c.shared_d_ffn, place, block);
  }
}

}  // namespace moiety::model
