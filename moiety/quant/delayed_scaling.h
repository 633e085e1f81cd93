// Delayed scaling of FP8 tensors: the scale of a step comes from the maxima of steps before it
// (Micikevicius et al., "FP8 formats for deep learning", 2022;
// docs/spec/formats.md#delayed-scaling). The trainer's are those of moiety/model/delayed_scales.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::quant {

// The state of one tensor, float32 unless said otherwise. At first history, position and step_amax
// are 0, scale and scale_inv 1. A checkpoint wants the history oldest first (oldest_first below).
struct DelayedScaling {
  TensorView history;    // [L], a ring
  TensorView position;   // int32 [1]: place of the next value
  TensorView scale;      // [1]; codes = encode(x * scale)
  TensorView scale_inv;  // [1], the decode scale, of which tensors keep a copy
  TensorView step_amax;  // [1], the largest |x| since the last update (maximum of bits)
};

enum class AmaxAlgorithm : uint8_t { kMax, kNewest };

struct DelayedScalingItem {
  DelayedScaling state;
  DType element = DType::kE4M3;
  TensorView flags = {};  // uint32 [1], optional: kFlagNonFinite if step_amax was not finite
};
// The states of many tensors. The table copies the items; it lives on the device that all tensors
// are on, and making it waits for a GPU.
class DelayedScalingTable {
 public:
  // Scales are smaller by 2^margin.
  explicit DelayedScalingTable(std::span<const DelayedScalingItem> items,
                               AmaxAlgorithm algorithm = AmaxAlgorithm::kMax, int margin = 0);
  ~DelayedScalingTable();
  DelayedScalingTable(DelayedScalingTable&&) noexcept;
  DelayedScalingTable& operator=(DelayedScalingTable&&) noexcept;

  std::span<const DelayedScalingItem> items() const;
  AmaxAlgorithm algorithm() const;
  int margin() const;
  struct Device;
  const Device* device() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Updates the scales of all tensors in one launch, once a step, after step_amax was reduced over
// ranks (integer maximum). A step_amax of 0 or not finite leaves history and scale alone; any other
// one is pushed. Then, with a = the maximum of the history or its newest value,
//   scale = RN(RN(max * 2^-margin) / a), at most FLT_MAX;  scale_inv = RN(1 / scale)
// Afterwards step_amax is 0. `skip` is an optional int32 [1], read in stream order: if it is not 0
// the step never was, and nothing but step_amax changes.
void update_delayed_scales(const DelayedScalingTable& table, Stream stream, TensorView skip = {});

// Sets the scales of a state in host memory to those that follow from its history, and to 1 if that
// holds zeros alone: a state of which only the history was kept goes on so.
void scale_from_history(const DelayedScaling& state, DType element, int margin = 0);

// Copies the history in the order of time to out_L, float32 [L], as a checkpoint wants it: with
// it and position 0 a state continues as if it had never stopped.
void oldest_first(const DelayedScaling& state, TensorView out_L, Stream stream);

namespace detail {

void update_delayed_scales_cpu(const DelayedScalingTable& table, const int32_t* skip);
void scale_from_history_cpu(const DelayedScaling& state, DType element, int margin);
void oldest_first_cpu(const DelayedScaling& state, TensorView out_L);

}  // namespace detail
}  // namespace moiety::quant
