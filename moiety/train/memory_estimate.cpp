#include "moiety/train/memory_estimate.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <sys/resource.h>
#include <vector>

#include "apps/moiety/config/model_options.h"
#include "apps/moiety/exit_code.h"
#include "moiety/base/error.h"
#include "moiety/base/gpu.h"
#include "moiety/gemm/gemm_cuda.h"
#include "moiety/gtp/codec.h"
#include "moiety/model/step_trace.h"
#include "moiety/model/transformer.h"
#include "moiety/model/weight_layout.h"
#include "moiety/moe/prepare.h"
#include "moiety/nn/attention_cuda.h"
#include "moiety/nn/loss.h"
#include "moiety/train/cpu_peak.h"

namespace moiety::app {
namespace {

constexpr double kFirstCapacity = 1.25;  // expert_capacity.h
constexpr int64_t kFloat = 4;
// What the threads of a rank reserve of a limited address space before they hold a tensor: four
// stacks (8 MiB) with an allocator's heap each (64 MiB), and the heap that is being aligned.
constexpr int64_t kAddressesOfRank = (4 * (8 + 64) + 128) << 20;
// On a GPU: kernels that are loaded at their first launch, captured graphs, and holes between
// blocks.
constexpr int64_t kGpuReserve = int64_t{1} << 30;
// Of a token of a batch: itself, its target, and whether that counts.
constexpr int64_t kBatchToken = 4 + 4 + 1;

// Sizes of a pass on one rank, in elements unless bytes are said. Tokens: of the data rank, and own
// ones, which the residual stream, router and experts have; columns: those that tp leaves a rank.
struct PassSizes {
  PassSizes(const Options& options, const model::Config& c, const Grid& grid, Device device)
      : device(device),
        tokens(options.train.micro_batch * options.data.seq_len),
        own(tokens / grid.tp),
        tp(grid.tp),
        item(byte_size(storage_dtype(options), 1)),
        d(c.d_model),
        heads(c.heads / tp),
        qkv(c.qkv_size() / tp),
        o(heads * c.head_size()),
        dense(c.d_ffn_dense / tp),
        shared(c.shared_d_ffn / tp),
        vocab(model::vocabulary_layout(c, {0, grid.tp}).slice_rows()),
        hidden(c.activation.hidden(c.d_ffn)) {
    if (tp > 1) {
      gathered = tokens * d * item;
      staged = options.train.micro_batch > 1 ? gathered : 0;
    }
    const bool sums = options.optim.grad_dtype == "bf16" ||
                      (gradient_wire(options) == DType::kBFloat16 && grid.gtp > 1);
    if (sums) table_sum = vocab * d * kFloat;
    const auto experts = static_cast<int>(c.router.experts),
               topk = static_cast<int>(c.router.top_k);
    const int local = experts / grid.ep;
    const double factor =
        options.moe.capacity_factor == 0 ? kFirstCapacity : options.moe.capacity_factor;
    const auto dispatch = precision_of_recipe(options, options.precision.recipe).dispatch;
    capacity = factor < 0 ? moe::worst_capacity(grid.ep, own, topk, local, 1)
                          : moe::capacity_for(factor, own * grid.ep, topk, grid.ep, local, 1);
    if (dispatch) codes = gemm::row_bytes(*dispatch, capacity, d);
  }
  bool on_gpu() const { return device.type == DeviceType::kCuda; }

  Device device;
  int64_t tokens, own, tp, item, d, heads, qkv, o, dense, shared, vocab, hidden, capacity = 0;
  // Bytes of a tensor of all tokens that is gathered or summed over tp, and of the copy in which
  // several sequences change their order.
  int64_t gathered = 0, staged = 0;
  int64_t table_sum = 0;  // of a gradient of embedding or head that is summed beside a bf16 one
  int64_t codes = 0;      // of rows that came quantized
};

// What a layer's parts leave for backward, unless it makes them anew.
struct Kept {
  explicit Kept(const PassSizes& s)
      : attention(s.tokens * ((s.qkv + s.o) * s.item + s.heads * kFloat)),
        dense(s.tokens * 2 * s.dense * s.item),
        rows(s.capacity * ((s.d + s.hidden) * s.item + kFloat)),
        shared(s.tokens * 2 * s.shared * s.item) {}
  int64_t attention, dense, rows, shared;
};

// What forward leaves for backward.
int64_t activation_bytes(const model::Config& c, const Grid& grid, DType storage,
                         const PassSizes& s) {
  const int64_t moe_layers = c.moe_layers(), dense_layers = c.layers - moe_layers;
  const bool full = c.recompute == model::Recompute::kFull;
  const Kept kept(s);
  const int64_t x = s.own * s.d * s.item;
  int64_t bytes = 3 * x;  // h, the gradient, the embedding's output
  if (c.shared_d_ffn > 0) bytes += s.own * s.d * kFloat;
  if (full) {
    bytes += (1 + c.layers) * x;  // the middle of a layer, and the layers' outputs
  } else {
    bytes += c.layers * (2 * x + kept.attention) + dense_layers * kept.dense;
  }
  if (moe_layers == 0) return bytes;
  moe::PrepareArgs args;
  args.idx_TK = TensorView(nullptr, DType::kInt32, {s.own, c.router.top_k});
  args.capacity = s.capacity;
  const moe::ExpertMap map(static_cast<int>(c.router.experts), grid.ep);
  const int64_t plan = moe::plan_bytes(map, model::ep_limits(c, storage, s.own), args);
  const int64_t router = s.own * (c.router.experts + c.router.top_k) * kFloat;
  const int64_t gate = c.shared_gate ? s.own * kFloat : 0;
  const int64_t rest = c.recompute == model::Recompute::kNone ? kept.rows + kept.shared
                                                              : s.own * c.router.top_k * kFloat;
  return bytes + moe_layers * (plan + router + gate + rest);
}

// The linears of a rank that a recipe may quantize: how many layers have them, and their sizes.
struct Linears {
  enum Name { kQkv, kO, kDense1, kDense2, kFc1, kFc2, kShared1, kShared2, kCount };
  std::array<gemm::LinearSize, kCount> size;
  std::array<std::vector<int64_t>, kCount> layers;

  Linears(const model::Config& c, const Grid& grid, const PassSizes& s) {
    const int64_t local = c.router.experts / grid.ep;
    size = {{{0, s.qkv, s.d, s.tokens},
             {0, s.d, s.o, s.tokens},
             {0, 2 * s.dense, s.d, s.tokens},
             {0, s.d, s.dense, s.tokens},
             {local, s.hidden, s.d, s.capacity},
             {local, s.d, c.d_ffn, s.capacity},
             {0, 2 * s.shared, s.d, s.tokens},
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

// What a precision makes of them.
class QuantizedLinears {
 public:
  QuantizedLinears(const model::Precision& precision, const model::Config& c, const Grid& grid,
                   const PassSizes& s)
      : precision_(precision), linears_(c, grid, s), config_layers_(c.layers) {
    if (!precision_.recipe) return;
    for (gemm::LinearSize& size : linears_.size) {
      size.in_format = model::kept_format(*precision_.recipe, size.k).has_value();
    }
  }

  // Layers in which the linear is quantized.
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
  // Of the products of a linear; nothing where it is not quantized.
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
  const int64_t delta = s.on_gpu() ? s.tokens * s.heads * kFloat : 0;
  return std::max(
      {2 * qkv + o + delta, s.gathered + std::max(w1.forward, s.staged),
       qkv + s.gathered + std::max(w2.forward, s.gathered + s.staged),
       qkv + o + s.gathered + std::max({w2.input_gradient, w2.weight_gradient, s.staged}),
       qkv + s.gathered + std::max(w1.weight_gradient, s.staged),
       qkv + s.gathered + std::max(w1.input_gradient, s.gathered + s.staged)});
}

// A network of two linears, of `ffn` inner columns.
int64_t network_bytes(const PassSizes& s, int64_t ffn, const gemm::LinearBytes& w1,
                      const gemm::LinearBytes& w2) {
  const int64_t a = s.tokens * ffn * s.item;
  return std::max({a + s.gathered + std::max(w1.forward, s.staged),
                   a + s.gathered + std::max(w2.forward, s.gathered + s.staged),
                   2 * a + s.gathered + std::max({w2.input_gradient, w2.weight_gradient, s.staged}),
                   a + s.gathered + std::max(w1.weight_gradient, s.staged),
                   a + s.gathered + std::max(w1.input_gradient, s.gathered + s.staged)});
}

// The largest of what the blocks take beside that while they run, what they make anew included.
int64_t temporary_bytes(const model::Config& c, const PassSizes& s, const QuantizedLinears& q) {
  using L = Linears;
  const Kept saved(s);
  const auto anew = [&](bool made, int64_t bytes) { return made ? bytes : 0; };
  const bool full = c.recompute == model::Recompute::kFull,
             moe = c.recompute != model::Recompute::kNone;
  const int64_t layer = anew(full, saved.attention);
  const int64_t x = s.own * s.d * s.item;
  const int64_t others = attention_bytes(s, q);
  const int64_t embedding = 2 * s.gathered + s.staged + s.table_sum;
  const int64_t dense =
      x + network_bytes(s, s.dense, q.workspace(L::kDense1), q.workspace(L::kDense2)) +
      anew(full, saved.dense);
  if (c.moe_layers() == 0) return std::max(layer + std::max(others, dense), embedding);
  const gemm::LinearBytes w1 = q.workspace(L::kFc1), w2 = q.workspace(L::kFc2);
  const int64_t wide = s.item == kFloat ? 0 : s.own * s.d * kFloat;
  const int64_t widened = s.item == kFloat ? 0 : wide + c.router.experts * s.d * kFloat;
  const int64_t gradient = s.capacity * (2 * s.d + c.d_ffn) * s.item;
  const int64_t kept = x + gradient + s.capacity * kFloat;
  const int64_t hidden = s.capacity * c.d_ffn * s.item;
  const int64_t router = s.own * (c.router.experts + c.router.top_k) * kFloat;
  const bool quantized = q.count(L::kFc1) > 0;
  const bool plain = q.count(L::kFc1) < c.moe_layers();
  int64_t experts = kept + wide + widened + router + (plain ? hidden : 0);
  if (quantized) {
    const int64_t beside_weights =
        c.delay_wgrad ? x + gradient : kept + wide + s.own * c.router.top_k * kFloat;
    // The codes that came are multiplied, or quantized anew beside them.
    const int64_t fc1 = w1.forward + (q.multiplies_rows_that_came() ? 0 : s.codes);
    experts = std::max({experts, kept + hidden + std::max(w1.input_gradient, w2.input_gradient),
                        beside_weights + std::max(w1.weight_gradient, w2.weight_gradient),
                        s.capacity * s.d * s.item + hidden + std::max(fc1, s.codes + w2.forward),
                        moe ? x + gradient + fc1 : 0});
  }
  const int64_t shared = c.shared_d_ffn > 0 ? network_bytes(s, s.shared, q.workspace(L::kShared1),
                                                            q.workspace(L::kShared2)) +
                                                  anew(moe, saved.shared)
                                            : 0;
  const int64_t rows = gradient + anew(moe, saved.rows);
  const int64_t delayed = c.delay_wgrad ? rows : 0;  // through the backward pass
  return delayed +
         std::max(embedding, layer + std::max({others, c.moe_layers() < c.layers ? dense : 0,
                                               experts - gradient + rows - delayed, shared}));
}

// Of the loss: the logits of a chunk, and over tp its tokens' inputs, row statistics and gradients.
int64_t logits_bytes(const model::Config& c, const PassSizes& s) {
  const int64_t chunk = nn::loss_chunk(c.loss_chunk, s.tokens, s.vocab, s.device);
  const int64_t losses = s.tokens * kFloat + s.table_sum;
  if (s.tp == 1) return chunk * s.vocab * kFloat + losses;
  const int64_t rows = std::max<int64_t>(1, chunk / s.tp) * s.tp;
  return rows * ((s.vocab + 4) * kFloat + 3 * s.d * s.item) + losses;
}

// A weight that gtp or egtp may cut.
struct BigWeight {
  gtp::Layout layout;   // as tp cuts it
  int64_t layer = -1;   // -1: embedding, head
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

// What a rank has of the weights, the padding of its shards included.
struct KeptWeights {
  // Under the precisions of a run, one after the other; the bytes are the most of them.
  KeptWeights(const model::Config& c, const Grid& grid, DType storage,
              std::span<const model::Precision> precisions) {
    copied = c.d_model * (2 * c.layers + 1) + (c.qk_norm ? 2 * c.layers * c.head_size() : 0) +
             c.moe_layers() * c.d_model * (c.router.experts + (c.shared_gate ? 1 : 0));
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
    bytes = byte_size(storage, copied) + *std::ranges::max_element(of_precision);
  }

  static int64_t quantized_bytes(const QuantSpec& spec, int64_t rows, int64_t cols) {
    const QuantizedSizes sizes =
        quantized_sizes(spec, rows, cols, {true, spec.format == Format::kMxfp8});
    return sizes.row_data.bytes() + sizes.row_scales.bytes() + sizes.col_data.bytes() +
           sizes.col_scales.bytes();
  }

  int64_t copied = 0, dense = 0, expert = 0;  // elements
  int64_t bytes = 0;
};

int64_t control_group_limit() {
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    int64_t bytes = 0;
    if (file >> bytes && bytes > 0) return bytes;
  }
  return std::numeric_limits<int64_t>::max();
}

// The classes of the total by name.
std::vector<std::pair<const char*, int64_t>> classes_of(const MemoryEstimate& m) {
  std::vector<std::pair<const char*, int64_t>> classes{
      {"parameters", m.parameters}, {"main_grad", m.main_grad},   {"master", m.master},
      {"moments", m.moments},       {"gather slots", m.gathered}, {"activations", m.activations},
      {"EP", m.expert_parallel},    {"logits", m.logits},         {"workspace", m.workspace},
      {"snapshot", m.snapshot}};
  if (m.gpu > 0) classes.emplace_back("GPU", m.gpu);
  return classes;
}

// Slots of the plan that a step under the recipe has, by the default policy.
int64_t gathered_bytes(const Options& o, const model::Config& c, const Grid& grid,
                       std::string_view recipe) {
  if (grid.gtp == 1 && grid.egtp == 1) return 0;
  const gtp::Policy policy;
  const model::StepShape shape{.grid = grid,
                               .sequences = o.train.micro_batch,
                               .seq_len = o.data.seq_len,
                               .micro_batches = 2,  // more of them need no more
                               .storage = storage_dtype(o),
                               .wire = gradient_wire(o),
                               .mapped = true};  // else the embedding has no slots of its own
  const model::StepTrace trace =
      model::step_trace(c, precision_of_recipe(o, recipe), shape, policy);
  return gtp::plan(trace.events, trace.bundles, policy).report.bytes;
}

}  // namespace

std::vector<std::string> memory_lines(const MemoryEstimate& memory, int64_t limit) {
  std::vector<std::string> lines;
  for (const auto& [name, bytes] : classes_of(memory)) {
    if (bytes > 0) lines.push_back(text("{:<13} {}", name, bytes_text(bytes)));
  }
  lines.push_back(text("{:<13} {} of {}", "total", bytes_text(memory.total()), bytes_text(limit)));
  if (memory.pinned > 0) {
    lines.push_back(
        text("{:<13} {}, in memory of the host", "snapshot", bytes_text(memory.pinned)));
  }
  return lines;
}

MemoryEstimate estimate_memory(const Options& o, const model::Config& c, const Grid& grid,
                               Device device) {
  const DType storage = storage_dtype(o);
  const PassSizes s(o, c, grid, device);
  const int64_t ranks = rank_count(grid);
  std::vector<std::string_view> recipes{o.precision.recipe};
  if (o.precision.switch_step > 0) recipes.push_back(o.precision.switch_recipe);
  std::vector<model::Precision> precisions;
  for (const std::string_view r : recipes) precisions.push_back(precision_of_recipe(o, r));
  const KeptWeights w(c, grid, storage, precisions);
  // What a rank's optimizer updates, what of it is a sum over ranks, and what is summed.
  const int64_t owned = w.copied / ranks + w.dense / grid.dp + w.expert / grid.edp;
  const int64_t summed = (ranks > 1 ? w.copied / ranks : 0) +
                         (grid.dp > 1 ? w.dense / grid.dp : 0) +
                         (grid.edp > 1 ? w.expert / grid.edp : 0);
  const int64_t terms =
      (ranks > 1 ? w.copied : 0) + (grid.dp > 1 ? w.dense : 0) + (grid.edp > 1 ? w.expert : 0);

  MemoryEstimate m;
  m.parameters = w.bytes;
  // Of the recipes of a run the one that needs more, by class.
  for (size_t i = 0; i < recipes.size(); ++i) {
    const QuantizedLinears linears(precisions[i], c, grid, s);
    m.workspace = std::max(m.workspace, temporary_bytes(c, s, linears));
    m.gathered = std::max(m.gathered, gathered_bytes(o, c, grid, recipes[i]));
  }
  // Beside main_grad the sums; what came of a bf16 wire; and what is sent, unless that is
  // main_grad.
  if (o.optim.grad_dtype == "bf16") {
    m.main_grad = 2 * (w.copied + w.dense + w.expert) + kFloat * summed + 2 * terms;
  } else {
    m.main_grad = kFloat * (w.copied + w.dense + w.expert + summed);
    if (gradient_wire(o) == DType::kBFloat16) m.main_grad += 2 * 2 * terms;
  }
  m.master = owned * kFloat;
  m.moments = 2 * owned * (o.optim.state_dtype == "fp32" ? kFloat : 2);
  m.activations = activation_bytes(c, grid, storage, s);
  m.logits = logits_bytes(c, s);
  m.workspace = std::max<int64_t>(0, m.workspace - m.logits);
  if (c.moe_layers() > 0) {
    m.expert_parallel =
        moe::EpGroup::bytes(moe::ExpertMap(static_cast<int>(c.router.experts), grid.ep),
                            model::ep_limits(c, storage, s.own), {})
            .total;
  }
  if (o.checkpoint.async) (s.on_gpu() ? m.pinned : m.snapshot) = m.master + m.moments;
  if (s.on_gpu()) {
    const int64_t sequences = o.train.global_batch / data_ranks(grid);
    m.gpu = gemm::kCublasLtWorkspace + sequences * o.data.seq_len * kBatchToken;
    if (storage == DType::kBFloat16 && !o.data.document_mask) {
      m.gpu += nn::cudnn_workspace({.sequences = o.train.micro_batch,
                                    .length = o.data.seq_len,
                                    .heads = c.heads,
                                    .kv_heads = c.kv_heads,
                                    .head_dim = c.head_size()});
    }
  }
  return m;
}

int64_t memory_of_rank(const Launch& launch, Device device) {
  if (device.type == DeviceType::kCuda) {
    return std::max<int64_t>(0, gpu_free_memory(device.index) - kGpuReserve);
  }
  int64_t bytes = std::min(static_cast<int64_t>(machine_bytes()), control_group_limit()) /
                  launch.ranks_on_machine;
  rlimit limit{};
  for (const auto kind : {RLIMIT_AS, RLIMIT_DATA}) {
    if (::getrlimit(kind, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
    const int ranks_of_process = launch.processes ? 1 : launch.ranks;
    const int64_t free =
        static_cast<int64_t>(limit.rlim_cur) - static_cast<int64_t>(mapped_bytes());
    bytes = std::min(bytes, std::max<int64_t>(0, free / ranks_of_process - kAddressesOfRank));
  }
  return bytes;
}

std::optional<std::string> nearest_fit(const Options& options, const model::Config& model,
                                       const Grid& grid, int64_t limit, Device device) {
  const int64_t tokens = options.train.micro_batch * options.data.seq_len;
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(tokens, 256));
  using model::Recompute;
  const auto fits = [&](int64_t micro_batch, int64_t loss_chunk, bool async,
                        std::optional<Recompute> recompute = {}) {
    Options o = options;
    o.train.micro_batch = micro_batch;
    o.checkpoint.async = async;
    model::Config c = model;
    c.loss_chunk = loss_chunk;
    c.recompute = recompute.value_or(model.recompute);
    return estimate_memory(o, c, grid, device).total() <= limit;
  };
  // The snapshot of a GPU's state is not in its memory.
  const bool async = options.checkpoint.async, gpu = device.type == DeviceType::kCuda;
  if (fits(options.train.micro_batch, chunk, async)) return text("memory.loss_chunk = {}", chunk);
  if (async && !gpu && fits(options.train.micro_batch, model.loss_chunk, false)) {
    return "checkpoint.async = false";
  }
  for (const auto& [name, mode] :
       {std::pair("moe", Recompute::kMoe), std::pair("full", Recompute::kFull)}) {
    if (mode > model.recompute && fits(options.train.micro_batch, model.loss_chunk, async, mode)) {
      return text("memory.recompute = {}", name);
    }
  }
  for (int64_t micro_batch = options.train.micro_batch - 1; micro_batch >= 1; --micro_batch) {
    if (options.train.micro_batch % micro_batch != 0) continue;
    if (fits(micro_batch, model.loss_chunk, async)) {
      return text("train.micro_batch = {}", micro_batch);
    }
  }
  const int64_t short_chunk = std::min<int64_t>(chunk, options.data.seq_len);
  if (fits(1, short_chunk, false, Recompute::kFull)) {
    return text("train.micro_batch = 1, memory.recompute = full{} memory.loss_chunk = {}{}",
                gpu ? " and" : ",", short_chunk, gpu ? "" : " and checkpoint.async = false");
  }
  return std::nullopt;
}

std::string memory_report(const Options& options, const model::Config& model, const Grid& grid,
                          int64_t limit, Device device) {
  const MemoryEstimate m = estimate_memory(options, model, grid, device);
  const std::optional<std::string> change =
      nearest_fit(options, model, grid, std::min(limit, m.total() / 10 * 9), device);
  std::string classes;
  for (const auto& [name, bytes] : classes_of(m)) {
    classes += text("{}{} {}", classes.empty() ? "" : ", ", name, bytes_text(bytes));
  }
  return text("a rank needs {}: {}; it may take {}; {}", bytes_text(m.total()), classes,
              bytes_text(limit),
              change ? "the nearest change that fits: " + *change
                     : text("no batch fits: a smaller model, or {}",
                            device.type == DeviceType::kCuda ? "a GPU with more memory"
                                                             : "more ranks on other machines"));
}

void check_memory(const Options& options, const model::Config& model, const Grid& grid,
                  int64_t limit, Device device) {
  if (estimate_memory(options, model, grid, device).total() > limit) {
    fail(ErrorKind::kOutOfMemory, "out of memory before the first step");
  }
}

}  // namespace moiety::app
