#include "moiety/moe/prepare.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/moe/exchange_cuda.h"
#include "moiety/moe/peers/peer_exchange.h"

namespace moiety::moe {
namespace {

// Takes the parts of plan memory one after the other.
class Parts {
 public:
  Parts(std::byte* base, Device device) : base_(base), device_(device) {}
  // Takes room for `most` elements, of which `sizes` are used.
  TensorView take(DType dtype, int64_t most, std::initializer_list<int64_t> sizes) {
    std::byte* here = base_ ? base_ + bytes_ : nullptr;
    bytes_ += round_up(byte_size(dtype, most), 128);
    return {here, dtype, sizes, device_};
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  Device device_;
  int64_t bytes_ = 0;
};

// Lays the plan's tensors out in plan memory; `bytes` is the memory they take. Null memory only
// measures.
EpPlan lay_out(std::byte* memory, Device device, const ExpertMap& map, int rank,
               const EpLimits& limits, const PrepareArgs& args, int64_t* bytes) {
  constexpr DType kI32 = DType::kInt32, kI64 = DType::kInt64;
  const int64_t ranks = map.ranks(), experts = map.experts(), local = map.local_count(rank);
  const int64_t tokens_max = limits.tokens;
  const int64_t most = map.local_max(), blocks = ceil_div(tokens_max, kTokenBlock);
  const int64_t tokens = args.idx_TK.size(0), topk = args.idx_TK.size(1), rows = ranks * tokens_max;
  EpPlan p;
  p.rank = rank;
  p.tokens = tokens;
  p.tokens_max = tokens_max;
  p.rows_max = rows_max(limits);
  p.topk = static_cast<int>(topk);
  p.capacity = args.capacity;
  p.alignment = args.alignment;
  Parts parts(memory, device);
  p.info = parts.take(kI64, 16, {16});
  p.rows_real = parts.take(kI64, most, {local});
  p.rows_padded = parts.take(kI64, most, {local});
  p.rows_before = parts.take(kI64, most, {local});
  p.offset = parts.take(kI64, most + 1, {local + 1});
  p.count_RE = parts.take(kI32, ranks * experts, {ranks, experts});
  p.rows_RR = parts.take(kI32, ranks * ranks, {ranks, ranks});
  p.tokens_R = parts.take(kI32, ranks, {ranks});
  p.slot_TK = parts.take(kI32, tokens_max * topk, {tokens, topk});
  p.row_TR = parts.take(kI32, tokens_max * ranks, {tokens, ranks});
  const bool peers = ranks > 1;
  p.owner_TK = parts.take(kI32, peers ? tokens_max * topk : 0, {peers ? tokens : 0, topk});
  p.recv_token = parts.take(kI32, rows, {ranks, tokens_max});
  p.recv_slot = parts.take(kI32, rows * topk, {ranks, tokens_max, topk});
  p.slot_row = parts.take(kI32, args.capacity, {args.capacity});
  p.row_end_BR = parts.take(kI32, blocks * ranks, {blocks, ranks});
  p.pair_end_BE = parts.take(kI32, blocks * experts, {blocks, experts});
  *bytes = parts.bytes();
  return p;
}

void check_args(const PrepareArgs& args) {
  const TensorView& idx = args.idx_TK;
  MOIETY_CHECK(idx.defined() && idx.dims() == 2 &&
                   (idx.dtype() == DType::kInt32 || idx.dtype() == DType::kInt64),
               "ep prepare: idx is {}, expected int32 or int64 [T, K]", idx.describe());
  MOIETY_CHECK(args.alignment >= 1 && args.alignment <= INT32_MAX,
               "ep prepare: alignment {} is outside [1, {}]", args.alignment, INT32_MAX);
  MOIETY_CHECK(args.capacity >= 0 && args.capacity <= INT32_MAX,
               "ep prepare: capacity {} is outside [0, {}]", args.capacity, INT32_MAX);
  if (args.capacity_limit.defined()) {
    check_tensor("ep prepare", "capacity_limit", args.capacity_limit, DType::kInt64, {1});
  }
}

}  // namespace

int64_t plan_bytes(const ExpertMap& map, const EpLimits& limits, const PrepareArgs& args) {
  check_args(args);
  int64_t bytes = 0;
  lay_out(nullptr, {}, map, 0, limits, args, &bytes);
  return bytes;
}

EpPlan check_prepare(EpGroup& group, const PrepareArgs& args, TensorView plan_memory,
                     const Stream& stream) {
  const EpGroup::Impl& g = *group.impl();
  g.check_usable("ep prepare");
  g.check_stream("ep prepare", stream);
  check_args(args);
  check_devices(
      "ep prepare",
      {{"idx", args.idx_TK}, {"capacity_limit", args.capacity_limit}, {"plan_memory", plan_memory}},
      stream);
  const int64_t tokens = args.idx_TK.size(0), topk = args.idx_TK.size(1);
  MOIETY_CHECK(tokens <= g.limits.tokens, "ep prepare, group \"{}\": {} tokens, reserved are {}",
               group.name(), tokens, g.limits.tokens);
  MOIETY_CHECK(topk >= 1 && topk <= g.limits.topk,
               "ep prepare, group \"{}\": K={} is outside [1, {}]", group.name(), topk,
               g.limits.topk);
  const int rank = group.rank();
  int64_t bytes = 0;
  lay_out(nullptr, {}, g.map, rank, g.limits, args, &bytes);
  check_tensor("ep prepare", "plan_memory", plan_memory, DType::kUInt8, {-1});
  MOIETY_CHECK(plan_memory.size(0) >= bytes && plan_memory.contiguous() &&
                   reinterpret_cast<uintptr_t>(plan_memory.raw()) % 64 == 0,
               "ep prepare: plan_memory is {} at {}, expected {} bytes aligned to 64",
               plan_memory.describe(), plan_memory.raw(), bytes);
  return lay_out(static_cast<std::byte*>(plan_memory.raw()), g.options.device, g.map, rank,
                 g.limits, args, &bytes);
}

EpPlan prepare(EpGroup& group, const PrepareArgs& args, TensorView plan_memory, Stream stream) {
  EpPlan plan = check_prepare(group, args, plan_memory, stream);
  EpGroup::Impl& g = *group.impl();
  const bool maps = args.w_TK.defined();
  if (maps) check_slot_maps(plan, args.w_TK, args.maps, stream);
  MOIETY_CHECK(args.statistics.segments == 0 || (g.on_gpu() && !g.peers),
               "ep prepare: statistics are added in a group of one rank on a GPU alone");
  if (g.peers) {
    g.among_peers(stream, [&](peers::PeerExchange& exchange) {
      exchange.prepare(plan, args, g.issued + 1, stream);
    });
    plan.epoch = g.count_on_gpu(stream);
    return plan;
  }
  if (g.on_gpu()) {
    if constexpr (kCudaBuilt) {
      prepare_cuda(plan, args, g.issued + 1, g.gpu(), stream);
      plan.epoch = g.count_on_gpu(stream);
      return plan;
    }
    fail_without_cuda("ep prepare");
  }
  plan.epoch = issue(group, {.op = OpKind::kPrepare}, {}, stream,
                     [impl = group.impl(), plan, args](Exchange& exchange) {
                       make_plan(exchange, plan, args, impl->findings);
                     });
  if (maps) make_slot_maps(plan, args.w_TK, args.maps, stream);
  return plan;
}

int64_t worst_capacity(int ranks, int64_t tokens_max, int topk, int local_experts,
                       int64_t alignment, bool repeats) {
  const int64_t choices = repeats && local_experts > 0 ? topk : std::min(topk, local_experts);
  const int64_t rows = ranks * tokens_max * choices;
  return rows + (alignment - 1) * std::min<int64_t>(local_experts, rows);
}

int64_t capacity_for(double factor, int64_t group_tokens, int topk, int ranks, int local_experts,
                     int64_t alignment) {
  const double balanced = factor * static_cast<double>(group_tokens) * topk / ranks;
  const auto rows = static_cast<int64_t>(std::ceil(balanced)) + local_experts * (alignment - 1);
  return round_up(rows, alignment);
}

}  // namespace moiety::moe
