#include "moiety/moe/dispatch.h"

#include <cstring>

#include "moiety/moe/exchange.h"

namespace moiety::moe {

void dispatch(EpGroup& group, const EpPlan& plan, const DispatchArgs& args, Stream stream) {
  constexpr const char* kName = "ep dispatch";
  check_plan(kName, group, plan);
  check_rows(kName, "x", args.x_TD, plan.tokens, -1);
  const DType dtype = args.x_TD.dtype();
  const int64_t model = args.x_TD.size(1);
  check_rows(kName, "rows", args.rows_CD, plan.capacity, model);
  check_tensor(kName, "rows", args.rows_CD, dtype, {-1, -1});
  const bool weights = args.w_TK.defined();
  MOIETY_CHECK(weights == args.slot_w.defined(), "{}: w and slot_w go together", kName);
  if (weights) {
    check_tensor(kName, "w", args.w_TK, DType::kFloat32, {plan.tokens, plan.topk});
    check_tensor(kName, "slot_w", args.slot_w, DType::kFloat32, {plan.capacity});
    check_rows(kName, "w", args.w_TK, plan.tokens, plan.topk);
  }
  check_record(kName, group, plan, args.x_TD, Reduction::kRank);

  const int64_t row_bytes = byte_size(dtype, model);
  const Signature signature{
      .op = OpKind::kDispatch, .dtype = dtype, .weights = weights, .row_bytes = row_bytes};
  issue(group, signature, stream, [plan, args, row_bytes](Exchange& exchange) {
    const Rows rows(args.rows_CD), slot_w(args.slot_w);
    const auto expand = [&](const std::byte* row, const float* w, const int32_t* slot_K) {
      for (int k = 0; k < plan.topk; ++k) {
        if (slot_K[k] < 0) continue;
        std::memcpy(rows[slot_K[k]], row, row_bytes);
        if (w) std::memcpy(slot_w[slot_K[k]], w + k, sizeof(float));
      }
    };
    copy_rows(exchange, plan, args.x_TD, args.w_TK, std::ref(expand));
    zero_padding(plan, args.rows_CD, args.slot_w, args.zero_tail);
  });
}

void dispatch_backward(EpGroup& group, const EpPlan& plan, const DispatchBackwardArgs& args,
                       Stream stream) {
  constexpr const char* kName = "ep dispatch_backward";
  check_plan(kName, group, plan);
  const bool weights = args.g_slot_w.defined();
  MOIETY_CHECK(weights == args.gw_TK.defined(), "{}: g_slot_w and gw go together", kName);
  if (weights) {
    check_tensor(kName, "g_slot_w", args.g_slot_w, DType::kFloat32, {plan.capacity});
    check_tensor(kName, "gw", args.gw_TK, DType::kFloat32, {plan.tokens, plan.topk});
    check_rows(kName, "gw", args.gw_TK, plan.tokens, plan.topk);
  }
  const SumArgs sum{.y_CD = args.g_rows_CD,
                    .side = args.g_slot_w,
                    .addend = args.addend,
                    .out_TD = args.gx_TD,
                    .side_TK = args.gw_TK,
                    .reduction = args.reduction};
  issue_sum(group, plan, {kName, "g_rows", "gx", OpKind::kDispatchBackward}, sum, stream);
}

}  // namespace moiety::moe
