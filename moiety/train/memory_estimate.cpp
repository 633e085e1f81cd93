#include "moiety/train/memory_estimate.h"

#include <algorithm>
#include <utility>

#include "moiety/base/format.h"
#include "moiety/base/integer.h"
#include "moiety/gemm/gemm_cuda.h"
#include "moiety/model/step_trace.h"
#include "moiety/model/transformer.h"
#include "moiety/nn/attention_cuda.h"
#include "moiety/train/memory/pass_memory.h"
#include "moiety/train/memory/weight_memory.h"
#include "moiety/train/precision.h"
#include "moiety/train/rank_model.h"

namespace moiety::train {
namespace {

// Bytes of a token of a batch: itself, its target, and whether that counts.
constexpr int64_t kBatchToken = 4 + 4 + 1;
constexpr int64_t kPackedToken = 4 + 4;  // its position, and whether it is padding

// Bytes of the plan's slots in a step under the recipe, by the default policy.
int64_t gathered_bytes(const TrainConfig& o, const Grid& grid, Recipe recipe) {
  if (grid.gtp == 1 && grid.egtp == 1) return 0;
  const gtp::Policy policy;
  const model::StepShape shape{.grid = grid,
                               .sequences = o.train.micro_batch,
                               .seq_len = o.data.seq_len,
                               .micro_batches = 2,  // more of them need no more
                               .storage = storage_dtype(o),
                               .wire = gradient_wire(o),
                               .mapped = true};  // otherwise the embedding has no slots of its own
  const model::StepTrace trace =
      model::step_trace(o.model, precision_of_recipe(o, recipe), shape, policy);
  return gtp::plan(trace.events, trace.bundles, policy).report.bytes;
}

}  // namespace

std::vector<std::pair<const char*, int64_t>> memory_classes(const MemoryEstimate& m) {
  std::vector<std::pair<const char*, int64_t>> classes{
      {"parameters", m.parameters}, {"main_grad", m.main_grad},   {"master", m.master},
      {"moments", m.moments},       {"gather slots", m.gathered}, {"activations", m.activations},
      {"EP", m.expert_parallel},    {"logits", m.logits},         {"workspace", m.workspace},
      {"histories", m.histories},   {"snapshot", m.snapshot}};
  if (m.gpu > 0) classes.emplace_back("GPU", m.gpu);
  if (m.links > 0) classes.emplace_back("between GPUs", m.links);
  return classes;
}

std::vector<std::string> memory_lines(const MemoryEstimate& memory, int64_t limit) {
  std::vector<std::string> lines;
  for (const auto& [name, bytes] : memory_classes(memory)) {
    if (bytes > 0) lines.push_back(text("{:<13} {}", name, bytes_text(bytes)));
  }
  lines.push_back(text("{:<13} {} of {}", "total", bytes_text(memory.total()), bytes_text(limit)));
  if (memory.pinned > 0) {
    lines.push_back(
        text("{:<13} {}, in memory of the host", "snapshot", bytes_text(memory.pinned)));
  }
  return lines;
}

namespace {

// The elements that a rank has, those that its optimizer updates, those of them that are sums over
// ranks, and those that are summed.
struct Shares {
  Shares(const KeptElements& e, const Grid& grid) {
    for (const auto& [n, peers] : {std::pair<int64_t, int64_t>(e.copied, rank_count(grid)),
                                   {e.dense, grid.dp},
                                   {e.expert, grid.edp},
                                   {e.expert_copied, grid.egtp * grid.edp}}) {
      elements += n;
      owned += n / peers;
      summed += peers > 1 ? n / peers : 0;
      terms += peers > 1 ? n : 0;
    }
  }
  int64_t elements = 0, owned = 0, summed = 0, terms = 0;
};

// Beside main_grad there are the sums, the data received on a bf16 wire, and the data sent, unless
// that is main_grad.
int64_t gradient_bytes(const TrainConfig& o, const Shares& s) {
  if (o.optim.grad_dtype == DType::kBFloat16) {
    return 2 * s.elements + kFloatBytes * s.summed + 2 * s.terms;
  }
  const int64_t wire = gradient_wire(o) == DType::kBFloat16 ? 2 * 2 * s.terms : 0;
  return kFloatBytes * (s.elements + s.summed) + wire;
}

// Bytes through which ranks on GPUs reach each other's operands.
int64_t link_bytes(const TrainConfig& o, const Grid& grid, const PassSizes& s) {
  const bool mapped = o.comm.transport != comm::GpuTransport::kNccl;
  int64_t bytes = 0;
  for (const int ranks : optim::GridGroups::sizes(grid)) {
    // Gradients and weights of a domain end in the middle of a piece.
    bytes += mapped
                 ? comm::gpu_link_bytes(ranks, {.beside_compute = true}) + 2 * comm::kGpuMemoryUnit
                 : comm::nccl_link_bytes(ranks, bytes == 0);
  }
  // Operands of tensor parallelism lie where peers read them, in two halves.
  if (grid.tp > 1 && mapped) bytes += round_up(2 * s.gathered, comm::kGpuMemoryUnit);
  return bytes;
}

// What the group takes in which ranks exchange experts.
int64_t exchange_bytes(const TrainConfig& o, const Grid& grid, const moe::EpLimits& limits,
                       Device device) {
  moe::EpOptions options{.device = device};
  const bool nccl =
      device.type == DeviceType::kCuda && o.comm.transport == comm::GpuTransport::kNccl;
  if (nccl) options.transport = moe::EpTransport::kCollectives;
  const moe::ExpertMap map(static_cast<int>(o.model.router.experts), grid.ep);
  return moe::EpGroup::bytes(map, limits, options).total;
}

}  // namespace

MemoryEstimate estimate_memory(const TrainConfig& o, const Grid& grid, Device device) {
  const model::Config& c = o.model;
  const DType storage = storage_dtype(o);
  const PassSizes s(o, grid, device);
  std::vector<Recipe> recipes{o.precision.recipe};
  if (o.precision.switch_step > 0) recipes.push_back(o.precision.switch_recipe);
  std::vector<model::Precision> precisions;
  for (const Recipe r : recipes) precisions.push_back(precision_of_recipe(o, r));
  const KeptWeights w(c, grid, storage, precisions);
  const Shares trained(w.trained, grid);

  MemoryEstimate m;
  m.parameters = w.bytes;
  // Among the recipes of a run the one that needs more counts, by class.
  for (size_t i = 0; i < recipes.size(); ++i) {
    m.activations = std::max(m.activations, activation_bytes(o, grid, s, precisions[i]));
    m.workspace = std::max(m.workspace, temporary_bytes(o, grid, s, precisions[i]));
    m.gathered = std::max(m.gathered, gathered_bytes(o, grid, recipes[i]));
  }
  m.main_grad = gradient_bytes(o, trained);
  m.master = trained.owned * kFloatBytes + byte_size(storage, Shares(w.frozen_codes, grid).owned);
  m.moments = 2 * trained.owned * (o.optim.state_dtype == DType::kFloat32 ? kFloatBytes : 2);
  m.logits = logits_bytes(c, s);
  m.workspace = std::max<int64_t>(0, m.workspace - m.logits);
  // Each of two micro-batches that take turns has an arena, and rows of its own that peers reach.
  const bool turns = c.overlap == moe::Overlap::kMicroBatch && grid.ep > 1 && c.moe_layers() > 0;
  if (turns) {
    for (int64_t* bytes : {&m.activations, &m.logits, &m.workspace}) *bytes *= 2;
  }
  if (c.moe_layers() > 0) {
    m.expert_parallel =
        exchange_bytes(o, grid, ep_limits(o, s.own), device) + (turns ? 2 : 1) * s.lent;
  }
  if (has_delayed_scales(o)) {
    m.histories = model::delayed_scale_bytes(c, o.precision.amax_history);
  }
  // Frozen weights are widened beside the copy of the state while it is made.
  const int64_t widened = Shares(w.frozen, grid).owned * kFloatBytes;
  const int64_t copied = trained.owned * kFloatBytes + m.moments + widened + m.histories;
  (s.on_gpu() ? m.pinned : m.snapshot) = widened + (o.checkpoint.async ? copied : 0);
  if (s.on_gpu()) {
    m.links = link_bytes(o, grid, s);
    // What kernels know of the group of experts.
    if (grid.ep > 1 && c.moe_layers() > 0) m.expert_parallel += comm::kGpuMemoryUnit;
    const int64_t sequences = o.train.global_batch / data_ranks(grid);
    const bool packs = o.data.pack == data::Pack::kDocuments;
    m.gpu = gemm::kCublasLtWorkspace +
            sequences * o.data.seq_len * (kBatchToken + (packs ? kPackedToken : 0));
    if (storage == DType::kBFloat16 && !o.data.document_mask && !packs) {
      m.gpu += nn::cudnn_workspace({.sequences = o.train.micro_batch,
                                    .length = o.data.seq_len,
                                    .heads = c.heads,
                                    .kv_heads = c.kv_heads,
                                    .head_dim = c.head_size()});
    }
  }
  return m;
}

}  // namespace moiety::train
