#include "moiety/moe/combine.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/moe/exchange_cuda.h"
#include "moiety/moe/peers/peer_exchange.h"
#include "moiety/moe/row_movers.h"

namespace moiety::moe {
namespace {

void check_sum_record(const char* operation, const EpGroup& group, const EpPlan& plan,
                      const TensorView& rows, Reduction reduction) {
  const int64_t model = rows.size(1), data = byte_size(rows.dtype(), model);
  if (reduction != Reduction::kToken) {
    const int64_t wire = reduction == Reduction::kRankFp32 ? 4 * model : data;
    return check_record(operation, group, rows, RowParts{wire}.record(plan.topk));
  }
  const int64_t have = group.impl()->bytes().pair;
  MOIETY_CHECK(pair_record_bytes(data) <= have,
               "{}, group \"{}\": kToken of {} needs {} bytes a pair, reserved are {} (EpLimits "
               "token_order, model, widest)",
               operation, group.name(), rows.describe(), pair_record_bytes(data), have);
}

}  // namespace

void check_sum(const EpGroup& group, const EpPlan& plan, const SumNames& names, const SumArgs& args,
               const Stream& stream) {
  const char* op = names.operation;
  check_devices(op,
                {{names.y, args.y_CD},
                 {names.out, args.out_TD},
                 {"addend", args.addend},
                 {"slot_w", args.slot_w},
                 {"g_slot_w", args.side},
                 {"gw", args.side_TK}},
                stream);
  check_rows(op, names.y, args.y_CD, plan.capacity, -1);
  const DType dtype = args.y_CD.dtype();
  const int64_t model = args.y_CD.size(1);
  const auto check_home = [&](const char* argument, const TensorView& x) {
    check_rows(op, argument, x, plan.tokens, model);
    MOIETY_CHECK(x.dtype() == dtype || x.dtype() == DType::kFloat32,
                 "{}: {} is {}, {} is {}; float32 or the same type is expected", op, argument,
                 x.describe(), names.y, args.y_CD.describe());
  };
  check_home(names.out, args.out_TD);
  if (args.addend.defined()) check_home("addend", args.addend);
  check_sum_record(op, group, plan, args.y_CD, args.reduction);
}

namespace {

// What ranks must agree in.
Signature sum_signature(OpKind kind, const EpPlan& plan, const SumArgs& args) {
  const DType dtype = args.y_CD.dtype();
  return {.op = kind,
          .format = payload_format(dtype),
          .weights = args.slot_w.defined() || args.side.defined(),
          .reduction = args.reduction,
          .row_bytes = byte_size(dtype, args.y_CD.size(1)),
          .plan = plan.epoch};
}

// Checks the weights of combine_backward's slots, and what goes with their gradients.
void check_weights(const char* operation, const EpPlan& plan, const CombineBackwardArgs& args,
                   const SourceRows& g) {
  const bool weights = args.slot_w.defined(), dots = args.y_CD.defined();
  MOIETY_CHECK(weights || !dots, "{}: y is given without slot_w", operation);
  MOIETY_CHECK(dots == args.g_slot_w.defined(), "{}: y and g_slot_w go together", operation);
  MOIETY_CHECK(!weights || !args.source_C.defined(),
               "{}: rows by a map have no weight each, so slot_w is none", operation);
  if (weights && g.quantized()) {
    fail(ErrorKind::kUnsupported,
         "{}: g is {}, which slot_w cannot scale: rows are not requantized", operation,
         describe(args.g_TD));
  }
  if (weights) check_tensor(operation, "slot_w", args.slot_w, DType::kFloat32, {plan.capacity});
  if (dots) {
    check_rows(operation, "y", args.y_CD, plan.capacity, g.model);
    check_tensor(operation, "y", args.y_CD, std::get<TensorView>(args.g_TD).dtype(), {-1, -1});
    check_tensor(operation, "g_slot_w", args.g_slot_w, DType::kFloat32, {plan.capacity});
  }
}

}  // namespace

Operand operand_of(const SumArgs& sum) {
  const Rows y(sum.y_CD);
  const int64_t bytes = byte_size(sum.y_CD.dtype(), sum.y_CD.size(1));
  return {y[0], sum.y_CD.size(0), y.stride(), bytes};
}

void issue_sum(const char* operation, EpGroup& group, const EpPlan& plan, OpKind kind,
               const SumArgs& sum, const Stream& stream) {
  const Signature signature = sum_signature(kind, plan, sum);
  EpGroup::Impl& g = *group.impl();
  if (!g.by_kernels()) {
    issue(group, signature, operand_of(sum), stream,
          [plan, sum](Exchange& exchange) { sum_rows(exchange, plan, sum); });
    return;
  }
  if (g.peers) {
    check_staging(group, signature, operand_of(sum));
    g.among_peers(stream, [&](peers::PeerExchange& exchange) {
      exchange.sum_rows(plan, sum, signature, stream);
    });
  } else if constexpr (kCudaBuilt) {
    sum_rows_cuda(plan, sum, stream);
  } else {
    fail_without_cuda(operation);
  }
  g.count_on_gpu(stream);
}

void combine(EpGroup& group, const EpPlan& plan, const CombineArgs& args, Stream stream) {
  constexpr const char* kName = "ep combine";
  check_plan(kName, group, plan, stream);
  if (args.slot_w.defined()) {
    check_tensor(kName, "slot_w", args.slot_w, DType::kFloat32, {plan.capacity});
  }
  const SumArgs sum{.y_CD = args.y_CD,
                    .slot_w = args.slot_w,
                    .addend = args.addend,
                    .out_TD = args.out_TD,
                    .reduction = args.reduction};
  check_sum(group, plan, {kName, "y", "out"}, sum, stream);
  issue_sum(kName, group, plan, OpKind::kCombine, sum, stream);
}

void combine_backward(EpGroup& group, const EpPlan& plan, const CombineBackwardArgs& args,
                      Stream stream) {
  constexpr const char* kName = "ep combine_backward";
  check_plan(kName, group, plan, stream);
  check_payload_device(kName, "g", args.g_TD, stream);
  check_payload_device(kName, "gy", args.gy_CD, stream);
  check_devices(kName,
                {{"slot_w", args.slot_w},
                 {"y", args.y_CD},
                 {"g_slot_w", args.g_slot_w},
                 {"source_C", args.source_C}},
                stream);
  const SourceRows g = source_rows(kName, "g", args.g_TD, plan.tokens);
  const bool weights = args.slot_w.defined();
  check_weights(kName, plan, args, g);
  const ExpertRows gy =
      expert_rows(kName, "gy", args.gy_CD, args.g_TD, plan, args.g_slot_w, args.source_C);
  check_record(kName, group, args.g_TD, g.parts.record(plan.topk));

  const Signature signature{.op = OpKind::kCombineBackward,
                            .format = g.format,
                            .weights = weights,
                            .row_bytes = g.parts.bytes(),
                            .plan = plan.epoch};
  const DispatchRows copied{g, {}, gy, false, {}, signature};
  const ScaledRows scaled{weights ? std::get<TensorView>(args.g_TD).dtype() : DType::kFloat32, g,
                          args.slot_w, args.y_CD, gy};
  EpGroup::Impl& impl = *group.impl();
  if (impl.by_kernels()) {
    if (!impl.peers) check_alone_on_gpu(kName, "gy", gy);
    if (impl.peers) {
      check_staging(group, signature, weights ? Operand() : gy.operand(plan.capacity));
      impl.among_peers(stream, [&](peers::PeerExchange& exchange) {
        weights ? exchange.scale_rows(plan, scaled, signature, stream)
                : exchange.copy_rows(plan, copied, stream);
      });
    } else if constexpr (kCudaBuilt) {
      if (weights) {
        scale_rows_cuda(plan,
                        {std::get<TensorView>(args.g_TD), args.slot_w, args.y_CD,
                         std::get<TensorView>(args.gy_CD), args.g_slot_w},
                        stream);
      } else {
        copy_rows_cuda(plan, g, {}, gy, false, stream);
      }
    } else {
      fail_without_cuda(kName);
    }
    impl.count_on_gpu(stream);
    return;
  }
  if (!weights) {
    issue(group, signature, gy.operand(plan.capacity), stream, [=](Exchange& exchange) {
      moe::copy_rows(exchange, plan, g, {}, gy);
      zero_padding(plan, gy, false);
    });
    return;
  }
  issue(group, signature, {}, stream, [plan, scaled](Exchange& exchange) {
    moe::scale_rows(exchange, plan, scaled);
    zero_padding(plan, scaled.gy, false);
  });
}

}  // namespace moiety::moe
