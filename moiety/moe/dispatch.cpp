#include "moiety/moe/dispatch.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/moe/exchange_cuda.h"
#include "moiety/moe/peers/peer_exchange.h"
#include "moiety/moe/row_movers.h"

namespace moiety::moe {

DispatchRows check_dispatch(const EpGroup& group, const EpPlan& plan, const DispatchArgs& args,
                            const Stream& stream) {
  constexpr const char* kName = "ep dispatch";
  check_plan(kName, group, plan, stream);
  check_payload_device(kName, "x", args.x_TD, stream);
  check_payload_device(kName, "rows", args.rows_CD, stream);
  check_devices(kName,
                {{"w", args.w_TK},
                 {"slot_w", args.slot_w},
                 {"sink", args.sink.amax},
                 {"source_C", args.source_C}},
                stream);
  const SourceRows x = source_rows(kName, "x", args.x_TD, plan.tokens);
  const bool weights = args.w_TK.defined();
  MOIETY_CHECK(weights == args.slot_w.defined(), "{}: w and slot_w go together", kName);
  if (weights) {
    check_tensor(kName, "w", args.w_TK, DType::kFloat32, {plan.tokens, plan.topk});
    check_tensor(kName, "slot_w", args.slot_w, DType::kFloat32, {plan.capacity});
    check_rows(kName, "w", args.w_TK, plan.tokens, plan.topk);
  }
  const ExpertRows rows =
      expert_rows(kName, "rows", args.rows_CD, args.x_TD, plan, args.slot_w, args.source_C);
  check_record(kName, group, args.x_TD, x.parts.record(plan.topk));
  if (args.sink.defined()) {
    const auto* tensor = std::get_if<TensorView>(&args.x_TD);
    MOIETY_CHECK(tensor, "{}: x is {}, whose amax is not that of its codes", kName,
                 describe(args.x_TD));
    args.sink.check(kName, tensor->dtype(), plan.rows_real.size(0));
  }
  const Signature signature{.op = OpKind::kDispatch,
                            .format = x.format,
                            .weights = weights,
                            .row_bytes = x.parts.bytes(),
                            .plan = plan.epoch};
  return {x, args.w_TK, rows, args.zero_tail, args.sink, signature};
}

void find_amax(const EpPlan& plan, const DispatchRows& d, const Stream& stream) {
  if (!d.sink.defined()) return;
  if constexpr (kCudaBuilt) {
    find_amax_cuda(plan, d, stream);
  } else {
    fail_without_cuda("ep dispatch");
  }
}

void dispatch(EpGroup& group, const EpPlan& plan, const DispatchArgs& args, Stream stream) {
  constexpr const char* kName = "ep dispatch";
  const DispatchRows d = check_dispatch(group, plan, args, stream);
  EpGroup::Impl& g = *group.impl();
  if (g.by_kernels()) {
    if (!g.peers) check_alone_on_gpu(kName, "rows", d.rows);
    if (g.peers) {
      check_staging(group, d.signature, d.rows.operand(plan.capacity));
      g.among_peers(stream,
                    [&](peers::PeerExchange& exchange) { exchange.copy_rows(plan, d, stream); });
    } else if constexpr (kCudaBuilt) {
      copy_rows_cuda(plan, d.x, args.w_TK, d.rows, args.zero_tail, stream);
    } else {
      fail_without_cuda(kName);
    }
    find_amax(plan, d, stream);
    g.count_on_gpu(stream);
    return;
  }
  issue(group, d.signature, d.rows.operand(plan.capacity), stream, [plan, d](Exchange& exchange) {
    copy_rows(exchange, plan, d.x, d.w_TK, d.rows, d.sink);
    zero_padding(plan, d.rows, d.zero_tail);
  });
}

void dispatch_backward(EpGroup& group, const EpPlan& plan, const DispatchBackwardArgs& args,
                       Stream stream) {
  constexpr const char* kName = "ep dispatch_backward";
  check_plan(kName, group, plan, stream);
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
  check_sum(group, plan, {kName, "g_rows", "gx"}, sum, stream);
  issue_sum(kName, group, plan, OpKind::kDispatchBackward, sum, stream);
}

}  // namespace moiety::moe
