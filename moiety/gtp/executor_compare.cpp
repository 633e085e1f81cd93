// The comparison of scales between peers in the course of training.
#include <algorithm>
#include <cstring>

#include "moiety/base/copy.h"
#include "moiety/base/error.h"
#include "moiety/comm/agree.h"
#include "moiety/gtp/executor_impl.h"

namespace moiety::gtp {
namespace {

// The values of a weight: amax and tensor_scale of the row and of the column view.
constexpr int64_t kValues = 4;

// A sentence unless all ranks pass the same values of these weights.
std::string difference(const Transport& group, std::span<const ShardedWeight* const> weights,
                       const TensorView& values) {
  const std::vector<std::string> all = group.bootstrap().all_gather(
      {static_cast<const char*>(values.raw()), static_cast<size_t>(values.bytes())});
  for (int r = 1; r < group.ranks(); ++r) {
    const auto differs = std::ranges::mismatch(all[0], all[r]);
    if (differs.in1 == all[0].end()) continue;
    const auto i = (differs.in1 - all[0].begin()) / static_cast<std::ptrdiff_t>(sizeof(float));
    const auto value = [&](const std::string& of_rank) {
      float out;
      std::memcpy(&out, of_rank.data() + i * sizeof(float), sizeof(float));
      return out;
    };
    return text(
        "gtp \"{}\": {} has {} {} on rank 0, {} on rank {}; expected those of the uncut weight",
        group.name(), weights[i / kValues]->name,
        i % kValues < kValues / 2 ? "amax" : "tensor scale", value(all[0]), value(all[r]), r);
  }
  return "";
}

}  // namespace

void Executor::Impl::compare_tensor_values(const Stream& stream) {
  std::string error;
  for (int g = 0; g < static_cast<int>(transports_.size()); ++g) {
    if (!transports_[g]) continue;
    std::vector<const ShardedWeight*> weights;
    for (BundleId b = 0; b < static_cast<BundleId>(bundles_.size()); ++b) {
      const Codec& codec = weights_[bundles_[b].members[0]].codec;
      const bool scaled = codec.quantized() && is_tensor_scaled(codec.spec().format);
      if (specs_[b].group != g || specs_[b].group_size == 1 || !scaled) continue;
      publish(b, stream);
      for (const WeightId w : bundles_[b].members) weights.push_back(&weights_[w]);
    }
    if (weights.empty()) continue;
    const auto count = static_cast<int64_t>(weights.size());
    const Tensor values(DType::kFloat32, {count, kValues});
    for (int64_t i = 0; i < count; ++i) {
      const TensorView row = values.view().select(i);
      copy(row.slice(0, 0, 2), weights[i]->quantized.amax, stream);
      copy(row.slice(0, 2, kValues), weights[i]->quantized.tensor_scale, stream);
    }
    stream.synchronize();
    const std::string next = difference(*transports_[g], weights, values);
    if (error.empty()) error = next;
  }
  if (ranks_) comm::agree(*ranks_, error);
}

}  // namespace moiety::gtp
