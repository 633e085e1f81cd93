// The way in which a pass reads weights and writes their gradients. Weights that (e)gtp cuts are
// gathered and reduced by the executor (gtp/executor.h); all others are read and written where the
// parameter has them.
//
// A result of `read_weight` or `read_weights` is good until the next call of either or of
// `open_gradient`; work that reads it is enqueued on pass.stream before. A gradient is good until
// it is closed.
#pragma once

#include <array>

#include "moiety/gemm/quantized_operand.h"
#include "moiety/gtp/executor.h"
#include "moiety/model/parameters.h"
#include "moiety/model/pass.h"

namespace moiety::model {

// The whole weight, or a tensor-parallel rank's slice: [N, K] or, for experts, [E, N, K].
gemm::LinearWeight read_weight(const Pass& pass, const optim::Parameter& p, gtp::Phase phase,
                               gtp::Work work);
// Two weights at a time.
std::array<gemm::LinearWeight, 2> read_weights(const Pass& pass,
                                               std::array<const optim::Parameter*, 2> p,
                                               gtp::Phase phase, gtp::Work work);

// The place for the next contribution to a gradient, of the whole weight's shape; `work` is to
// write every element, or to add to it.
struct OpenGradient {
  TensorView view;
  bool accumulate = false;
};
OpenGradient open_gradient(const Pass& pass, optim::Parameter& p, gtp::Work work);
// Ends a contribution, which is enqueued on pass.stream by now.
void close_gradient(const Pass& pass, optim::Parameter& p);
// The place for a contribution to the gradient of a small parameter, which nothing cuts; it needs
// no end. That of a frozen one is memory on the arena that nobody reads.
OpenGradient open_small_gradient(const Pass& pass, optim::Parameter& p);

// The place where a contribution that comes in parts, or term by term, is summed: in float32, which
// is the gradient itself, or memory on the arena beside a bfloat16 gradient. `end_sum` then brings
// it there: gradient (+)= sum, with one rounding.
struct GradientSum {
  TensorView view;
  bool accumulate = false;  // add to the view
};
GradientSum begin_sum(const Pass& pass, const OpenGradient& gradient);
void end_sum(const Pass& pass, const GradientSum& sum, const OpenGradient& gradient);

}  // namespace moiety::model
