#include "moiety/train/memory/pass_memory.h"

#include <algorithm>
#include <array>
#include <vector>

#include "moiety/base/integer.h"
#include "moiety/gemm/quantized_linear.h"
#include "moiety/model/needs.h"
#include "moiety/model/transformer.h"
#include "moiety/model/weight_layout.h"
#include "moiety/moe/prepare.h"
#include "moiety/moe/router.h"
#include "moiety/moe/row_layout.h"
#include "moiety/moe/slot_maps.h"
#include "moiety/nn/loss.h"
#include "moiety/train/precision.h"
#include "moiety/train/rank_model.h"

namespace moiety::train {
namespace {

constexpr double kFirstCapacity = 1.25;  // expert_capacity.h

// The tensors that a layer's parts leave for backward, unless they are computed again.
struct Kept {
  explicit Kept(const PassSizes& s)
      : attention(s.tokens * ((s.qkv + s.o) * s.item + s.heads * kFloatBytes)),
        dense(s.tokens * s.dense_hidden * s.item),
        copies(s.in_place || s.lends_rows ? 0 : s.sources * s.d * s.item),
        rows(s.capacity * (s.hidden * s.item + kFloatBytes + (s.maps ? sizeof(int32_t) : 0)) +
             copies),
        shared(s.tokens * s.shared_hidden * s.item) {}
  int64_t attention, dense;
  int64_t copies, rows;  // what copies of tokens' rows take of `rows`
  int64_t shared;
};

// Whether layers with this precision's recipe leave column codes of the rows that came, and the bytes
// of these.
struct KeptColumns {
  KeptColumns(const model::Precision& precision, const model::Config& c, const Grid& grid,
              const PassSizes& s)
      : layers(precision.kept), all(c.layers) {
    if (!precision.recipe || s.in_place || s.lends_rows) return;
    const int64_t local = c.router.experts / grid.ep;
    const QuantSpec& format = precision.recipe->input;
    any = moe::keeps_columns(format, s.capacity, s.d, local, s.sources);
    if (any) bytes = gemm::column_bytes(format, s.capacity, s.d, local);
  }
  bool of(int64_t layer) const { return any && layer >= layers.first && layer < all - layers.last; }
  model::KeptLayers layers;
  int64_t all;
  bool any = false;
  int64_t bytes = 0;
};

// The kinds of blocks that backward comes to.
struct Reached {
  explicit Reached(const model::Config& c) {
    const model::Frozen frozen(c);
    for (int64_t l = 0; l < c.layers; ++l) {
      attention |= frozen.reaches(model::attention_block(l));
      if (!frozen.reaches(model::ffn_block(l))) {
        (c.is_moe(l) ? passes_moe : passes_dense) = true;
      } else if (c.is_moe(l)) {
        moe = true;
        const model::FfnNeeds needs = model::ffn_needs(c, frozen, l);
        experts_fc1 |= needs.fc1;
        experts_fc2 |= needs.fc2;
      } else {
        dense = true;
      }
    }
    embedding = !frozen("embed.weight");
  }
  bool embedding = true, attention = false, dense = false, moe = false;
  bool experts_fc1 = false, experts_fc2 = false;  // weight gradients of experts
  bool passes_dense = false, passes_moe = false;  // layers that it does not come to
  bool passes() const { return passes_dense || passes_moe; }
};

// The bytes of a MoE layer's plan, and of its router's results.
int64_t routing_bytes(const TrainConfig& config, const Grid& grid, const PassSizes& s) {
  const model::Config& c = config.model;
  moe::PrepareArgs args;
  args.idx_TK = TensorView(nullptr, DType::kInt32, {s.own, c.router.top_k});
  args.capacity = s.capacity;
  const moe::ExpertMap map(static_cast<int>(c.router.experts), grid.ep);
  return moe::plan_bytes(map, ep_limits(config, s.own), args) +
         s.own * (c.router.experts + c.router.top_k) * kFloatBytes;
}

// The linears of a rank that a recipe may quantize: the number of layers that have them, and their
// sizes.
struct Linears {
  enum Name { kQkv, kO, kDense1, kDense2, kFc1, kFc2, kShared1, kShared2, kCount };
  std::array<gemm::LinearSize, kCount> size;
  std::array<std::vector<int64_t>, kCount> layers;

  Linears(const model::Config& c, const Grid& grid, const PassSizes& s) {
    const int64_t local = c.router.experts / grid.ep;
    size = {{{0, s.qkv, s.d, s.tokens},
             {0, s.d, s.o, s.tokens},
             {0, s.dense_hidden, s.d, s.tokens},
             {0, s.d, s.dense, s.tokens},
             {.experts = local,
              .n = s.hidden,
              .k = s.d,
              .rows = s.capacity,
              .x_sources = s.maps ? s.sources : 0},
             {.experts = local,
              .n = s.d,
              .k = c.d_ffn,
              .rows = s.capacity,
              .dy_sources = s.maps ? s.sources : 0},
             {0, s.shared_hidden, s.d, s.tokens},
             {0, s.d, s.shared, s.tokens}}};
    for (int64_t l = 0; l < c.layers; ++l) {
      for (const Name n : {kQkv, kO}) layers[n].push_back(l);
      for (const Name n : {kDense1, kDense2}) {
        if (!c.is_moe(l)) layers[n].push_back(l);
      }
      for (const Name n : {kFc1, kFc2, kShared1, kShared2}) {
        if (c.is_moe(l) && size[n].n * size[n].k > 0) layers[n].push_back(l);
      }
    }
  }
};

// The same linears under a precision.
class QuantizedLinears {
 public:
  QuantizedLinears(const model::Precision& precision, const model::Config& c, const Grid& grid,
                   const PassSizes& s)
      : precision_(precision), linears_(c, grid, s), config_layers_(c.layers) {
    if (!precision_.recipe) return;
    linears_.size[Linears::kFc1].x_columns =
        c.recompute == model::Recompute::kNone && KeptColumns(precision, c, grid, s).any;
    for (gemm::LinearSize& size : linears_.size) {
      size.in_format = model::kept_format(*precision_.recipe, size.k).has_value();
    }
  }

  // The number of layers in which the linear is quantized.
  int64_t count(Linears::Name n) const {
    if (!precision_.recipe || (n <= Linears::kO && !precision_.attention_linears)) return 0;
    const model::KeptLayers& kept = precision_.kept;
    return std::count_if(linears_.layers[n].begin(), linears_.layers[n].end(), [&](int64_t l) {
      return l >= kept.first && l < config_layers_ - kept.last;
    });
  }
  bool multiplies_rows_that_came() const {
    return precision_.recipe && precision_.dispatch == precision_.recipe->input;
  }
  // The workspace of a linear's products; nothing if it is not quantized.
  gemm::LinearBytes workspace(Linears::Name n) const {
    if (count(n) == 0) return {};
    return gemm::quantized_linear_bytes(*precision_.recipe, linears_.size[n]);
  }

 private:
  model::Precision precision_;
  Linears linears_;
  int64_t config_layers_;
};

int64_t attention_bytes(const PassSizes& s, const QuantizedLinears& q) {
  const gemm::LinearBytes w1 = q.workspace(Linears::kQkv), w2 = q.workspace(Linears::kO);
  const int64_t qkv = s.tokens * s.qkv * s.item, o = s.tokens * s.o * s.item;
  const int64_t delta = s.on_gpu() ? s.tokens * s.heads * kFloatBytes : 0;
  return std::max(
      {2 * qkv + o + delta, s.gathered + std::max(w1.forward, s.staged),
       qkv + s.gathered + std::max(w2.forward, s.gathered + s.staged),
       qkv + o + s.gathered + std::max({w2.input_gradient, w2.weight_gradient, s.staged}),
       qkv + s.gathered + std::max(w1.weight_gradient, s.staged),
       qkv + s.gathered + std::max(w1.input_gradient, s.gathered + s.staged)});
}

// Whether the grouped MLP has its activation, and that one's gradient, in the workspace; on CPUs they
// are rows of the threads.
bool keeps_inner_rows(const model::Config& c, const PassSizes& s) {
  return s.on_gpu() || c.path == gemm::MlpPath::kReference;
}

// A network of two linears with `ffn` inner columns.
int64_t network_bytes(const PassSizes& s, int64_t ffn, const gemm::LinearBytes& w1,
                      const gemm::LinearBytes& w2) {
  const int64_t a = s.tokens * ffn * s.item;
  return std::max({a + s.gathered + std::max(w1.forward, s.staged),
                   a + s.gathered + std::max(w2.forward, s.gathered + s.staged),
                   2 * a + s.gathered + std::max({w2.input_gradient, w2.weight_gradient, s.staged}),
                   a + s.gathered + std::max(w1.weight_gradient, s.staged),
                   a + s.gathered + std::max(w1.input_gradient, s.gathered + s.staged)});
}

}  // namespace

PassSizes::PassSizes(const TrainConfig& config, const Grid& grid, Device device)
    : device(device),
      tokens(config.pass_tokens()),
      own(tokens / grid.tp),
      tp(grid.tp),
      item(byte_size(storage_dtype(config), 1)),
      d(config.model.d_model),
      heads(config.model.heads / tp),
      qkv(config.model.qkv_size() / tp),
      o(heads * config.model.head_size()),
      dense(config.model.d_ffn_dense / tp),
      shared(config.model.shared_d_ffn / tp),
      vocab(model::vocabulary_layout(config.model, {0, grid.tp}).slice_rows()),
      dense_hidden(config.model.activation.hidden(dense)),
      shared_hidden(config.model.activation.hidden(shared)),
      hidden(config.model.activation.hidden(config.model.d_ffn)) {
  if (tp > 1) {
    gathered = tokens * d * item;
    staged = config.train.micro_batch > 1 ? gathered : 0;
  }
  const bool sums = config.optim.grad_dtype == DType::kBFloat16 ||
                    (gradient_wire(config) == DType::kBFloat16 && grid.gtp > 1);
  if (sums) table_sum = vocab * d * kFloatBytes;
  const auto experts = static_cast<int>(config.model.router.experts),
             topk = static_cast<int>(config.model.router.top_k);
  const int local = experts / grid.ep;
  const double factor =
      config.moe.capacity_factor == 0 ? kFirstCapacity : config.moe.capacity_factor;
  const auto dispatch = precision_of_recipe(config, config.precision.recipe).dispatch;
  capacity = factor < 0 ? moe::worst_capacity(grid.ep, own, topk, local, 1)
                        : moe::capacity_for(factor, own * grid.ep, topk, grid.ep, local, 1);
  maps = moe::choose_row_layout(config.model.row_layout, grid.ep) == moe::RowLayout::kRank;
  in_place = maps && grid.ep == 1;
  sources = in_place ? own : maps ? moe::mapped_rows(grid.ep, own, capacity) : capacity;
  if (dispatch) codes = gemm::row_bytes(*dispatch, sources, d);
  const bool carried = on_gpu() && config.comm.transport == comm::GpuTransport::kNccl;
  const bool zero_copy = config.ep.zero_copy == moe::ZeroCopy::kAuto && !carried;
  if (zero_copy && grid.ep > 1 && config.model.moe_layers() > 0) {
    lent = model::lent_bytes(config.model, storage_dtype(config), capacity, dispatch.has_value());
    lends_rows = !dispatch && !maps;
    // Behind them is a word for each rank (symmetric_buffer.h).
    if (on_gpu() && lent > 0) lent = round_up(lent + 8 * grid.ep, comm::kGpuMemoryUnit);
  }
}

int64_t activation_bytes(const TrainConfig& config, const Grid& grid, const PassSizes& s,
                         const model::Precision& precision) {
  const model::Config& c = config.model;
  const model::Frozen frozen(c);
  const bool full = c.recompute == model::Recompute::kFull;
  const Kept kept(s);
  const KeptColumns columns(precision, c, grid, s);
  const int64_t x = s.own * s.d * s.item;
  int64_t bytes = 2 * x;  // h, the embedding's output
  if (model::head_needs(c, frozen).input) bytes += x;
  if (c.shared_d_ffn > 0) bytes += s.own * s.d * kFloatBytes;
  // The middle of a layer.
  if (full || Reached(c).passes()) bytes += x;
  const int64_t routing = c.moe_layers() > 0 ? routing_bytes(config, grid, s) : 0;
  const int64_t gate = c.shared_gate ? s.own * kFloatBytes : 0;
  for (int64_t l = 0; l < c.layers; ++l) {
    if (!frozen.reaches(model::ffn_block(l))) continue;
    bytes += full ? x : 2 * x;
    if (!full && frozen.reaches(model::attention_block(l))) bytes += kept.attention;
    if (!c.is_moe(l)) {
      bytes += full ? 0 : kept.dense;
      continue;
    }
    bytes += routing + gate;
    if (c.recompute != model::Recompute::kNone) {
      bytes += s.own * c.router.top_k * kFloatBytes;
    } else {
      bytes += kept.rows - kept.copies + kept.shared;
      if (model::ffn_needs(c, frozen, l).fc1) bytes += columns.of(l) ? columns.bytes : kept.copies;
    }
  }
  return bytes;
}

namespace {

// The most bytes that quantized experts take in forward beside what it keeps. Rows that leave their
// columns (`copies`, or 0) are there until these have been made, from copies in the order of experts;
// what forward multiplies by then is there no more.
int64_t forward_bytes(const PassSizes& s, int64_t outputs, int64_t products, int64_t copies,
                      int64_t rows) {
  const int64_t ordered = copies > 0 && s.maps ? rows : 0;
  return copies + std::max(outputs + products, copies > 0 ? s.codes + rows + ordered : 0);
}

// What the router's backward pass works in, without the gradient of its logits: on a CPU h and its
// weight in float32.
int64_t router_workspace(const model::Config& c, const PassSizes& s) {
  if (s.item == kFloatBytes) return 0;
  if (!s.on_gpu()) return (s.own + c.router.experts) * s.d * kFloatBytes;
  return moe::router_backward_workspace(c.router, DType::kBFloat16, s.own, s.d, s.device.type);
}

// The most bytes that a layer takes of which nothing is kept.
int64_t passed_layer_bytes(const TrainConfig& config, const Grid& grid, const PassSizes& s,
                           const QuantizedLinears& q) {
  using L = Linears;
  const model::Config& c = config.model;
  const Kept kept(s);
  const auto network = [&](int64_t hidden, int64_t ffn, L::Name fc1, L::Name fc2) {
    const int64_t a = s.tokens * ffn * s.item;
    return hidden + s.gathered +
           std::max(q.workspace(fc1).forward,
                    a + std::max(q.workspace(fc2).forward, s.gathered) + s.staged);
  };
  int64_t bytes =
      kept.attention + s.gathered +
      std::max(q.workspace(L::kQkv).forward,
               s.tokens * s.qkv * s.item + std::max(q.workspace(L::kO).forward, s.gathered)) +
      s.staged;
  const Reached reached(c);
  if (reached.passes_dense) {
    bytes = std::max(bytes, network(kept.dense, s.dense, L::kDense1, L::kDense2));
  }
  if (!reached.passes_moe) return bytes;
  const bool in_threads = !keeps_inner_rows(c, s) && q.count(L::kFc1) == 0;
  const int64_t inner = in_threads ? 0 : s.capacity * c.d_ffn * s.item,
                y = s.capacity * s.d * s.item;
  const int64_t experts =
      routing_bytes(config, grid, s) + s.own * c.router.top_k * kFloatBytes + kept.rows + y +
      inner + std::max(q.workspace(L::kFc1).forward, q.workspace(L::kFc2).forward) + s.codes;
  const int64_t shared =
      c.shared_d_ffn > 0 ? network(kept.shared, s.shared, L::kShared1, L::kShared2) : 0;
  const bool keeps_shared = c.recompute == model::Recompute::kNone;
  return std::max({bytes, experts + (keeps_shared ? kept.shared : 0), shared});
}

int64_t anew(bool made, int64_t bytes) { return made ? bytes : 0; }

// The gradients of experts' rows in a backward pass.
struct ExpertGradients {
  int64_t rows;   // of out or of h, by slots
  int64_t inner;  // of what the activation gives
  // All that there are at a time, and the part of them that delayed weight gradients read: with maps
  // those of out and h have T rows each.
  int64_t all;
};
ExpertGradients expert_gradients(const model::Config& c, const PassSizes& s,
                                 const Reached& reached) {
  ExpertGradients g{s.capacity * s.d * s.item, s.capacity * c.d_ffn * s.item, 0};
  const int64_t come = s.in_place ? 0 : c.delay_wgrad ? g.rows : s.sources * s.d * s.item;
  const int64_t map = s.maps && !s.in_place ? s.capacity * int64_t(sizeof(int32_t)) : 0;
  g.all = anew(reached.experts_fc2, g.inner) + g.rows + come + map;
  return g;
}

// The most that the backward pass of routing and experts takes, with the gradients of rows.
int64_t experts_bytes(const model::Config& c, const Grid& grid, const PassSizes& s,
                      const model::Precision& precision, const QuantizedLinears& q,
                      const Reached& reached, const ExpertGradients& g) {
  using L = Linears;
  const gemm::LinearBytes w1 = q.workspace(L::kFc1), w2 = q.workspace(L::kFc2);
  const bool moe = c.recompute != model::Recompute::kNone;
  const int64_t x = s.own * s.d * s.item;
  const int64_t wide = s.item == kFloatBytes ? 0 : s.own * s.d * kFloatBytes;
  // h as it came, where it comes quantized and experts read it by maps.
  const int64_t came = s.in_place && s.codes > 0 ? x + s.codes : 0;
  const int64_t kept = x + g.all + s.capacity * kFloatBytes;
  const int64_t router = s.own * (c.router.experts + c.router.top_k) * kFloatBytes;
  const bool plain = keeps_inner_rows(c, s) && q.count(L::kFc1) < c.moe_layers();
  const int64_t bytes = kept + wide + router_workspace(c, s) + router + anew(plain, g.inner);
  if (q.count(L::kFc1) == 0) return bytes;
  const int64_t beside_weights =
      c.delay_wgrad ? x + g.all : kept + wide + s.own * c.router.top_k * kFloatBytes;
  // The codes that came are multiplied, or quantized anew beside them.
  const int64_t beside_fc1 = s.in_place ? came : q.multiplies_rows_that_came() ? 0 : s.codes;
  const int64_t fc1 = w1.forward + beside_fc1;
  const bool leaves = !moe && reached.experts_fc1 && KeptColumns(precision, c, grid, s).any;
  const int64_t weights = std::max(anew(reached.experts_fc1, came + w1.weight_gradient),
                                   anew(reached.experts_fc2, w2.weight_gradient));
  return std::max(
      {bytes, kept + g.inner + std::max(w1.input_gradient, w2.input_gradient),
       anew(weights > 0, beside_weights + weights),
       forward_bytes(s, g.rows + g.inner, std::max(fc1, (s.in_place ? came : s.codes) + w2.forward),
                     anew(leaves, Kept(s).copies), g.rows),
       anew(moe, x + g.all + fc1)});
}

}  // namespace

int64_t temporary_bytes(const TrainConfig& config, const Grid& grid, const PassSizes& s,
                        const model::Precision& precision) {
  const model::Config& c = config.model;
  const QuantizedLinears q(precision, c, grid, s);
  using L = Linears;
  const Kept saved(s);
  const Reached reached(c);
  const bool full = c.recompute == model::Recompute::kFull,
             moe = c.recompute != model::Recompute::kNone;
  const int64_t layer = anew(full, saved.attention);
  const int64_t x = s.own * s.d * s.item;
  const int64_t others = anew(reached.attention, attention_bytes(s, q));
  const int64_t dense =
      anew(reached.dense,
           x + network_bytes(s, s.dense, q.workspace(L::kDense1), q.workspace(L::kDense2)) +
               anew(full, saved.dense));
  int64_t outside = anew(reached.embedding, 2 * s.gathered + s.staged + s.table_sum);
  if (reached.passes()) {
    const int64_t beside = 3 * x + (c.shared_d_ffn > 0 ? s.own * s.d * kFloatBytes : 0);
    outside = std::max(outside, passed_layer_bytes(config, grid, s, q) + beside -
                                    activation_bytes(config, grid, s, precision));
  }
  if (!reached.moe) return std::max(layer + std::max(others, dense), outside);
  const ExpertGradients g = expert_gradients(c, s, reached);
  const int64_t experts = experts_bytes(c, grid, s, precision, q, reached, g);
  const bool beside = c.overlap == moe::Overlap::kShared && grid.ep > 1 && !c.delay_wgrad;
  const int64_t shared = c.shared_d_ffn > 0 ? network_bytes(s, s.shared, q.workspace(L::kShared1),
                                                            q.workspace(L::kShared2)) +
                                                  anew(moe, saved.shared) + anew(beside, x + g.all)
                                            : 0;
  const int64_t rows = g.all + anew(moe, saved.rows);
  // Kept through the backward pass; of it what `experts` counts too.
  const int64_t counted = c.delay_wgrad ? (s.in_place ? rows - g.rows : rows) : 0;
  const int64_t delayed = counted + (c.delay_wgrad && s.in_place ? 2 * x : 0);
  return delayed + std::max(outside, layer + std::max({others, dense,
                                                       experts - g.all + rows - counted, shared}));
}

int64_t logits_bytes(const model::Config& c, const PassSizes& s) {
  const int64_t chunk = nn::loss_chunk(c.loss_chunk, s.tokens, s.vocab, s.device);
  const int64_t losses = s.tokens * kFloatBytes + s.table_sum;
  if (s.tp == 1) return chunk * s.vocab * kFloatBytes + losses;
  const int64_t rows = std::max<int64_t>(1, chunk / s.tp) * s.tp;
  return rows * ((s.vocab + 4 + 3 * s.tp) * kFloatBytes + 3 * s.d * s.item) + losses;
}

}  // namespace moiety::train
