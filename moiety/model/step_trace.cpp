#include "moiety/model/step_trace.h"

#include <initializer_list>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "moiety/base/error.h"
#include "moiety/gtp/codec.h"
#include "moiety/gtp/recorder.h"
#include "moiety/model/parameters.h"

namespace moiety::model {
namespace {

using gtp::Kind;
using gtp::Work;

// A weight W[rows, cols] and how it is cut.
struct Matrix {
  std::string name;
  int64_t rows, cols;
  int tp_axis = -1;
  int64_t unit = 1;     // of rows or columns that tp keeps together
  int64_t members = 0;  // experts; 0: not a weight of experts
  bool vocabulary = false;
};

// A linear, and the work of any of its three products.
struct Linear {
  gtp::BundleId bundle = gtp::kNoBundle;
  Work product;
};

struct Network {
  Linear fc1, fc2;
  Work activation;  // forward
};

struct Layer {
  Linear qkv, o;
  std::optional<Network> network;  // of a dense layer, or the shared expert
  std::optional<Network> experts;
};

gtp::Layout layout_of(const Matrix& m, const gtp::Codec& codec, const gtp::Grid& grid) {
  gtp::Layout layout;
  layout.rows = m.rows;
  layout.cols = m.cols;
  layout.tp_axis = m.tp_axis;
  layout.tp_size = m.members > 0 ? 1 : grid.tp;
  layout.gtp_size = m.members > 0 ? grid.egtp : grid.gtp;
  layout.align = codec.align();
  layout.tp_unit = std::lcm(m.unit, codec.block());
  layout.vocabulary = m.vocabulary;
  gtp::check_layout(m.name, layout);
  return layout;
}

gtp::BundleSpec spec_of(const Matrix& m, const gtp::Codec& codec, const gtp::Layout& layout,
                        int64_t grad_bytes) {
  gtp::BundleSpec spec;
  spec.name = m.name;
  spec.expert = m.members > 0;
  spec.group = spec.expert ? 1 : 0;
  spec.group_size = layout.gtp_size;
  spec.one_payload = codec.one_payload();
  spec.rows_only = !codec.quantized() || is_tile(codec.spec().format);
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
  const int64_t shard = shape.members * shape.shard_rows * shape.cols * grad_bytes;
  const int64_t received = shard * (shape.ranks - 1);
  spec.reduce = {received, shard * shape.ranks, received};
  return spec;
}

// Ranks other than its own that a token goes to, if all choices of experts are equally likely.
double remote_ranks(const Config& c, int ep) {
  const auto experts = static_cast<double>(c.router.experts);
  double missed = 1;  // a given rank's experts are not chosen
  for (int64_t k = 0; k < c.router.top_k; ++k) {
    missed *= std::max(0.0, experts - experts / ep - double(k)) / (experts - double(k));
  }
  return (ep - 1) * (1 - missed);
}

class StepWriter {
 public:
  StepWriter(const Config& c, const Precision& precision, const StepShape& shape,
             const gtp::Policy& policy)
      : c_(c), precision_(precision), shape_(shape), policy_(policy), recorder_(policy) {
    check_shape();
    tokens_ = double(shape.sequences * shape.seq_len);
    own_tokens_ = tokens_ / shape.grid.tp;
    item_ = double(byte_size(shape.storage, 1));
    make_bundles();
  }

  StepTrace write() {
    recorder_.begin();
    for (int m = 0; m < shape_.micro_batches; ++m) {
      forward();
      backward();
    }
    const std::span<const gtp::TraceEvent> events = recorder_.seal();
    out_.events.assign(events.begin(), events.end());
    return std::move(out_);
  }

 private:
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
    const int64_t d = c_.d_model, heads = c_.heads * c_.head_size();
    embed_ =
        add({.name = "embed.weight", .rows = c_.vocab, .cols = d, .tp_axis = 0, .vocabulary = true},
            {});
    const int64_t local = c_.router.experts / shape_.grid.ep;
    for (int64_t l = 0; l < c_.layers; ++l) {
      const std::string prefix = layer_prefix(l);
      const bool quantized = l >= precision_.kept.first && l < c_.layers - precision_.kept.last;
      recipe_ = quantized ? precision_.recipe : std::nullopt;
      const auto attention = precision_.attention_linears ? recipe_ : std::nullopt;
      Layer layer;
      layer.qkv = add({.name = prefix + "attn.qkv.weight",
                       .rows = c_.qkv_size(),
                       .cols = d,
                       .tp_axis = 0,
                       .unit = c_.qkv_size() / c_.kv_heads},
                      attention);
      layer.o = add({.name = prefix + "attn.o.weight",
                     .rows = d,
                     .cols = heads,
                     .tp_axis = 1,
                     .unit = heads / c_.kv_heads},
                    attention);
      if (!c_.is_moe(l)) {
        layer.network = add_network(prefix + "mlp.", 2 * c_.d_ffn_dense, c_.d_ffn_dense, 0);
      } else {
        layer.experts =
            add_network(prefix + "moe.experts.", c_.activation.hidden(c_.d_ffn), c_.d_ffn, local);
        if (c_.shared_d_ffn > 0) {
          layer.network =
              add_network(prefix + "moe.shared.", 2 * c_.shared_d_ffn, c_.shared_d_ffn, 0);
        }
      }
      layers_.push_back(std::move(layer));
    }
    head_ = c_.tie_embeddings ? embed_
                              : add({.name = "head.weight",
                                     .rows = c_.vocab,
                                     .cols = d,
                                     .tp_axis = 0,
                                     .vocabulary = true},
                                    {});
  }

  Network add_network(const std::string& prefix, int64_t hidden, int64_t ffn, int64_t members) {
    const int64_t d = c_.d_model;
    Network n;
    n.fc1 = add({.name = prefix + "fc1.weight",
                 .rows = hidden,
                 .cols = d,
                 .tp_axis = members > 0 ? -1 : 0,
                 .members = members},
                recipe_);
    n.fc2 = add({.name = prefix + "fc2.weight",
                 .rows = d,
                 .cols = ffn,
                 .tp_axis = members > 0 ? -1 : 1,
                 .members = members},
                recipe_);
    const double rows = members > 0 ? pairs() : own_tokens_;
    n.activation = elementwise(rows * double(hidden + ffn));
    return n;
  }

  Linear add(const Matrix& m, const std::optional<gemm::Recipe>& recipe) {
    std::optional<QuantSpec> format;
    if (recipe) format = kept_format(*recipe, m.cols);
    const gtp::Codec codec = format ? gtp::Codec(*format) : gtp::Codec(shape_.storage);
    const gtp::Layout layout = layout_of(m, codec, shape_.grid);
    out_.bundles.push_back(spec_of(m, codec, layout, shape_.grad_bytes));
    const double rows = m.members > 0 ? pairs() : tokens_;
    const auto n = double(layout.slice_rows()), k = double(layout.slice_cols());
    const double weights = n * k * double(std::max<int64_t>(m.members, 1));
    return {static_cast<gtp::BundleId>(out_.bundles.size()) - 1,
            {2 * rows * n * k, item_ * (rows * (n + k) + weights)}};
  }

  // ---- Work.
  double pairs() const { return own_tokens_ * double(c_.router.top_k); }
  Work elementwise(double elements) const { return {0, elements * item_}; }
  Work norm() const { return elementwise(2 * own_tokens_ * double(c_.d_model)); }
  // The causal half of the scores, q k^T and p v.
  Work core(double products) const {
    const double heads = double(c_.heads * c_.head_size()) / shape_.grid.tp;
    return {products * tokens_ * double(shape_.seq_len) * heads,
            item_ * tokens_ * (double(c_.qkv_size()) / shape_.grid.tp + heads)};
  }
  Work router() const { return {2 * own_tokens_ * double(c_.d_model * c_.router.experts), 0}; }
  // Rows to or from the ranks of their experts: in time what the link takes for the remote ones.
  Work exchange(double row_bytes) const {
    const double link = remote_ranks(c_, shape_.grid.ep) * own_tokens_ * row_bytes;
    return {0, pairs() * row_bytes + link * policy_.memory_bytes_per_ns / policy_.bytes_per_ns};
  }
  Work exchange() const { return exchange(item_ * double(c_.d_model)); }
  Work dispatch() const {
    if (!precision_.dispatch) return exchange();
    const QuantizedSizes row = quantized_sizes(*precision_.dispatch, 1, c_.d_model, {true, false});
    return exchange(double(row.row_data.bytes() + row.row_scales.bytes()));
  }
  void note(Work work) { recorder_.note_work(work); }

  // ---- Calls.
  void call(Kind kind, std::initializer_list<const Linear*> linears) {
    std::vector<gtp::BundleId> bundles;
    Work work;
    for (const Linear* l : linears) {
      bundles.push_back(l->bundle);
      work = {work.flops + l->product.flops, work.bytes + l->product.bytes};
    }
    recorder_.call(kind, bundles, work);
  }
  void consume(Kind kind, const Linear& l) { call(kind, {&l}); }
  void weight_gradient(const Linear& l) {
    call(Kind::kGradBuffer, {&l});
    end_gradient(l);
  }
  void end_gradient(const Linear& l) { recorder_.call(Kind::kGrad, std::span(&l.bundle, 1)); }

  void forward() {
    recorder_.call(Kind::kFwd, std::span(&embed_.bundle, 1), embedding());
    for (const Layer& layer : layers_) {
      attention_forward(layer, Kind::kFwd);
      note(norm());
      if (layer.network) {
        consume(Kind::kFwd, layer.network->fc1);
        note(layer.network->activation);
        consume(Kind::kFwd, layer.network->fc2);
      }
      if (layer.experts) experts_forward(*layer.experts);
    }
    note(norm());
    call(Kind::kGradBuffer, {&head_});
    consume(Kind::kFwd, head_);
    note(head_.product);  // dx
    end_gradient(head_);
  }
  Work embedding() const { return elementwise(2 * tokens_ * double(c_.d_model)); }

  void attention_forward(const Layer& layer, Kind kind) {
    note(norm());
    consume(kind, layer.qkv);
    note(core(2));
    consume(kind, layer.o);
  }

  void experts_forward(const Network& experts) {
    note(router());
    note(dispatch());
    call(Kind::kFwd, {&experts.fc1, &experts.fc2});
    note(experts.activation);
    note(exchange());
  }

  void backward() {
    note(norm());
    for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
      if (full()) attention_forward(*layer, Kind::kRecompute);
      note(norm());
      if (layer->network) {
        const bool shared = layer->experts.has_value();
        network_backward(*layer->network, shared ? c_.recompute != Recompute::kNone : full());
      }
      if (layer->experts) experts_backward(*layer->experts);
      attention_backward(*layer);
    }
    delayed_gradients();
    recorder_.call(Kind::kGradBuffer, std::span(&embed_.bundle, 1), embedding());
    recorder_.call(Kind::kGrad, std::span(&embed_.bundle, 1));
  }

  void network_backward(const Network& network, bool recompute) {
    if (recompute) consume(Kind::kRecompute, network.fc1);
    consume(Kind::kBwd, network.fc2);
    note(network.activation);
    weight_gradient(network.fc2);
    weight_gradient(network.fc1);
    consume(Kind::kBwd, network.fc1);
  }

  void open_gradients(const Network& experts) {
    call(Kind::kGradBuffer, {&experts.fc2});
    call(Kind::kGradBuffer, {&experts.fc1});
  }
  void end_gradients(const Network& experts) {
    end_gradient(experts.fc2);
    end_gradient(experts.fc1);
  }
  void delayed_gradients() {
    const Network* const experts = std::exchange(delayed_, nullptr);
    if (!experts) return;
    open_gradients(*experts);
    end_gradients(*experts);
  }

  void experts_backward(const Network& experts) {
    note(exchange());
    delayed_gradients();
    if (c_.recompute != Recompute::kNone) {
      note(dispatch());
      consume(Kind::kRecompute, experts.fc1);
    }
    if (!c_.delay_wgrad) open_gradients(experts);
    call(Kind::kBwd, {&experts.fc1, &experts.fc2});
    note(experts.activation);
    note(exchange());
    c_.delay_wgrad ? void(delayed_ = &experts) : end_gradients(experts);
    note(router());
    note(router());  // of its weight
  }

  void attention_backward(const Layer& layer) {
    note(norm());
    consume(Kind::kBwd, layer.o);
    weight_gradient(layer.o);
    note(core(5));
    note(norm());
    weight_gradient(layer.qkv);
    consume(Kind::kBwd, layer.qkv);
    note(norm());
  }

  const Config& c_;
  const Precision& precision_;
  const StepShape& shape_;
  const gtp::Policy& policy_;
  gtp::Recorder recorder_;
  double tokens_ = 0, own_tokens_ = 0, item_ = 0;  // own: of a tp rank, between blocks
  std::optional<gemm::Recipe> recipe_;             // of the layer that is made
  Linear embed_, head_;
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
