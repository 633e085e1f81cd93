// Initial weights (docs/spec/optimizer.md#initialization). An element is a function of seed,
// logical tensor and index, so every layout draws the same weights.
#pragma once

#include <cstdint>
#include <span>

#include "moiety/base/stream.h"
#include "moiety/optim/buffer_layout.h"

namespace moiety::optim {

// Sets the elements of `runs` in master (float32 [n]) to ones, zeros, or init_std * normal numbers
// of rng domain 1, and elements of no run to 0. The runs are those of `specs`, ascending. The host
// also draws the numbers for a GPU, so they are the same.
void initialize(std::span<const ParamSpec> specs, std::span<const ElementRun> runs, uint64_t seed,
                TensorView master, Stream stream);

// weight (float32 or bfloat16 [n]) := master (float32 [n]), rounded to nearest even.
void round_weights(TensorView master, TensorView weight, Stream stream);
// The same bits on a GPU.
void round_weights_cuda(TensorView master, TensorView weight, const Stream& stream);

}  // namespace moiety::optim
