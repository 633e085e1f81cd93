#include <algorithm>
#include <cmath>

#include "moiety/base/parallel.h"
#include "moiety/formats/e5m2.h"
#include "moiety/formats/quantized.h"
#include "moiety/quant/delayed_scaling.h"
#include "moiety/quant/quantize/ieee_scope.h"
#include "moiety/quant/scale_math.h"

namespace moiety::quant::detail {
namespace {

// The values of a history are finite and not negative, so their bits are in the order of their
// values.
MOIETY_SIMD_CLONES
float largest(const float* history, int64_t length) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < length; ++i) {
    const uint32_t a = abs_bits(history[i]);
    amax = a > amax ? a : amax;
  }
  return std::bit_cast<float>(amax);
}

int64_t ring_position(const DelayedScaling& state) {
  return static_cast<uint32_t>(*state.position.data<int32_t>()) % state.history.size(0);
}

void push(const DelayedScaling& state, float value) {
  const int64_t at = ring_position(state);
  state.history.data<float>()[at] = value;
  *state.position.data<int32_t>() = static_cast<int32_t>((at + 1) % state.history.size(0));
}

void set_scale(const DelayedScaling& state, DType element, int margin, float amax) {
  const Fp8Scale scale =
      fp8_scale_of(capped_quotient(std::ldexp(fp8_max_of(element), -margin), amax));
  *state.scale.data<float>() = scale.encode;
  *state.scale_inv.data<float>() = scale.decode;
}

void update(const DelayedScalingItem& item, AmaxAlgorithm algorithm, int margin, bool skipped) {
  const DelayedScaling& state = item.state;
  float& step_amax = *state.step_amax.data<float>();
  const float newest = step_amax;
  step_amax = 0;
  if (skipped) return;
  if (!is_finite(newest)) {
    if (item.flags.defined()) *item.flags.data<uint32_t>() |= kFlagNonFinite;
    return;
  }
  if (newest == 0) return;
  push(state, newest);
  const float* history = state.history.data<float>();
  const float amax =
      algorithm == AmaxAlgorithm::kMax ? largest(history, state.history.size(0)) : newest;
  set_scale(state, item.element, margin, amax);
}

}  // namespace

void update_delayed_scales_cpu(const DelayedScalingTable& table, const int32_t* skip) {
  constexpr int64_t kGrain = 64;  // tensors of a task
  const auto items = table.items();
  const bool skipped = skip && *skip != 0;
  parallel_for(static_cast<int64_t>(items.size()), kGrain, [&](int64_t begin, int64_t end) {
    const IeeeScope ieee;
    for (int64_t i = begin; i < end; ++i) {
      update(items[i], table.algorithm(), table.margin(), skipped);
    }
  });
}

void scale_from_history_cpu(const DelayedScaling& state, DType element, int margin) {
  const IeeeScope ieee;
  const float amax = largest(state.history.data<float>(), state.history.size(0));
  if (amax > 0) return set_scale(state, element, margin, amax);
  *state.scale.data<float>() = *state.scale_inv.data<float>() = 1;
}

void oldest_first_cpu(const DelayedScaling& state, TensorView out_L) {
  const float* history = state.history.data<float>();
  const float* oldest = history + ring_position(state);
  std::rotate_copy(history, oldest, history + state.history.size(0), out_L.data<float>());
}

}  // namespace moiety::quant::detail
