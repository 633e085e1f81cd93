#include "moiety/model/weights.h"

#include "moiety/base/parallel.h"
#include "moiety/formats/bf16.h"

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

gtp::Work product_work(int64_t rows, int64_t n, int64_t k, int64_t item, int64_t members) {
  const double r = double(rows), out = double(n), in = double(k);
  return {.flops = 2 * r * out * in,
          .bytes = double(item) * (r * (out + in) + out * in * double(members))};
}

gemm::LinearWeight read_weight(const Pass& pass, const optim::Parameter& p, gtp::Phase phase,
                               gtp::Work work) {
  if (!is_cut(p)) return own(p);
  return gathered(executor_of(pass, p).materialize(p.bundle, phase, work, pass.stream));
}

std::array<gemm::LinearWeight, 2> read_weights(const Pass& pass,
                                               std::array<const optim::Parameter*, 2> p,
                                               gtp::Phase phase, gtp::Work work) {
  if (!is_cut(*p[0])) return {own(*p[0]), own(*p[1])};
  const std::array bundles{p[0]->bundle, p[1]->bundle};
  std::array<gtp::View, 2> views;
  executor_of(pass, *p[0]).materialize(bundles, phase, work, views, pass.stream);
  return {gathered(views[0]), gathered(views[1])};
}

OpenGradient open_gradient(const Pass& pass, optim::Parameter& p) {
  if (!is_cut(p)) return {p.grad, take_accumulate(p)};
  const gtp::View view = executor_of(pass, p).grad_buffer(p.bundle, pass.stream);
  return {view.data, view.accumulate};
}

void close_gradient(const Pass& pass, optim::Parameter& p) {
  if (is_cut(p)) executor_of(pass, p).reduce(p.bundle, pass.stream);
}

GradientSum begin_sum(const Pass& pass, const OpenGradient& gradient) {
  const TensorView& g = gradient.view;
  if (g.dtype() == DType::kFloat32) return {g, gradient.accumulate};
  return {TensorView(pass.arena.allocate(byte_size(DType::kFloat32, g.numel())), DType::kFloat32,
                     g.sizes()),
          false};
}

void end_sum(const Pass& pass, const GradientSum& sum, const OpenGradient& gradient) {
  if (sum.view.raw() == gradient.view.raw()) return;
  pass.stream.run([=] {
    const float* in = sum.view.data<float>();
    bf16* out = gradient.view.data<bf16>();
    parallel_for(sum.view.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        out[i] = bf16(gradient.accumulate ? float(out[i]) + in[i] : in[i]);
      }
    });
  });
}

}  // namespace moiety::model
