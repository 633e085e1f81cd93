#include "moiety/train/expert_capacity.h"

#include <algorithm>
#include <cmath>

#include "moiety/base/error.h"

namespace moiety::train {
namespace {

constexpr double kFirstFactor = 1.25;
constexpr double kGrowth = 1.1;

}  // namespace

ExpertCapacity::ExpertCapacity(const TrainConfig& config, const model::Transformer& model,
                               int64_t tokens)
    : automatic_(config.moe.capacity_factor == 0),
      error_(config.moe.overflow == Overflow::kError),
      rows_(model.moe_capacity(automatic_ ? kFirstFactor : config.moe.capacity_factor, tokens)),
      most_(model.moe_capacity(-1, tokens)) {}

void ExpertCapacity::grow(int64_t required) {
  if (!automatic_) {
    throw UsageError(
        "moe.capacity_factor: an expert-parallel rank needs {} rows and has {}; raise it, set it "
        "to 0 (automatic), or allow drops with moe.overflow = \"drop\"",
        required, rows_);
  }
  rows_ = std::min(int64_t(std::ceil(kGrowth * double(required))), most_);
}

}  // namespace moiety::train
