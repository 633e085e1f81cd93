// Delayed scaling on GPUs. Internal to moiety/quant.
#pragma once

#include <memory>
#include <span>

#include "moiety/quant/delayed_scaling.h"

namespace moiety::quant::detail {

// Copies the states to the GPU.
std::shared_ptr<const DelayedScalingTable::Device> make_delayed_scaling_table(
    std::span<const DelayedScalingItem> items, AmaxAlgorithm algorithm, int margin,
    moiety::Device device);
void update_delayed_scales_cuda(const DelayedScalingTable::Device& table, const int32_t* skip,
                                const Stream& stream);
void oldest_first_cuda(const DelayedScaling& state, const TensorView& out_L, const Stream& stream);

}  // namespace moiety::quant::detail
