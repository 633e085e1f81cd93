#include "moiety/model/weights.h"

#include "moiety/nn/elementwise.h"

namespace moiety::model {
namespace {

gtp::Executor& executor_of(const Pass& pass, const optim::Parameter& p) {
  MOIETY_CHECK(pass.executor, "model: {} is cut, but there is no executor", p.spec.name);
  return *pass.executor;
}

bool is_cut(const optim::Parameter& p) { return p.bundle != gtp::kNoBundle; }

gemm::LinearWeight own(const optim::Parameter& p) { return {p.quantized, p.weight}; }

gemm::LinearWeight gathered(const gtp::View& view) { return {view.quantized, view.data}; }

}  // namespace

gemm::LinearWeight read_weight(const Pass& pass, const optim::Parameter& p, gtp::Phase phase,
                               gtp::Work work) {
  if (!is_cut(p)) {
    pass.note(work);
    return own(p);
  }
  return gathered(executor_of(pass, p).materialize(p.bundle, phase, work, pass.stream));
}

std::array<gemm::LinearWeight, 2> read_weights(const Pass& pass,
                                               std::array<const optim::Parameter*, 2> p,
                                               gtp::Phase phase, gtp::Work work) {
  if (!is_cut(*p[0])) {
    pass.note(work);
    return {own(*p[0]), own(*p[1])};
  }
  const std::array bundles{p[0]->bundle, p[1]->bundle};
  std::array<gtp::View, 2> views;
  executor_of(pass, *p[0]).materialize(bundles, phase, work, views, pass.stream);
  return {gathered(views[0]), gathered(views[1])};
}

OpenGradient open_gradient(const Pass& pass, optim::Parameter& p, gtp::Work work) {
  OpenGradient gradient;
  if (is_cut(p)) {
    const gtp::View view = executor_of(pass, p).grad_buffer(p.bundle, pass.stream);
    gradient = {view.data, view.accumulate};
  } else {
    gradient = {p.grad, take_accumulate(p)};
  }
  pass.note(work);
  return gradient;
}

void close_gradient(const Pass& pass, optim::Parameter& p) {
  if (is_cut(p)) executor_of(pass, p).reduce(p.bundle, pass.stream);
}

OpenGradient open_small_gradient(const Pass& pass, optim::Parameter& p) {
  if (p.trained()) return {p.grad, take_accumulate(p)};
  return {pass.arena.tensor(DType::kFloat32, {p.spec.numel()}), false};
}

GradientSum begin_sum(const Pass& pass, const OpenGradient& gradient) {
  const TensorView& g = gradient.view;
  if (g.dtype() == DType::kFloat32) return {g, gradient.accumulate};
  return {TensorView(pass.arena.allocate(byte_size(DType::kFloat32, g.numel())), DType::kFloat32,
                     g.sizes(), g.device()),
          false};
}

void end_sum(const Pass& pass, const GradientSum& sum, const OpenGradient& gradient) {
  if (sum.view.raw() == gradient.view.raw()) return;
  nn::round_to_bf16(sum.view, gradient.view, gradient.accumulate, pass.stream);
}

}  // namespace moiety::model
