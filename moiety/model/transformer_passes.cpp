// The way of a batch through the layers of the model, there and back. It stops where rows have set
// out among the experts' ranks, so that another batch may compute meanwhile.
#include <algorithm>
#include <utility>

#include "moiety/base/trace.h"
#include "moiety/model/transformer.h"

namespace moiety::model {

bool Transformer::takes_turns() const {
  return config_.overlap == moe::Overlap::kMicroBatch && config_.moe_layers() > 0 &&
         context_.experts->ranks() > 1;
}

MoeBlock::Forward Transformer::moe_forward(const Routing& routing, int64_t moe_index,
                                           TensorView x_TD, TensorView out_TD,
                                           int64_t capacity) const {
  return {.x_TD = x_TD,
          .out_TD = out_TD,
          .capacity = capacity,
          .stats = routing.stats_of(moe_index),
          .info = routing.info(moe_index),
          .recompute = config_.recompute != Recompute::kNone};
}

void Transformer::ffn_passed(const Pass& pass, const Layer& layer, const Routing& routing,
                             TensorView x_TD, TensorView out_TD, int64_t capacity) const {
  ArenaScope temporaries(pass.arena);
  if (const auto* dense = std::get_if<DenseBlock>(&layer.ffn)) {
    dense->forward(pass, x_TD, out_TD);
  } else {
    std::get<MoeBlock>(layer.ffn).forward(
        pass, moe_forward(routing, layer.moe_index, x_TD, out_TD, capacity), nullptr);
  }
}

void Transformer::layer_passed(const Pass& pass, const Layer& layer, const Routing& routing,
                               TensorView x_TD, TensorView mid_TD, int64_t capacity) const {
  {
    ArenaScope temporaries(pass.arena);
    layer.attention.forward(pass, x_TD, mid_TD);
  }
  ffn_passed(pass, layer, routing, mid_TD, x_TD, capacity);
}

std::unique_ptr<Transformer::Saved> Transformer::begin_forward(const Batch& batch, int64_t capacity,
                                                               Arena& arena, Stream stream,
                                                               const AwaitWeights* await) {
  MOIETY_CHECK(trainable_, "model: forward for training needs gradients; evaluate does not");
  const Pass pass = begin_pass(batch, arena, std::move(stream));
  auto s = std::make_unique<Saved>(Saved{.pass = pass,
                                         .capacity = capacity,
                                         .layers = std::vector<LayerSaved>(layers_.size()),
                                         .routing = Routing(config_, pass, counted(batch))});
  const int64_t tokens = pass.own_tokens();
  if (head_needs_.input) s->d_TD = pass.tensor({tokens, config_.d_model});
  if (full_recompute() || !frozen_.reaches(ffn_block(0))) {
    s->mid_TD = pass.tensor({tokens, config_.d_model});
  }
  s->x_TD = pass.tensor({tokens, config_.d_model});
  s->await = await;
  await_weights(*s, first_of(0));
  enter(-1, false);
  embed(pass, batch, s->x_TD);
  return s;
}

void Transformer::attention_forward(Saved& s, LayerSaved& saved) const {
  const Pass& pass = s.pass;
  const AttentionBlock& attention = layers_[s.layer].attention;
  saved.x_TD = s.x_TD;
  saved.mid_TD = full_recompute() ? s.mid_TD : pass.tensor({pass.own_tokens(), config_.d_model});
  const Arena::Mark mark = pass.arena.mark();
  saved.attention = attention.forward(pass, s.x_TD, saved.mid_TD);
  if (full_recompute() || !frozen_.reaches(attention_block(s.layer))) pass.arena.release(mark);
  s.x_TD = pass.tensor({pass.own_tokens(), config_.d_model});
}

bool Transformer::go_forward(Saved& s) const {
  for (; s.layer < config_.layers; ++s.layer) {
    const TraceSpan span(TraceLane::kHost, "layer", {{"layer", s.layer}});
    enter(s.layer, false);
    const Pass& pass = s.pass;
    const Layer& layer = layers_[s.layer];
    LayerSaved& saved = s.layers[s.layer];
    if (!frozen_.reaches(ffn_block(s.layer))) {
      await_weights(s, first_of(s.layer + 1));
      layer_passed(pass, layer, s.routing, s.x_TD, s.mid_TD, s.capacity);
      continue;
    }
    if (s.part == 0) {
      await_weights(s, layer.first_of_ffn);
      attention_forward(s, saved);
      await_weights(s, first_of(s.layer + 1));
    }
    if (const auto* dense = std::get_if<DenseBlock>(&layer.ffn)) {
      const Arena::Mark mark = pass.arena.mark();
      const TensorView hidden = dense->forward(pass, saved.mid_TD, s.x_TD);
      if (full_recompute()) pass.arena.release(mark);
      saved.dense = full_recompute() ? TensorView() : hidden;
      continue;
    }
    const auto& moe = std::get<MoeBlock>(layer.ffn);
    if (s.part == 0) {
      s.forward = {};
      moe.begin_forward(pass,
                        moe_forward(s.routing, layer.moe_index, saved.mid_TD, s.x_TD, s.capacity),
                        s.forward);
    } else if (s.part == 1) {
      moe.forward_experts(pass, s.forward);
    } else {
      moe.end_forward(pass, s.forward, &saved.moe);
    }
    s.part = (s.part + 1) % 3;
    if (s.part > 0) return true;
  }
  return false;
}

void Transformer::end_forward(Saved& s, const Batch& batch, const StepSums& sums) {
  const Stream& stream = s.pass.stream;
  await_weights(s, end_);
  enter(-1, false);
  s.routing.count(sums, context_.world, stream);
  loss(s.pass, batch, s.x_TD, s.d_TD, head_needs_.weight, sums);
  s.routing.losses(sums, stream);
}

void Transformer::forward(const Batch& batch, int64_t capacity, const StepSums& sums, Arena& arena,
                          Stream stream, const AwaitWeights& await) {
  const TraceSpan span(TraceLane::kHost, "forward");
  saved_ = begin_forward(batch, capacity, arena, std::move(stream), &await);
  while (go_forward(*saved_)) {
  }
  end_forward(*saved_, batch, sums);
  saved_->await = nullptr;
}

std::optional<DelayedExperts> Transformer::make_delayed(const Saved& s) const {
  if (!config_.delay_wgrad) return std::nullopt;
  for (int64_t l = 0; l < config_.layers; ++l) {
    const auto* block = std::get_if<MoeBlock>(&layers_[l].ffn);
    if (!block || !frozen_.reaches(ffn_block(l))) continue;
    return block->make_delayed(s.pass, s.layers[l].moe);
  }
  return std::nullopt;
}

void Transformer::begin_backward(Saved& s, Stream stream) const {
  s.pass.stream = std::move(stream);
  s.layer = config_.layers - 1;
  s.part = 0;
  enter(-1, true);
  s.delayed = make_delayed(s);
  if (!head_needs_.input) return;
  norm_gradient(s.pass, {s.x_TD, s.d_TD, {}, s.d_TD}, config_.norm_eps, *final_norm_);
  tell_ready(s, first_of_end_);
}

// Where weight gradients of experts wait, only those behind their layer are complete.
void Transformer::tell_ready(const Saved& s, int first) const {
  if (!s.ready || !*s.ready) return;
  const MoeBlock* const waits = s.delayed ? s.delayed->block : nullptr;
  (*s.ready)(waits ? std::max(first, first_of(waits->layer() + 1)) : first);
}

void Transformer::attention_backward(Saved& s) const {
  tell_ready(s, layers_[s.layer].first_of_ffn);
  if (frozen_.reaches(attention_block(s.layer))) {
    layers_[s.layer].attention.backward(s.pass, s.layers[s.layer].x_TD, s.attention, s.d_TD);
  }
  s.pass.arena.release(s.temporaries);
  tell_ready(s, layers_[s.layer].first);
}

bool Transformer::go_backward(Saved& s) const {
  for (; s.layer >= 0 && frozen_.reaches(ffn_block(s.layer)); --s.layer) {
    const TraceSpan span(TraceLane::kHost, "layer", {{"layer", s.layer}});
    enter(s.layer, true);
    const Pass& pass = s.pass;
    const Layer& layer = layers_[s.layer];
    const LayerSaved& saved = s.layers[s.layer];
    if (s.part == 0) {
      s.temporaries = pass.arena.mark();
      s.attention = full_recompute()
                        ? layer.attention.forward(pass.again(), saved.x_TD, saved.mid_TD)
                        : saved.attention;
    }
    if (const auto* dense = std::get_if<DenseBlock>(&layer.ffn)) {
      dense->backward(pass, saved.mid_TD, saved.dense, s.d_TD);
      attention_backward(s);
      continue;
    }
    const auto& moe = std::get<MoeBlock>(layer.ffn);
    if (s.part == 0) {
      s.backward = {};
      moe.begin_backward(pass,
                         {.x_TD = saved.mid_TD,
                          .d_TD = s.d_TD,
                          .count = s.routing.loss_count(layer.moe_index),
                          .scope = s.routing.scope(),
                          .delayed = s.delayed ? &*s.delayed : nullptr},
                         saved.moe, s.backward);
    } else if (s.part == 1) {
      moe.backward_experts(pass, s.backward);
    } else {
      moe.end_backward(pass, s.backward);
      attention_backward(s);
    }
    s.part = (s.part + 1) % 3;
    if (s.part > 0) return true;
  }
  return false;
}

void Transformer::end_backward(Saved& s, const Batch& batch) const {
  if (s.delayed) MoeBlock::finish(s.pass, *s.delayed);
  enter(-1, true);
  if (embed_->trained()) embed_gradient(s.pass, batch, s.d_TD);
  tell_ready(s, 0);
}

void Transformer::backward(const Batch& batch, Stream stream, const GradientsReady& ready) {
  MOIETY_CHECK(saved_, "model: backward without a forward");
  const TraceSpan span(TraceLane::kHost, "backward");
  saved_->ready = &ready;
  begin_backward(*saved_, std::move(stream));
  while (go_backward(*saved_)) {
  }
  end_backward(*saved_, batch);
  saved_.reset();
}

void Transformer::backward_and_forward(const Batch& batch, const Batch& next, int64_t capacity,
                                       const StepSums& sums, Arena& next_arena, Stream stream) {
  if (!takes_turns() || probe_) {
    backward(batch, stream);
    return forward(next, capacity, sums, next_arena, std::move(stream));
  }
  MOIETY_CHECK(saved_, "model: backward without a forward");
  MOIETY_CHECK(&next_arena != &saved_->pass.arena, "model: two batches on the same arena");
  const auto same = [&](int i) { return next.token_BS.size(i) == batch.token_BS.size(i); };
  MOIETY_CHECK(same(0) && same(1), "model: batches that take turns are {} and {}",
               batch.token_BS.describe(), next.token_BS.describe());
  const TraceSpan span(TraceLane::kHost, "backward and forward");
  saved_->pass.exchange = exchange_;
  begin_backward(*saved_, stream);
  std::unique_ptr<Saved> ahead = begin_forward(next, capacity, next_arena, std::move(stream));
  ahead->pass.exchange = exchange_;
  for (bool back = true, on = true; back || on;) {
    if (back) back = go_backward(*saved_);
    if (on) on = go_forward(*ahead);
  }
  // A table that is both embedding and head takes the older batch's gradients first.
  end_backward(*saved_, batch);
  end_forward(*ahead, next, sums);
  ahead->pass.exchange.reset();
  saved_ = std::move(ahead);
}

void Transformer::evaluate(const Batch& batch, int64_t capacity, const StepSums& sums, Arena& arena,
                           Stream stream) {
  const TraceSpan span(TraceLane::kHost, "evaluate");
  ArenaScope all(arena);
  Pass pass = begin_pass(batch, arena, stream);
  pass.records_amax = false;
  Routing routing(config_, pass, counted(batch));
  const TensorView x_TD = pass.tensor({pass.own_tokens(), config_.d_model});
  const TensorView mid_TD = pass.tensor({pass.own_tokens(), config_.d_model});
  embed(pass, batch, x_TD);
  for (const Layer& layer : layers_) layer_passed(pass, layer, routing, x_TD, mid_TD, capacity);
  routing.count(sums, context_.world, stream);
  loss(pass, batch, x_TD, {}, false, sums);
  routing.losses(sums, stream);
}

}  // namespace moiety::model
