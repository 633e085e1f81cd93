#include "moiety/base/copy.h"
#include "moiety/moe/router.h"
#include "moiety/moe/slot_maps.h"
#include "python/csrc/operators.h"

namespace moiety::torch_ops {
namespace {

moe::RouterConfig config_of(const Call& call, int64_t experts, int64_t top_k,
                            const std::string& score, bool renormalize, double scale) {
  MOIETY_CHECK(score == "softmax" || score == "sigmoid",
               "moiety::{}: score is '{}', expected softmax or sigmoid", call.name(), score);
  moe::RouterConfig config;
  config.experts = experts;
  config.top_k = top_k;
  config.score = score == "softmax" ? moe::Score::kSoftmax : moe::Score::kSigmoid;
  config.renormalize = renormalize;
  config.scale = static_cast<float>(scale);
  return config;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> router(Tensor logits, Optional bias, Optional mask,
                                          Optional given_idx, int64_t top_k, std::string score,
                                          bool renormalize, double scale, int64_t groups,
                                          int64_t group_top_k) {
  return guarded("router", [&] {
    Call call("router", logits);
    const TensorView logits_TE = call.whole("logits", logits, DType::kFloat32, {-1, -1});
    const int64_t tokens = logits_TE.size(0), experts = logits_TE.size(1);
    moe::RouterConfig config = config_of(call, experts, top_k, score, renormalize, scale);
    config.groups = groups;
    config.group_top_k = group_top_k;
    check(config);
    const Tensor w = call.empty({tokens, top_k}, ScalarType::Float);
    const Tensor idx = call.empty({tokens, top_k}, ScalarType::Int);
    const TensorView counts = call.scratch({1, experts + 1}, ScalarType::Long);
    moe::RouterChooseArgs args;
    args.logits_TE = logits_TE;
    args.bias_E = call.whole("bias", bias, DType::kFloat32, {experts});
    args.mask_T = call.whole("mask", mask, DType::kUInt8, {tokens});
    args.given_idx_TK = call.whole("given_idx", given_idx, DType::kInt32, {tokens, top_k});
    args.idx_TK = view_of(idx);
    args.weight_TK = view_of(w);
    args.stats = {counts, call.scratch({1, experts + 1}, ScalarType::Double)};
    args.workspace = call.bytes(moe::router_forward_workspace(config, tokens, 1));
    moe::router_choose(config, args, call.stream());
    // The last count is that of the tokens; a result is no view of another tensor.
    const Tensor pairs = call.empty({experts}, ScalarType::Long);
    copy(view_of(pairs), counts.select(0).slice(0, 0, experts), call.stream());
    return std::tuple(w, idx, pairs);
  });
}

Tensor router_backward(Tensor logits, Tensor idx, Tensor dweight, std::string score,
                       bool renormalize, double scale) {
  return guarded("router_backward", [&] {
    Call call("router_backward", logits);
    const TensorView logits_TE = call.whole("logits", logits, DType::kFloat32, {-1, -1});
    const int64_t tokens = logits_TE.size(0), experts = logits_TE.size(1), top_k = idx.size(1);
    const moe::RouterConfig config = config_of(call, experts, top_k, score, renormalize, scale);
    const Tensor dlogits = call.empty({tokens, experts}, ScalarType::Float);
    // Losses are torch's own operations (moiety.nn), so none comes in here: no count is read, and a
    // scope without tokens has no part in the gradient.
    const TensorView scope = call.scratch({2}, ScalarType::Long);
    fill_bytes(scope, 0, call.stream());
    moe::RouterChooseBackwardArgs args;
    args.logits_TE = logits_TE;
    args.idx_TK = call.whole("idx", idx, DType::kInt32, {tokens, top_k});
    args.dweight_TK = call.whole("dweight", dweight, DType::kFloat32, {tokens, top_k});
    args.count = call.scratch({1, experts + 1}, ScalarType::Long);
    args.scope = scope;
    args.dlogits_TE = view_of(dlogits);
    moe::router_choose_backward(config, args, call.stream());
    return dlogits;
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expert_rows(Tensor idx, Optional w,
                                                       int64_t num_experts) {
  return guarded("expert_rows", [&] {
    Call call("expert_rows", idx);
    MOIETY_CHECK(num_experts >= 0, "moiety::expert_rows: num_experts is {}", num_experts);
    const DType index = idx.scalar_type() == ScalarType::Int ? DType::kInt32 : DType::kInt64;
    moe::ExpertRowsArgs args;
    args.idx_TK = call.whole("idx", idx, index, {-1, -1});
    const int64_t tokens = args.idx_TK.size(0), top_k = args.idx_TK.size(1);
    const int64_t rows = tokens * top_k;
    const Tensor splits = call.empty({num_experts}, ScalarType::Long);
    const Tensor source = call.empty({rows}, ScalarType::Int);
    const Tensor row_tk = call.empty({tokens, top_k}, ScalarType::Int);
    const Tensor slot_w = call.empty({w ? rows : 0}, ScalarType::Float);
    args.w_TK = call.whole("w", w, DType::kFloat32, {tokens, top_k});
    args.count_E = view_of(splits);
    args.source_R = view_of(source);
    args.row_TK = view_of(row_tk);
    if (w) args.slot_w_R = view_of(slot_w);
    moe::expert_rows(args, call.stream());
    return std::tuple(splits, source, row_tk, slot_w);
  });
}

void router_update_bias(Tensor bias, Tensor counts, double rate) {
  guarded("router_update_bias", [&] {
    Call call("router_update_bias", bias);
    const TensorView bias_E = call.whole("bias", bias, DType::kFloat32, {-1});
    moe::router_update_bias(bias_E, call.whole("counts", counts, DType::kInt64, {bias_E.size(0)}),
                            static_cast<float>(rate), call.stream());
  });
}

}  // namespace moiety::torch_ops
