#include "moiety/moe/prepare_dispatch.h"

#include "moiety/base/error.h"
#include "moiety/base/trace.h"
#include "moiety/moe/peers/peer_exchange.h"
#include "moiety/moe/row_movers.h"

namespace moiety::moe {
namespace {

// The two operations. The trace has prepare up to its end, though rows have been stored in it.
void run_both(Exchange& exchange, const EpPlan& plan, const PrepareArgs& args, Findings& findings,
              const DispatchRows& d) {
  const bool pushes = exchange.transport() == EpTransport::kMapped;
  const auto begin_rows = [&] {
    pushes ? exchange.begin_beside(d.signature) : exchange.begin(d.signature);
    if (exchange.failed()) return;
    push_rows(exchange, plan, d.x, d.w_TK);
  };
  {
    TraceSpan span(TraceLane::kEp, "prepare");
    exchange.begin({.op = OpKind::kPrepare});
    if (!exchange.failed()) {
      make_plan(exchange, plan, args, findings, [&] {
        if (!pushes) return;
        begin_rows();
        exchange.turn();
      });
    }
    exchange.finish();
    span.add({"bytes", exchange.sent_bytes()});
  }
  TraceSpan span(TraceLane::kEp, "dispatch");
  pushes ? exchange.turn() : begin_rows();
  if (!exchange.failed()) {
    take_rows(exchange, plan, d.x, d.w_TK, d.rows, d.sink);
    zero_padding(plan, d.rows, d.zero_tail);
  }
  exchange.finish();
  span.add({"bytes", exchange.sent_bytes()});
}

// Among GPU ranks.
EpPlan run_early(EpGroup& group, const PrepareArgs& args, const DispatchArgs& rows,
                 const TensorView& plan_memory, const Stream& stream) {
  EpGroup::Impl& g = *group.impl();
  EpPlan plan = check_prepare(group, args, plan_memory, stream);
  plan.epoch = group.epoch() + 1;
  DispatchRows d = check_dispatch(group, plan, rows, stream);
  d.signature.early = true;
  check_staging(group, d.signature, {});
  g.among_peers(stream, [&](peers::PeerExchange& exchange) {
    exchange.prepare_copy_rows(plan, args, plan.epoch, d, stream);
  });
  find_amax(plan, d, stream);
  g.count_on_gpu(stream);
  g.count_on_gpu(stream);
  return plan;
}

}  // namespace

EpPlan prepare_dispatch(EpGroup& group, const PrepareArgs& args, const DispatchArgs& rows,
                        TensorView plan_memory, Stream stream) {
  MOIETY_CHECK(group.limits().depth >= 2,
               "ep prepare_dispatch, group \"{}\": depth is 1, but rows are sent before the next "
               "epoch's credit: reserve with depth >= 2",
               group.name());
  const std::shared_ptr<EpGroup::Impl>& impl = group.impl();
  if (impl->by_kernels()) {
    if (impl->peers && impl->peers->takes_early()) {
      return run_early(group, args, rows, plan_memory, stream);
    }
    const EpPlan plan = prepare(group, args, plan_memory, stream);
    dispatch(group, plan, rows, stream);
    return plan;
  }
  EpPlan plan = check_prepare(group, args, plan_memory, stream);
  plan.epoch = group.epoch() + 1;
  DispatchRows d = check_dispatch(group, plan, rows, stream);
  d.signature.early = true;
  check_staging(group, d.signature, {});
  stream.run([impl, plan, args, d] { run_both(*impl->exchange, plan, args, impl->findings, d); });
  impl->issued += 2;
  impl->last.record(stream);
  return plan;
}

}  // namespace moiety::moe
