#include "moiety/moe/slot_maps.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/moe/exchange_cuda.h"

namespace moiety::moe {
namespace {

constexpr const char* kName = "slot_maps";
constexpr int64_t kGrain = 4096;

void fill(const EpPlan& plan, const float* w_TK, const SlotMaps& maps) {
  const int32_t *slot_TK = plan.slot_TK.data<int32_t>(), *slot_row = plan.slot_row.data<int32_t>();
  int32_t* source = maps.source_C.data<int32_t>();
  float* slot_w = maps.slot_w.data<float>();
  parallel_for(plan.capacity, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      if (slot_row[slot] >= 0) continue;
      source[slot] = -1;
      slot_w[slot] = 0;
    }
  });
  parallel_for(plan.tokens * plan.topk, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int32_t slot = slot_TK[pair];
      if (slot < 0) continue;
      source[slot] = static_cast<int32_t>(pair / plan.topk);
      slot_w[slot] = w_TK[pair];
    }
  });
}

template <class Index>
void sort_pairs(const ExpertRowsArgs& args) {
  const int64_t topk = args.idx_TK.size(1), pairs = args.idx_TK.numel();
  const int64_t experts = args.count_E.size(0);
  const Index* idx = args.idx_TK.data<Index>();
  const auto valid = [&](int64_t pair) { return idx[pair] >= 0 && idx[pair] < experts; };
  int64_t* count = args.count_E.data<int64_t>();
  std::fill_n(count, experts, 0);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (valid(pair)) ++count[idx[pair]];
  }
  std::vector<int64_t> next(experts + 1);
  std::inclusive_scan(count, count + experts, next.begin() + 1);
  const int64_t rows = next[experts];
  int32_t *source = args.source_R.data<int32_t>(), *row = args.row_TK.data<int32_t>();
  const float* w = args.w_TK.data<float>();
  float* slot_w = args.slot_w_R.data<float>();
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (!valid(pair)) {
      row[pair] = -1;
      continue;
    }
    const int64_t r = next[idx[pair]]++;
    row[pair] = static_cast<int32_t>(r);
    source[r] = static_cast<int32_t>(pair / topk);
    if (w) slot_w[r] = w[pair];
  }
  std::fill(source + rows, source + pairs, -1);
  if (w) std::fill(slot_w + rows, slot_w + pairs, 0.0f);
}

void fill_rows(const EpPlan& plan, int32_t* source) {
  const int64_t ranks = plan.rows_RR.size(0), k = plan.topk;
  const int32_t* slot = plan.recv_slot.data<int32_t>();
  const int32_t* to_me = plan.rows_RR.data<int32_t>() + plan.rank;
  std::fill_n(source, plan.capacity, -1);
  int32_t row = 0;
  for (int64_t s = 0; s < ranks; ++s) {
    for (int64_t j = 0; j < to_me[s * ranks]; ++j) {
      const int32_t* slot_K = slot + (s * plan.tokens_max + j) * k;
      bool alive = false;
      for (int64_t i = 0; i < k; ++i) {
        if (slot_K[i] < 0) continue;
        source[slot_K[i]] = row;
        alive = true;
      }
      row += alive;
    }
  }
}

}  // namespace

int64_t mapped_rows(int ranks, int64_t tokens_max, int64_t capacity) {
  return std::min(ranks * tokens_max, capacity);
}

void make_row_map(const EpPlan& plan, TensorView source_C, Stream stream) {
  constexpr const char* kRowMap = "row_map";
  check_tensor(kRowMap, "source_C", source_C, DType::kInt32, {plan.capacity});
  MOIETY_CHECK(source_C.contiguous(), "{}: source_C is {}, expected contiguous", kRowMap,
               source_C.describe());
  if (check_devices(kRowMap, {{"plan", plan.slot_TK}, {"source_C", source_C}}, stream)) {
    if constexpr (kCudaBuilt) return make_row_map_cuda(plan, source_C, stream);
    fail_without_cuda(kRowMap);
  }
  stream.run([=] { fill_rows(plan, source_C.data<int32_t>()); });
}

bool check_slot_maps(const EpPlan& plan, const TensorView& w_TK, const SlotMaps& maps,
                     const Stream& stream) {
  MOIETY_CHECK(plan.rows_RR.size(0) == 1, "{}: a plan of {} ranks, expected one", kName,
               plan.rows_RR.size(0));
  check_tensor(kName, "w_TK", w_TK, DType::kFloat32, {plan.tokens, plan.topk});
  check_tensor(kName, "source_C", maps.source_C, DType::kInt32, {plan.capacity});
  check_tensor(kName, "slot_w", maps.slot_w, DType::kFloat32, {plan.capacity});
  MOIETY_CHECK(w_TK.contiguous() && maps.source_C.contiguous() && maps.slot_w.contiguous(),
               "{}: w_TK is {}, source_C {}, slot_w {}, expected contiguous", kName,
               w_TK.describe(), maps.source_C.describe(), maps.slot_w.describe());
  return check_devices(kName,
                       {{"plan", plan.slot_TK},
                        {"w_TK", w_TK},
                        {"source_C", maps.source_C},
                        {"slot_w", maps.slot_w}},
                       stream);
}

void make_slot_maps(const EpPlan& plan, TensorView w_TK, const SlotMaps& maps, Stream stream) {
  if (check_slot_maps(plan, w_TK, maps, stream)) {
    if constexpr (kCudaBuilt) return make_slot_maps_cuda(plan, w_TK, maps, stream);
    fail_without_cuda(kName);
  }
  stream.run([=] { fill(plan, w_TK.data<float>(), maps); });
}

void expert_rows(const ExpertRowsArgs& args, Stream stream) {
  const char* op = "expert_rows";
  const DType index = args.idx_TK.dtype() == DType::kInt64 ? DType::kInt64 : DType::kInt32;
  check_tensor(op, "idx_TK", args.idx_TK, index, {-1, -1});
  const int64_t tokens = args.idx_TK.size(0), topk = args.idx_TK.size(1);
  MOIETY_CHECK(tokens * topk <= std::numeric_limits<int32_t>::max(),
               "{}: idx_TK is {}, more pairs than rows can be numbered", op,
               args.idx_TK.describe());
  check_tensor(op, "count_E", args.count_E, DType::kInt64, {-1});
  check_tensor(op, "source_R", args.source_R, DType::kInt32, {tokens * topk});
  check_tensor(op, "row_TK", args.row_TK, DType::kInt32, {tokens, topk});
  MOIETY_CHECK(args.w_TK.defined() == args.slot_w_R.defined(), "{}: w_TK and slot_w_R go together",
               op);
  if (args.w_TK.defined()) {
    check_tensor(op, "w_TK", args.w_TK, DType::kFloat32, {tokens, topk});
    check_tensor(op, "slot_w_R", args.slot_w_R, DType::kFloat32, {tokens * topk});
  }
  for (const TensorView* x :
       {&args.idx_TK, &args.w_TK, &args.count_E, &args.source_R, &args.row_TK, &args.slot_w_R}) {
    MOIETY_CHECK(!x->defined() || x->contiguous(), "{}: {}, expected contiguous", op,
                 x->describe());
  }
  if (check_devices(op,
                    {{"idx_TK", args.idx_TK},
                     {"w_TK", args.w_TK},
                     {"count_E", args.count_E},
                     {"source_R", args.source_R},
                     {"row_TK", args.row_TK},
                     {"slot_w_R", args.slot_w_R}},
                    stream)) {
    if constexpr (kCudaBuilt) return expert_rows_cuda(args, stream);
    fail_without_cuda(op);
  }
  stream.run([=] {
    if (index == DType::kInt64) return sort_pairs<int64_t>(args);
    sort_pairs<int32_t>(args);
  });
}

}  // namespace moiety::moe
