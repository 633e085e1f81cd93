// Operations with a parameter in the form in which the blocks use them: gradients land in the
// parameter's main_grad, which they overwrite or add to.
#pragma once

#include "moiety/model/parameters.h"
#include "moiety/model/pass.h"
#include "moiety/model/step_work.h"
#include "moiety/model/weights.h"
#include "moiety/nn/linear.h"
#include "moiety/nn/norm.h"
#include "moiety/nn/rows.h"

namespace moiety::model {

// grad of `p` (+)= dy^T x; nothing if it is frozen.
inline void add_weight_gradient(const Pass& pass, TensorView dy, TensorView x,
                                optim::Parameter& p) {
  if (!p.trained()) return;
  const gtp::Work work = product_work(dy.size(0), dy.size(1), x.size(1), pass.storage);
  const OpenGradient grad = open_gradient(pass, p, work);
  nn::linear_weight_gradient(dy, x, grad.view, grad.accumulate, pass.stream);
  pass.stored(p.spec.name, "gradient", grad.view, dy, x);
  close_gradient(pass, p);
}

inline void apply_norm(const Pass& pass, TensorView x, const optim::Parameter& p, float eps,
                       TensorView y) {
  nn::norm({.x = x, .weight_D = p.weight, .y = y, .eps = eps}, pass.stream);
  pass.note(elementwise_work(2 * x.numel(), pass.storage));
  pass.stored(p.spec.name, "h", y, x, p.weight);
}

// dx = addend + the gradient of the norm's input x, where dy is the gradient of its output.
struct NormGradient {
  TensorView x;
  TensorView dy;
  TensorView addend;  // optional
  TensorView dx;
};
inline void norm_gradient(const Pass& pass, const NormGradient& g, float eps, optim::Parameter& p) {
  ArenaScope workspace(pass.arena);
  const int64_t blocks = nn::norm_blocks(nn::row_count(g.x), g.x.size(-1));
  const OpenGradient grad = open_small_gradient(pass, p);
  const GradientSum sum = begin_sum(pass, grad);
  nn::norm_backward({.x = g.x,
                     .weight_D = p.weight,
                     .dy = g.dy,
                     .addend = g.addend,
                     .dx = g.dx,
                     .grad_D = sum.view,
                     .workspace = pass.arena.tensor(DType::kFloat32, {blocks, g.x.size(-1)}),
                     .eps = eps,
                     .accumulate = sum.accumulate},
                    pass.stream);
  end_sum(pass, sum, grad);
  pass.note(elementwise_work(2 * g.x.numel(), pass.storage));
  pass.stored(p.spec.name, "dx", g.dx, g.dy, p.weight);
  if (p.trained()) pass.stored(p.spec.name, "gradient", p.grad, g.dy);
}

}  // namespace moiety::model
