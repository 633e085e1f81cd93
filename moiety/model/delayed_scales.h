// The scales of recipe fp8_tensor with delayed scaling (quant/delayed_scaling.h): of x and of dy of
// every linear layer that a recipe may quantize, of experts one each for every expert of the model.
//
// A step casts with the scales that the steps before it left, and records the largest |x| of all
// its micro-batches; recording a tensor again, as recomputation and weight gradients do, changes
// nothing. The end of a step takes the maximum over all ranks, so every rank has the same histories
// under any layout, and a checkpoint's go on under another one. A tensor's first step is cast with
// scale 1. Weights are not among them: their owner sees all of a weight when it casts it.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/comm/communicator.h"
#include "moiety/model/config.h"
#include "moiety/quant/delayed_scaling.h"

namespace moiety::model {

// A tensor with histories: x or dy of a linear layer.
struct ScaledTensor {
  std::string name;     // "<linear>.amax_x" or "<linear>.amax_dy", in checkpoints
  std::string weight;   // the linear's weight
  bool expert = false;  // of experts, one history each
  int64_t count = 1;    // histories
  bool gradient = false;
};
// All of them, in the order of layers. They follow from the configuration alone, so the layers that
// a recipe leaves in bf16 have some too, which stay empty.
std::vector<ScaledTensor> scaled_tensors(const Config& config);
// Bytes of memory on the model's device.
int64_t delayed_scale_bytes(const Config& config, int64_t length);

// Experts [first, first + count) of a rank.
struct OwnExperts {
  int64_t first = 0, count = 0;
};

class DelayedScales {
 public:
  // Histories of `length` steps, all empty.
  DelayedScales(const Config& config, int64_t length, OwnExperts own, Device device);

  int64_t length() const { return length_; }
  // The states with which a linear casts x and dy; of experts this rank's. A pass that does not
  // record casts alike, and what it sees is forgotten.
  const quant::DelayedScaling& input(const std::string& weight, bool records) const;
  const quant::DelayedScaling& gradient(const std::string& weight) const;

  // Ends a step: what the ranks of `world` (null: there is only this one) recorded enters the
  // histories, unless `skip` (int32 [1], optional) is not 0 when the stream comes there. Collective.
  void update(comm::Communicator* world, const TensorView& skip, const Stream& stream);

  // The histories as a checkpoint has them, float32 [count, length], oldest first. Waits for the
  // stream; the memory is the host's, and changes with the next call.
  struct History {
    std::string name;
    TensorView values;
  };
  std::vector<History> histories(const Stream& stream);
  // Room for the histories of a checkpoint with this length, and their adoption: the newest values
  // that fit are kept, and scales follow from them. Waits for the stream.
  std::vector<History> make_room(int64_t saved_length);
  void adopt(const Stream& stream);

 private:
  struct Linear {
    quant::DelayedScaling input, unrecorded, gradient;
  };
  quant::DelayedScaling state(int64_t first, int64_t count, const TensorView& step_amax) const;
  std::vector<History> views_of(const Tensor& values_NL) const;

  std::vector<ScaledTensor> tensors_;
  int64_t length_, count_;  // of histories
  Tensor history_NL_, position_N_, scale_N_, scale_inv_N_, step_amax_N_;
  Tensor unrecorded_N_;  // where passes that do not record leave an amax
  std::map<std::string, Linear> linears_;
  std::optional<quant::DelayedScalingTable> table_;
  Tensor on_host_;  // histories on their way to or from a checkpoint
};

}  // namespace moiety::model
