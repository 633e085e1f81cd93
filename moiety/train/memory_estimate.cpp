#include "moiety/train/memory_estimate.h"

#include <algorithm>
#include <array>
#include <utility>

#include "moiety/base/format.h"
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
      {"snapshot", m.snapshot}};
  if (m.gpu > 0) classes.emplace_back("GPU", m.gpu);
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

MemoryEstimate estimate_memory(const TrainConfig& o, const Grid& grid, Device device) {
  const model::Config& c = o.model;
  const DType storage = storage_dtype(o);
  const PassSizes s(o, grid, device);
  const int64_t ranks = rank_count(grid);
  std::vector<Recipe> recipes{o.precision.recipe};
  if (o.precision.switch_step > 0) recipes.push_back(o.precision.switch_recipe);
  std::vector<model::Precision> precisions;
  for (const Recipe r : recipes) precisions.push_back(precision_of_recipe(o, r));
  const KeptWeights w(c, grid, storage, precisions);
  // The elements that a rank has, those that its optimizer updates, those of them that are sums over
  // ranks, and those that are summed.
  int64_t elements = 0, owned = 0, summed = 0, terms = 0;
  const auto by_peers = [&](const KeptElements& e) {
    return std::array{std::pair(e.copied, ranks), std::pair(e.dense, int64_t{grid.dp}),
                      std::pair(e.expert, int64_t{grid.edp}),
                      std::pair(e.expert_copied, int64_t{grid.egtp} * grid.edp)};
  };
  const auto owned_of = [&](const KeptElements& e) {
    int64_t sum = 0;
    for (const auto& [n, peers] : by_peers(e)) sum += n / peers;
    return sum;
  };
  for (const auto& [n, peers] : by_peers(w.trained)) {
    elements += n;
    owned += n / peers;
    summed += peers > 1 ? n / peers : 0;
    terms += peers > 1 ? n : 0;
  }

  MemoryEstimate m;
  m.parameters = w.bytes;
  // Among the recipes of a run the one that needs more counts, by class.
  for (size_t i = 0; i < recipes.size(); ++i) {
    m.workspace = std::max(m.workspace, temporary_bytes(o, grid, s, precisions[i]));
    m.gathered = std::max(m.gathered, gathered_bytes(o, grid, recipes[i]));
  }
  // Beside main_grad there are the sums, the data received on a bf16 wire, and the data sent,
  // unless that is main_grad.
  if (o.optim.grad_dtype == DType::kBFloat16) {
    m.main_grad = 2 * elements + kFloatBytes * summed + 2 * terms;
  } else {
    m.main_grad = kFloatBytes * (elements + summed);
    if (gradient_wire(o) == DType::kBFloat16) m.main_grad += 2 * 2 * terms;
  }
  m.master = owned * kFloatBytes + byte_size(storage, owned_of(w.frozen_codes));
  m.moments = 2 * owned * (o.optim.state_dtype == DType::kFloat32 ? kFloatBytes : 2);
  m.activations = activation_bytes(o, grid, s);
  m.logits = logits_bytes(c, s);
  m.workspace = std::max<int64_t>(0, m.workspace - m.logits);
  if (c.moe_layers() > 0) {
    m.expert_parallel =
        moe::EpGroup::bytes(moe::ExpertMap(static_cast<int>(c.router.experts), grid.ep),
                            ep_limits(o, s.own), {})
            .total +
        s.lent;
  }
  // Frozen weights are widened beside the copy of the state while it is made.
  const int64_t widened = owned_of(w.frozen) * kFloatBytes;
  (s.on_gpu() ? m.pinned : m.snapshot) =
      widened + (o.checkpoint.async ? owned * kFloatBytes + m.moments + widened : 0);
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

}  // namespace moiety::train
