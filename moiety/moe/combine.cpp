#include "moiety/moe/combine.h"

#include <cstring>

#include "moiety/moe/exchange.h"

namespace moiety::moe {

void combine(EpGroup& group, const EpPlan& plan, const CombineArgs& args, Stream stream) {
  constexpr const char* kName = "ep combine";
  check_plan(kName, group, plan);
  if (args.slot_w.defined()) {
    check_tensor(kName, "slot_w", args.slot_w, DType::kFloat32, {plan.capacity});
  }
  const SumArgs sum{.y_CD = args.y_CD,
                    .slot_w = args.slot_w,
                    .addend = args.addend,
                    .out_TD = args.out_TD,
                    .reduction = args.reduction};
  issue_sum(group, plan, {kName, "y", "out", OpKind::kCombine}, sum, stream);
}

void combine_backward(EpGroup& group, const EpPlan& plan, const CombineBackwardArgs& args,
                      Stream stream) {
  constexpr const char* kName = "ep combine_backward";
  check_plan(kName, group, plan);
  check_rows(kName, "g", args.g_TD, plan.tokens, -1);
  const DType dtype = args.g_TD.dtype();
  const int64_t model = args.g_TD.size(1);
  const auto check_expert_rows = [&](const char* argument, const TensorView& x) {
    check_rows(kName, argument, x, plan.capacity, model);
    check_tensor(kName, argument, x, dtype, {-1, -1});
  };
  check_expert_rows("gy", args.gy_CD);
  const bool weights = args.slot_w.defined(), dots = args.y_CD.defined();
  MOIETY_CHECK(weights || !dots, "{}: y is given without slot_w", kName);
  MOIETY_CHECK(dots == args.g_slot_w.defined(), "{}: y and g_slot_w go together", kName);
  if (weights) check_tensor(kName, "slot_w", args.slot_w, DType::kFloat32, {plan.capacity});
  if (dots) {
    check_expert_rows("y", args.y_CD);
    check_tensor(kName, "g_slot_w", args.g_slot_w, DType::kFloat32, {plan.capacity});
  }
  check_record(kName, group, plan, args.g_TD, Reduction::kRank);

  const int64_t row_bytes = byte_size(dtype, model);
  const Signature signature{
      .op = OpKind::kCombineBackward, .dtype = dtype, .weights = weights, .row_bytes = row_bytes};
  issue(group, signature, stream, [=](Exchange& exchange) {
    const Rows gy(args.gy_CD), y(args.y_CD), slot_w(args.slot_w), g_slot_w(args.g_slot_w);
    const auto expand = [&](const std::byte* g, const float*, const int32_t* slot_K) {
      for (int k = 0; k < plan.topk; ++k) {
        const int32_t slot = slot_K[k];
        if (slot < 0) continue;
        if (dots) *g_slot_w.as<float>(slot) = dot_row(dtype, y[slot], g, model);
        if (weights) {
          scale_row(dtype, *slot_w.as<float>(slot), g, gy[slot], model);
        } else {
          std::memcpy(gy[slot], g, row_bytes);
        }
      }
    };
    copy_rows(exchange, plan, args.g_TD, {}, std::ref(expand));
    zero_padding(plan, args.gy_CD, args.g_slot_w, false);
  });
}

}  // namespace moiety::moe
