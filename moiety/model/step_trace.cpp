#include "moiety/model/step_trace.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "moiety/base/error.h"
#include "moiety/gtp/codec.h"
#include "moiety/gtp/embedding.h"
#include "moiety/gtp/recorder.h"
#include "moiety/model/needs.h"
#include "moiety/model/parameters.h"
#include "moiety/model/step_work.h"
#include "moiety/model/weight_layout.h"

namespace moiety::model {
namespace {

using gtp::Kind;
using gtp::Work;

// A weight as tensor parallelism cuts it (weight_layout.h).
struct Matrix {
  std::string name;
  gtp::Layout layout;
  int64_t members = 0;  // number of experts; 0: not a weight of experts
};

// A linear layer, and the work of each of its three products.
struct Linear {
  gtp::BundleId bundle = gtp::kNoBundle;
  Work product;
  bool trained = true;
};

struct Network {
  Linear fc1, fc2;
  Work activation;  // in forward
  Work dispatch;    // of experts
};

struct Layer {
  AttentionNeeds attention;
  FfnNeeds ffn;
  Linear qkv, o;
  std::optional<Network> network;  // a dense layer's, or the shared expert
  std::optional<Network> experts;
};

// The layout of the weight when gtp has cut it too.
gtp::Layout layout_of(const Matrix& m, const gtp::Codec& codec, const gtp::Grid& grid) {
  gtp::Layout layout = m.layout;
  layout.gtp_size = m.members > 0 ? grid.egtp : grid.gtp;
  layout.align = codec.align();
  layout.tp_unit = std::lcm(layout.tp_unit, codec.block());
  gtp::check_layout(m.name, layout);
  return layout;
}

gtp::BundleSpec spec_of(const Matrix& m, const gtp::Codec& codec, const gtp::Layout& layout,
                        const StepShape& step, bool trained) {
  gtp::BundleSpec spec;
  spec.name = m.name;
  spec.expert = m.members > 0;
  spec.group = spec.expert ? 1 : 0;
  spec.group_size = layout.gtp_size;
  spec.one_payload = codec.one_payload();
  spec.rows_only = !codec.quantized() || has_one_coding(codec.spec().format);
  const gtp::GatherShape shape{.codec = codec,
                               .shard_rows = layout.shard_rows(),
                               .cols = layout.slice_cols(),
                               .ranks = layout.gtp_size,
                               .members = static_cast<int>(std::max<int64_t>(m.members, 1))};
  const auto gather = [&](gtp::Views views) {
    const bool column = views == gtp::kColView && !spec.one_payload;
    spec.gather[views - 1] =
        gather_layout(shape, column ? gtp::Payload::kCol : gtp::Payload::kRow, views).transfer();
  };
  gather(gtp::kRowView);
  gather(gtp::kColView);
  if (spec.one_payload) gather(gtp::kRowView | gtp::kColView);
  if (!trained) return spec;
  const int64_t shard = byte_size(step.wire, shape.members * shape.shard_rows * shape.cols);
  const int64_t received = shard * (shape.ranks - 1);
  spec.reduce = {received, shard * shape.ranks, step.mapped ? 0 : received};
  return spec;
}

class StepWriter {
 public:
  StepWriter(const Config& c, const Precision& precision, const StepShape& shape,
             const gtp::Policy& policy)
      : c_(c), frozen_(c), precision_(precision), shape_(shape), recorder_(policy) {
    check_shape();
    tokens_ = shape.sequences * shape.seq_len;
    own_tokens_ = tokens_ / shape.grid.tp;
    make_bundles();
  }

  StepTrace write() {
    recorder_.begin();
    forward();
    const Pass on = std::exchange(pass_, Pass(1));
    backward();
    const Pass back = std::exchange(pass_, Pass(1));
    play(on, 0, on.size());
    for (int m = 1; m < shape_.micro_batches; ++m) {
      take_turns() ? play_turns(back, on) : play(back, 0, back.size());
      if (!take_turns()) play(on, 0, on.size());
    }
    play(back, 0, back.size());
    const std::span<const gtp::TraceEvent> events = recorder_.seal();
    out_.events.assign(events.begin(), events.end());
    return std::move(out_);
  }

 private:
  // A call, or more work behind the latest one.
  struct Item {
    std::optional<Kind> kind;
    std::vector<gtp::BundleId> bundles;
    Work work;
  };
  // A pass in the parts between which another one may run: its beginning, the layers up to where
  // rows have set out, and its end.
  using Pass = std::vector<std::vector<Item>>;

  void play(const Pass& pass, size_t begin, size_t end) {
    for (size_t part = begin; part < end; ++part) {
      for (const Item& item : pass[part]) {
        item.kind ? recorder_.call(*item.kind, item.bundles, item.work)
                  : recorder_.note_work(item.work);
      }
    }
  }
  void play_turns(const Pass& back, const Pass& on) {
    const size_t turns = std::max(back.size(), on.size()) - 1;
    for (size_t part = 0; part < turns; ++part) {
      for (const Pass* pass : {&back, &on}) {
        if (part + 1 < pass->size()) play(*pass, part, part + 1);
      }
    }
    for (const Pass* pass : {&back, &on}) play(*pass, pass->size() - 1, pass->size());
  }
  bool take_turns() const {
    return c_.overlap == moe::Overlap::kMicroBatch && shape_.grid.ep > 1 && c_.moe_layers() > 0;
  }
  void turn() { pass_.emplace_back(); }
  void record(Kind kind, std::span<const gtp::BundleId> bundles, Work work = {}) {
    pass_.back().push_back({kind, {bundles.begin(), bundles.end()}, work});
  }
  void note(Work work) { pass_.back().push_back({{}, {}, work}); }

  bool full() const { return c_.recompute == Recompute::kFull; }

  void check_shape() const {
    const gtp::Grid& g = shape_.grid;
    check_grid(g, g.tp * g.gtp * g.dp);
    MOIETY_CHECK(shape_.seq_len % g.tp == 0, "step_trace: tp {} must divide {} tokens", g.tp,
                 shape_.seq_len);
    MOIETY_CHECK(c_.moe_layers() == 0 || c_.router.experts % g.ep == 0,
                 "step_trace: ep {} must divide {} experts", g.ep, c_.router.experts);
  }

  // ---- Bundles, in the order of parameter_specs.
  void make_bundles() {
    const TpPlace tp{0, shape_.grid.tp};
    const Matrix embedding{"embed.weight", vocabulary_layout(c_, tp)};
    embed_ = add(embedding, {});
    choose_rows(embedding);
    for (int64_t l = 0; l < c_.layers; ++l) {
      const std::string prefix = layer_prefix(l);
      const bool quantized = l >= precision_.kept.first && l < c_.layers - precision_.kept.last;
      recipe_ = quantized ? precision_.recipe : std::nullopt;
      const auto dispatch = quantized ? precision_.dispatch : std::nullopt;
      const auto attention = precision_.attention_linears ? recipe_ : std::nullopt;
      Layer layer;
      layer.attention = attention_needs(c_, frozen_, l);
      layer.ffn = ffn_needs(c_, frozen_, l);
      layer.qkv = add({prefix + "attn.qkv.weight", qkv_layout(c_, tp)}, attention);
      layer.o = add({prefix + "attn.o.weight", o_layout(c_, tp)}, attention);
      if (!c_.is_moe(l)) {
        layer.network = add_network(prefix + "mlp.", c_.d_ffn_dense);
      } else {
        layer.experts = add_experts(prefix + "moe.experts.", dispatch);
        if (c_.shared_d_ffn > 0)
          layer.network = add_network(prefix + "moe.shared.", c_.shared_d_ffn);
      }
      layers_.push_back(std::move(layer));
    }
    head_ = c_.tie_embeddings ? embed_ : add({"head.weight", vocabulary_layout(c_, tp)}, {});
  }

  // Chooses between table and rows as the trainer's WeightGathering does.
  void choose_rows(const Matrix& table) {
    const int64_t tokens = shape_.sequences * shape_.seq_len;
    const gtp::Layout layout = layout_of(table, gtp::Codec(shape_.storage), shape_.grid);
    const auto traffic = gtp::embedding_traffic(layout, tokens, shape_.storage, shape_.wire);
    by_rows_ = shape_.mapped && traffic.smaller() == gtp::EmbeddingPath::kRows;
    if (by_rows_) {
      out_.bundles[embed_.bundle].rows = gtp::embedding_rows(layout, tokens, shape_.storage);
    }
  }

  Network add_network(const std::string& prefix, int64_t ffn) {
    const TpPlace tp{0, shape_.grid.tp};
    return {.fc1 = add({prefix + "fc1.weight", fc1_layout(c_, ffn, tp)}, recipe_),
            .fc2 = add({prefix + "fc2.weight", fc2_layout(c_, ffn, tp)}, recipe_),
            .activation = elementwise(own_tokens_ * (c_.activation.hidden(ffn) + ffn)),
            .dispatch = {}};
  }

  Network add_experts(const std::string& prefix, const std::optional<QuantSpec>& dispatch) {
    const int64_t d = c_.d_model, ffn = c_.d_ffn, hidden = c_.activation.hidden(ffn);
    const int64_t local = c_.router.experts / shape_.grid.ep;
    return {.fc1 = add({prefix + "fc1.weight", {.rows = hidden, .cols = d}, local}, recipe_),
            .fc2 = add({prefix + "fc2.weight", {.rows = d, .cols = ffn}, local}, recipe_),
            .activation = elementwise(pairs() * (hidden + ffn)),
            .dispatch = exchange(dispatch)};
  }

  Linear add(const Matrix& m, const std::optional<gemm::Recipe>& recipe) {
    std::optional<QuantSpec> format;
    if (recipe) format = kept_format(*recipe, m.layout.cols);
    const gtp::Codec codec = format ? gtp::Codec(*format) : gtp::Codec(shape_.storage);
    const gtp::Layout layout = layout_of(m, codec, shape_.grid);
    const bool trained = !frozen_(m.name);
    out_.bundles.push_back(spec_of(m, codec, layout, shape_, trained));
    return {static_cast<gtp::BundleId>(out_.bundles.size()) - 1,
            product_work(m.members > 0 ? pairs() : tokens_, layout.slice_rows(),
                         layout.slice_cols(), shape_.storage, std::max<int64_t>(m.members, 1)),
            trained};
  }

  // ---- Work.
  int64_t pairs() const { return own_tokens_ * c_.router.top_k; }
  Work elementwise(int64_t elements) const { return elementwise_work(elements, shape_.storage); }
  Work norm() const { return elementwise(2 * own_tokens_ * c_.d_model); }
  void note_head_norms() {
    if (!c_.qk_norm) return;
    note(elementwise(2 * own_tokens_ * (c_.heads + c_.kv_heads) * c_.head_size()));
  }
  Work core(int products) const {
    const int tp = shape_.grid.tp;
    return attention_work(products, tokens_, shape_.seq_len, c_.qkv_size() / tp,
                          c_.heads * c_.head_size() / tp, shape_.storage);
  }
  // The work of linears that are not cut.
  Work router() const { return small_product(c_.router.experts); }
  Work shared_gate() const { return small_product(1); }
  Work small_product(int64_t n) const {
    return product_work(own_tokens_, n, c_.d_model, shape_.storage);
  }
  Work exchange(const std::optional<QuantSpec>& format = {}) const {
    return exchange_work({.tokens = own_tokens_,
                          .d = c_.d_model,
                          .experts = c_.router.experts,
                          .top_k = c_.router.top_k,
                          .ranks = shape_.grid.ep},
                         shape_.storage, format);
  }

  // ---- Calls.
  void call(Kind kind, std::initializer_list<const Linear*> linears) {
    std::vector<gtp::BundleId> bundles;
    Work work;
    for (const Linear* l : linears) {
      bundles.push_back(l->bundle);
      work = {work.flops + l->product.flops, work.bytes + l->product.bytes};
    }
    record(kind, bundles, work);
  }
  void consume(Kind kind, const Linear& l) { call(kind, {&l}); }
  void weight_gradient(const Linear& l) {
    open_gradient(l);
    end_gradient(l);
  }
  void open_gradient(const Linear& l) {
    if (l.trained) call(Kind::kGradBuffer, {&l});
  }
  void end_gradient(const Linear& l) {
    if (l.trained) record(Kind::kGrad, std::span(&l.bundle, 1));
  }

  void forward() {
    record(by_rows_ ? Kind::kRows : Kind::kFwd, std::span(&embed_.bundle, 1), embedding());
    turn();
    for (int64_t l = 0; l < c_.layers; ++l) {
      const Layer& layer = layers_[static_cast<size_t>(l)];
      attention_forward(layer, Kind::kFwd);
      note(norm());
      if (layer.network) {
        if (layer.experts && c_.shared_gate) note(shared_gate());
        consume(Kind::kFwd, layer.network->fc1);
        note(layer.network->activation);
        consume(Kind::kFwd, layer.network->fc2);
      }
      if (layer.experts) experts_forward(*layer.experts, frozen_.reaches(ffn_block(l)));
    }
    turn();
    note(norm());
    open_gradient(head_);
    consume(Kind::kFwd, head_);
    if (head_needs(c_, frozen_).input) note(head_.product);  // the product for dx
    end_gradient(head_);
  }
  Work embedding() const { return elementwise(2 * tokens_ * c_.d_model); }

  void attention_forward(const Layer& layer, Kind kind) {
    note(norm());
    consume(kind, layer.qkv);
    note_head_norms();
    note(core(2));
    consume(kind, layer.o);
  }

  // Layers that backward does not come to run as a whole.
  void experts_forward(const Network& experts, bool in_parts) {
    if (in_parts) turn();
    call(Kind::kFwd, {&experts.fc1, &experts.fc2});
    if (in_parts) turn();
    note(router());
    note(experts.dispatch);
    note(experts.activation);
    note(exchange());
  }

  void backward() {
    if (head_needs(c_, frozen_).input) note(norm());
    turn();
    for (int64_t l = c_.layers - 1; l >= 0 && frozen_.reaches(ffn_block(l)); --l) {
      const Layer& layer = layers_[static_cast<size_t>(l)];
      if (full()) attention_forward(layer, Kind::kRecompute);
      layer.experts ? moe_backward(layer) : dense_backward(layer);
      if (frozen_.reaches(attention_block(l))) attention_backward(layer);
    }
    turn();
    delayed_gradients();
    if (!embed_.trained) return;
    record(by_rows_ ? Kind::kRowsGrad : Kind::kGradBuffer, std::span(&embed_.bundle, 1),
           embedding());
    if (!by_rows_) end_gradient(embed_);
  }

  void dense_backward(const Layer& layer) {
    const NetworkNeeds& needs = layer.ffn.network;
    if (needs.reads_input(!full())) note(norm());
    if (needs.any()) network_backward(*layer.network, needs, full());
    if (layer.ffn.input) note(norm());
  }

  void moe_backward(const Layer& layer) {
    const FfnNeeds& needs = layer.ffn;
    note(norm());
    if (layer.network && needs.network.any()) {
      network_backward(*layer.network, needs.network, c_.recompute != Recompute::kNone);
      if (c_.shared_gate && needs.gate) note(shared_gate());  // for its weight's gradient
      if (c_.shared_gate && needs.input) note(shared_gate());
    }
    turn();
    experts_backward(*layer.experts, needs);
    if (needs.input) note(norm());
  }

  void network_backward(const Network& network, const NetworkNeeds& needs, bool recompute) {
    if (recompute) consume(Kind::kRecompute, network.fc1);
    if (needs.inner) consume(Kind::kBwd, network.fc2);
    note(network.activation);
    weight_gradient(network.fc2);
    weight_gradient(network.fc1);
    if (needs.input) consume(Kind::kBwd, network.fc1);
  }

  // As in moe_block.cpp.
  struct Parts {
    bool fc2 = true, fc1 = true;
  };
  Parts at_once() const {
    if (!c_.delay_wgrad) return {};
    return {.fc2 = c_.overlap == moe::Overlap::kWgrad && shape_.grid.ep > 1, .fc1 = false};
  }
  void open_gradients(const Network& experts, Parts parts) {
    if (parts.fc2) open_gradient(experts.fc2);
    if (parts.fc1) open_gradient(experts.fc1);
  }
  void end_gradients(const Network& experts, Parts parts) {
    if (parts.fc2) end_gradient(experts.fc2);
    if (parts.fc1) end_gradient(experts.fc1);
  }
  void delayed_gradients() {
    const Network* const experts = std::exchange(delayed_, nullptr);
    if (!experts) return;
    const Parts later{.fc2 = !at_once().fc2, .fc1 = true};
    open_gradients(*experts, later);
    end_gradients(*experts, later);
  }

  void experts_backward(const Network& experts, const FfnNeeds& needs) {
    if (needs.experts) note(exchange());
    delayed_gradients();
    if (needs.experts) {
      if (c_.recompute != Recompute::kNone) {
        consume(Kind::kRecompute, experts.fc1);
        note(experts.dispatch);
      }
      open_gradients(experts, at_once());
      call(Kind::kBwd, {&experts.fc1, &experts.fc2});
    }
    turn();
    if (!needs.experts) return;
    note(experts.activation);
    if (needs.routed) {
      note(exchange());
      note(router());
      note(router());  // the product for its weight's gradient
    }
    end_gradients(experts, at_once());
    if (c_.delay_wgrad && needs.expert_weights()) delayed_ = &experts;
  }

  void attention_backward(const Layer& layer) {
    const AttentionNeeds& needs = layer.attention;
    if (!needs.core) return weight_gradient(layer.o);
    consume(Kind::kBwd, layer.o);
    weight_gradient(layer.o);
    note_head_norms();
    note(core(5));
    note_head_norms();
    if (needs.qkv) note(norm());
    weight_gradient(layer.qkv);
    if (!needs.input) return;
    consume(Kind::kBwd, layer.qkv);
    note(norm());
  }

  const Config& c_;
  const Frozen frozen_;
  const Precision& precision_;
  const StepShape& shape_;
  gtp::Recorder recorder_;
  Pass pass_ = Pass(1);
  int64_t tokens_ = 0, own_tokens_ = 0;  // own: tokens of a tp rank, between blocks
  std::optional<gemm::Recipe> recipe_;   // recipe of the layer that is being made
  Linear embed_, head_;
  bool by_rows_ = false;  // the embedding's rows move, not its table
  std::vector<Layer> layers_;
  const Network* delayed_ = nullptr;  // experts whose weight gradients wait
  StepTrace out_;
};

}  // namespace

StepTrace step_trace(const Config& config, const Precision& precision, const StepShape& shape,
                     const gtp::Policy& policy) {
  return StepWriter(config, precision, shape, policy).write();
}

}  // namespace moiety::model
