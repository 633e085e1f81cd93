#include "moiety/moe/combine.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/error.h"
#include "moiety/moe/exchange_cuda.h"

namespace moiety::moe {

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
  issue_sum(group, plan, {kName, "y", "out", OpKind::kCombine}, sum, stream);
}

void combine_backward(EpGroup& group, const EpPlan& plan, const CombineBackwardArgs& args,
                      Stream stream) {
  constexpr const char* kName = "ep combine_backward";
  check_plan(kName, group, plan, stream);
  check_payload_device(kName, "g", args.g_TD, stream);
  check_payload_device(kName, "gy", args.gy_CD, stream);
  check_devices(kName, {{"slot_w", args.slot_w}, {"y", args.y_CD}, {"g_slot_w", args.g_slot_w}},
                stream);
  const SourceRows g = source_rows(kName, "g", args.g_TD, plan.tokens);
  const bool weights = args.slot_w.defined(), dots = args.y_CD.defined();
  MOIETY_CHECK(weights || !dots, "{}: y is given without slot_w", kName);
  MOIETY_CHECK(dots == args.g_slot_w.defined(), "{}: y and g_slot_w go together", kName);
  if (weights && g.quantized()) {
    fail(ErrorKind::kUnsupported,
         "{}: g is {}, which slot_w cannot scale: rows are not requantized", kName,
         describe(args.g_TD));
  }
  if (weights) check_tensor(kName, "slot_w", args.slot_w, DType::kFloat32, {plan.capacity});
  if (dots) {
    check_rows(kName, "y", args.y_CD, plan.capacity, g.model);
    check_tensor(kName, "y", args.y_CD, std::get<TensorView>(args.g_TD).dtype(), {-1, -1});
    check_tensor(kName, "g_slot_w", args.g_slot_w, DType::kFloat32, {plan.capacity});
  }
  const ExpertRows gy = expert_rows(kName, "gy", args.gy_CD, args.g_TD, plan, args.g_slot_w);
  check_record(kName, group, args.g_TD, g.parts.record(plan.topk));

  if (group.impl()->on_gpu()) {
    check_gpu_rows(kName, "gy", gy);
    issue_on_gpu(group, stream, [&](Epoch, const Stream& on) {
      if (!weights) return copy_rows_cuda(plan, g, {}, gy, false, on);
      const auto& g_TD = std::get<TensorView>(args.g_TD);
      scale_rows_cuda(
          plan, {g_TD, args.slot_w, args.y_CD, std::get<TensorView>(args.gy_CD), args.g_slot_w},
          on);
    });
    return;
  }
  const Signature signature{.op = OpKind::kCombineBackward,
                            .format = g.format,
                            .weights = weights,
                            .row_bytes = g.parts.bytes(),
                            .plan = plan.epoch};
  if (!weights) {
    issue(group, signature, stream, [=](Exchange& exchange) {
      copy_rows(exchange, plan, g, {}, gy);
      zero_padding(plan, gy, false);
    });
    return;
  }
  const Rows y(args.y_CD), slot_w(args.slot_w);
  const DType dtype = std::get<TensorView>(args.g_TD).dtype();
  issue(group, signature, stream, [=](Exchange& exchange) {
    expand_rows(exchange, plan, g, [&](const Row& row, const int32_t* slot_K) {
      for (int k = 0; k < plan.topk; ++k) {
        const int32_t slot = slot_K[k];
        if (slot < 0) continue;
        if (dots) *gy.values.as<float>(slot) = dot_row(dtype, y[slot], row.data, g.model);
        scale_row(dtype, *slot_w.as<float>(slot), row.data, gy.data[slot], g.model);
      }
    });
    zero_padding(plan, gy, false);
  });
}

}  // namespace moiety::moe
