#include "moiety/model/decoder.h"

#include <algorithm>

#include "moiety/base/copy.h"
#include "moiety/model/block_ops.h"
#include "moiety/nn/embedding.h"

namespace moiety::model {
namespace {

// A tensor on the arena with the given contents, filled in stream order.
TensorView int32_on(const Pass& pass, std::vector<int32_t> values) {
  const auto n = static_cast<int64_t>(values.size());
  const TensorView out = pass.arena.tensor(DType::kInt32, {n});
  if (pass.stream.device().type == DeviceType::kCuda) {
    copy(out, TensorView(values.data(), DType::kInt32, {n}), pass.stream);
    return out;
  }
  pass.stream.run([out, values = std::move(values)] {
    std::copy(values.begin(), values.end(), out.data<int32_t>());
  });
  return out;
}

}  // namespace

Decoder::Decoder(Transformer& model, int64_t sequences, int64_t positions)
    : model_(model), positions_(positions), lengths_(sequences) {
  MOIETY_CHECK(sequences >= 1 && positions >= 1, "decoder: {} sequences of {} positions", sequences,
               positions);
  const Config& c = model.config();
  MOIETY_CHECK(model.place().size == 1,
               "decoder: the weights are cut over {} ranks, expected whole", model.place().size);
  for (int64_t l = 0; l < c.layers; ++l) {
    const auto make = [&] {
      return Tensor(model.storage(), {sequences, positions, c.kv_heads, c.head_size()},
                    model.context_.device, "KV cache");
    };
    caches_.push_back({make(), make()});
  }
}

std::vector<CacheRun> Decoder::plan(std::span<const Continuation> parts) const {
  std::vector<CacheRun> runs;
  for (const Continuation& part : parts) {
    const auto rows = static_cast<int64_t>(part.tokens.size());
    MOIETY_CHECK(part.sequence >= 0 && part.sequence < static_cast<int64_t>(lengths_.size()),
                 "decoder: sequence {} of {}", part.sequence, lengths_.size());
    const int64_t length = lengths_[part.sequence];
    MOIETY_CHECK(rows >= 1 && length + rows <= positions_,
                 "decoder: {} tokens after {} of sequence {}, room for {}", rows, length,
                 part.sequence, positions_);
    for (const CacheRun& other : runs) {
      MOIETY_CHECK(other.sequence != part.sequence, "decoder: sequence {} twice", part.sequence);
    }
    runs.push_back({.sequence = part.sequence, .length = length, .rows = rows});
  }
  return runs;
}

void Decoder::append(std::span<const Continuation> parts, TensorView logits_PV, Arena& arena,
                     Stream stream) {
  const Config& c = model_.config();
  const std::vector<CacheRun> runs = plan(parts);
  check_tensor("decoder", "logits", logits_PV, DType::kFloat32,
               {static_cast<int64_t>(parts.size()), c.vocab});
  std::vector<int32_t> tokens, positions;
  for (size_t p = 0; p < parts.size(); ++p) {
    tokens.insert(tokens.end(), parts[p].tokens.begin(), parts[p].tokens.end());
    for (int64_t i = 0; i < runs[p].rows; ++i) {
      positions.push_back(static_cast<int32_t>(runs[p].length + i));
    }
  }
  ArenaScope all(arena);
  model_.grow_rope_table(positions_, stream);
  Pass pass = model_.begin_pass(1, static_cast<int64_t>(tokens.size()), arena, stream);
  pass.position_T = int32_on(pass, std::move(positions));
  const Routing routing(c, pass, {});
  const int64_t capacity = model_.moe_capacity(-1, pass.tokens());
  const TensorView x_TD = pass.tensor({pass.tokens(), c.d_model});
  const TensorView mid_TD = pass.tensor({pass.tokens(), c.d_model});
  nn::embedding({.table_VD = model_.embed_->weight,
                 .token_T = int32_on(pass, std::move(tokens)),
                 .out_TD = x_TD},
                stream);
  for (size_t l = 0; l < model_.layers_.size(); ++l) {
    ArenaScope temporaries(arena);
    const Transformer::Layer& layer = model_.layers_[l];
    layer.attention.forward_cached(pass, runs, caches_[l], x_TD, mid_TD);
    model_.ffn_passed(pass, layer, routing, mid_TD, x_TD, capacity);
  }
  int64_t end = 0;
  for (size_t p = 0; p < runs.size(); ++p) {
    end += runs[p].rows;
    lengths_[runs[p].sequence] += runs[p].rows;
    const auto row = static_cast<int64_t>(p);
    apply_norm(pass, x_TD.slice(0, end - 1, end), *model_.final_norm_, c.norm_eps,
               mid_TD.slice(0, row, row + 1));
  }
  nn::linear(mid_TD.slice(0, 0, logits_PV.size(0)), model_.head_parameter().weight, logits_PV, {},
             stream);
}

}  // namespace moiety::model
