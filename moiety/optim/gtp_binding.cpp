#include "moiety/optim/gtp_binding.h"

#include "moiety/base/error.h"

namespace moiety::optim {

ShardPeers shard_peers(const std::unique_ptr<gtp::Transport>& transport) {
  if (!transport) return {};
  const auto* const t = &transport;
  return {.allocate = [t](const std::string& what,
                          int64_t bytes) { return (*t)->allocate(what, bytes); },
          .await_drained = [t](const Stream& stream) { (*t)->await_drained(stream); },
          .publish = [t](int32_t bucket, const Stream& stream) { (*t)->publish(bucket, stream); }};
}

gtp::BundleId GtpBinding::add(int parameter, const gtp::Layout& layout, int group,
                              int64_t first_expert) {
  const Parameter& p = optimizer_.parameters()[parameter];
  const ParamSpec& spec = p.spec;
  const int64_t members = spec.shape.size() == 3 ? spec.shape[0] : 1;
  const int64_t s = layout.shard_rows(), cols = layout.slice_cols();
  // At G == 1 the parameter may lack the layout's padding.
  MOIETY_CHECK(spec.rows == members * s && spec.row_elements == cols,
               "gtp binding: {} has {} x {} elements, {} shards of its layout {} x {}", spec.name,
               spec.rows, spec.row_elements, members, members * s, cols);
  const auto id = static_cast<gtp::BundleId>(bundles_.size());
  gtp::Bundle bundle{.name = spec.name,
                     .members = {},
                     .group = group,
                     .expert = spec.expert,
                     .bucket = 0,
                     .scales = ScaleLayout::kCompact,
                     // Where both directions have the same codes, every product dequantizes those
                     // of rows.
                     .rows_only = !spec.format || has_one_coding(spec.format->format)};
  if (const auto shared = optimizer_.shared_shard(parameter)) bundle.bucket = shared->bucket;
  for (int64_t e = 0; e < members; ++e) {
    const auto matrix = [&](const TensorView& x) {
      return x.defined() ? x.reshape({members, s, cols}).select(e) : x;
    };
    gtp::ShardedWeight& weight = weights_.emplace_back();
    weight.name = members > 1 ? text("{}/{}", spec.name, first_expert + e) : spec.name;
    weight.layout = layout;
    weight.codec = spec.format ? gtp::Codec(*spec.format) : gtp::Codec(p.weight.dtype());
    if (spec.expert) weight.expert = first_expert + e;
    weight.data = matrix(p.weight);
    if (spec.format) weight.quantized = p.quantized[e];
    weight.main_grad = matrix(p.grad);
    bundle.members.push_back(static_cast<gtp::WeightId>(weights_.size()) - 1);
    bundle_of_weight_.push_back(id);
  }
  bundles_.push_back(std::move(bundle));
  parameter_of_bundle_.push_back(parameter);
  return id;
}

void GtpBinding::ensure_ready(gtp::BundleId bundle, const Stream& stream) {
  optimizer_.ensure_ready(parameter_of_bundle_.at(bundle), stream);
}

void GtpBinding::on_grad_ready(gtp::WeightId weight, const Event& event) {
  const gtp::BundleId bundle = bundle_of_weight_.at(weight);
  if (weight != bundles_[bundle].members.back()) return;
  const int parameter = parameter_of_bundle_[bundle];
  optimizer_.parameters()[parameter].overwrite = false;  // the executor wrote all of it
  optimizer_.on_grad_ready(parameter, event);
}

void GtpBinding::on_grad_late(gtp::WeightId weight, const Stream&) {
  const gtp::BundleId bundle = bundle_of_weight_.at(weight);
  // Nobody reads main_grad when the call returns, so the stream has nothing to wait for.
  if (weight == bundles_[bundle].members.front()) {
    optimizer_.on_grad_late(parameter_of_bundle_[bundle]);
  }
}

}  // namespace moiety::optim
