// How a pass reads weights and writes their gradients. What (e)gtp cuts, the executor gathers and
// reduces (gtp/executor.h); anything else is read and written where the parameter has it.
//
// What `read_weight` and `read_weights` give is good until the next call of either or of
// `open_gradient`: work that reads it is enqueued on pass.stream before. A gradient is good until
// it is closed.
#pragma once

#include <array>

#include "moiety/gemm/quantized_operand.h"
#include "moiety/gtp/executor.h"
#include "moiety/model/parameters.h"
#include "moiety/model/pass.h"

namespace moiety::model {

// The whole weight, of a tensor-parallel rank its slice: [N, K] or, of experts, [E, N, K].
gemm::LinearWeight read_weight(const Pass& pass, const optim::Parameter& p, gtp::Phase phase,
                               gtp::Work work);
// Both at a time.
std::array<gemm::LinearWeight, 2> read_weights(const Pass& pass,
                                               std::array<const optim::Parameter*, 2> p,
                                               gtp::Phase phase, gtp::Work work);

// Where the next contribution to a gradient goes, of the whole weight's shape; every element is to
// be written, or added to, by `work`.
struct OpenGradient {
  TensorView view;
  bool accumulate = false;
};
OpenGradient open_gradient(const Pass& pass, optim::Parameter& p, gtp::Work work);
// The contribution is enqueued on pass.stream.
void close_gradient(const Pass& pass, optim::Parameter& p);

}  // namespace moiety::model
