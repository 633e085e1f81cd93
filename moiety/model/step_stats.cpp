#include "moiety/model/step_stats.h"

#include <algorithm>
#include <cstring>

#include "moiety/base/copy.h"

namespace moiety::model {
namespace {

// Offsets of the parts, in words of 8 bytes.
constexpr int64_t kLosses = 0, kCounts = 3, kLayers = 5;

}  // namespace

void StepStats::add(const StepStats& later) {
  loss_sum += later.loss_sum;
  aux_sum += later.aux_sum;
  z_sum += later.z_sum;
  targets += later.targets;
  tokens += later.tokens;
  moe.resize(later.moe.size());
  for (size_t l = 0; l < moe.size(); ++l) {
    MoeLayerStats& sum = moe[l];
    const MoeLayerStats& layer = later.moe[l];
    sum.expert_pairs.resize(layer.expert_pairs.size());
    for (size_t e = 0; e < layer.expert_pairs.size(); ++e) {
      sum.expert_pairs[e] += layer.expert_pairs[e];
    }
    sum.required = std::max(sum.required, layer.required);
    sum.capacity = layer.capacity;
    sum.dropped += layer.dropped;
    sum.overflow = sum.overflow || layer.overflow;
  }
}

StepSums::StepSums(int64_t moe_layers, int64_t experts, Device device)
    : layers_(moe_layers),
      experts_(experts),
      memory_(DType::kUInt8, {8 * (kLayers + moe_layers * (kLayerWords + experts))}, device,
              "sums of a step") {}

TensorView StepSums::part(DType dtype, int64_t first_word,
                          std::initializer_list<int64_t> sizes) const {
  const TensorView& all = memory_;
  return {static_cast<std::byte*>(all.raw()) + 8 * first_word, dtype, sizes, all.device()};
}

TensorView StepSums::loss_3() const { return part(DType::kFloat64, kLosses, {3}); }
TensorView StepSums::count_2() const { return part(DType::kInt64, kCounts, {2}); }
TensorView StepSums::layer_L4() const {
  return part(DType::kInt64, kLayers, {layers_, kLayerWords});
}
TensorView StepSums::pairs_LE() const {
  return part(DType::kInt64, kLayers + layers_ * kLayerWords, {layers_, experts_});
}

void StepSums::clear(Stream stream) const { fill_bytes(memory_, 0, stream); }

StepStats StepSums::read(TensorView on_host) const {
  check_tensor("step_sums", "on_host", on_host, DType::kUInt8, {memory_.view().numel()});
  const auto* word = static_cast<const std::byte*>(on_host.raw());
  const auto next = [&]<class T>(T& value) {
    std::memcpy(&value, word, sizeof(T));
    word += sizeof(T);
  };
  StepStats stats;
  for (double* sum : {&stats.loss_sum, &stats.aux_sum, &stats.z_sum}) next(*sum);
  for (int64_t* sum : {&stats.targets, &stats.tokens}) next(*sum);
  stats.moe.resize(layers_);
  for (MoeLayerStats& layer : stats.moe) {
    int64_t words[kLayerWords];
    for (int64_t& w : words) next(w);
    layer.required = words[kLayerRequired];
    layer.capacity = words[kLayerCapacity];
    layer.dropped = words[kLayerDropped];
    layer.overflow = words[kLayerOverflow] != 0;
  }
  for (MoeLayerStats& layer : stats.moe) {
    layer.expert_pairs.resize(experts_);
    for (int64_t& pairs : layer.expert_pairs) next(pairs);
  }
  return stats;
}

StepStats StepSums::read(Stream stream) const { return read(to_host(memory_, stream).view()); }

}  // namespace moiety::model
