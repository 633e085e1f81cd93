#include "moiety/moe/slot_maps.h"

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

}  // namespace

void make_slot_maps(const EpPlan& plan, TensorView w_TK, const SlotMaps& maps, Stream stream) {
  MOIETY_CHECK(plan.rows_RR.size(0) == 1, "{}: a plan of {} ranks, expected one", kName,
               plan.rows_RR.size(0));
  check_tensor(kName, "w_TK", w_TK, DType::kFloat32, {plan.tokens, plan.topk});
  check_tensor(kName, "source_C", maps.source_C, DType::kInt32, {plan.capacity});
  check_tensor(kName, "slot_w", maps.slot_w, DType::kFloat32, {plan.capacity});
  MOIETY_CHECK(w_TK.contiguous() && maps.source_C.contiguous() && maps.slot_w.contiguous(),
               "{}: w_TK is {}, source_C {}, slot_w {}, expected contiguous", kName,
               w_TK.describe(), maps.source_C.describe(), maps.slot_w.describe());
  if (check_devices(kName,
                    {{"plan", plan.slot_TK},
                     {"w_TK", w_TK},
                     {"source_C", maps.source_C},
                     {"slot_w", maps.slot_w}},
                    stream)) {
    if constexpr (kCudaBuilt) return make_slot_maps_cuda(plan, w_TK, maps, stream);
    fail_without_cuda(kName);
  }
  stream.run([=] { fill(plan, w_TK.data<float>(), maps); });
}

}  // namespace moiety::moe
