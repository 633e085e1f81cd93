#include "moiety/optim/adamw.h"

#include "moiety/base/trace.h"

namespace moiety::optim {
namespace {

void check_arguments(const AdamW& adam, const AdamWArgs& a) {
  MOIETY_CHECK(adam.eps > 0, "adamw: eps={} must be positive", adam.eps);
  const int64_t n = a.grad.numel();
  check_tensor("adamw", "grad", a.grad, DType::kFloat32, {n});
  check_tensor("adamw", "master", a.master, DType::kFloat32, {n});
  const auto check_stored = [&](const char* argument, const TensorView& x) {
    check_tensor("adamw", argument, x,
                 x.dtype() == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32, {n});
  };
  check_stored("exp_avg", a.exp_avg);
  check_stored("exp_avg_sq", a.exp_avg_sq);
  if (a.weight.defined()) check_stored("weight", a.weight);
  MOIETY_CHECK(a.exp_avg.dtype() == a.exp_avg_sq.dtype(), "adamw: exp_avg is {}, exp_avg_sq is {}",
               name(a.exp_avg.dtype()), name(a.exp_avg_sq.dtype()));
  for (const TensorView* x : {&a.grad, &a.master, &a.exp_avg, &a.exp_avg_sq, &a.weight}) {
    MOIETY_CHECK(!x->defined() || x->contiguous(), "adamw: {} is not contiguous", x->describe());
  }
  for (const ElementRun& run : a.runs) {
    MOIETY_CHECK(run.begin >= 0 && run.begin <= run.end && run.end <= n,
                 "adamw: run [{}, {}) of {} elements", run.begin, run.end, n);
  }
}

}  // namespace

detail::AdamWConstants::AdamWConstants(const AdamW& adam, const AdamWStep& step)
    : s(step.s),
      b1(static_cast<float>(adam.beta1)),
      b2(static_cast<float>(adam.beta2)),
      c1(static_cast<float>(1 - adam.beta1)),
      c2(static_cast<float>(1 - adam.beta2)),
      k1(step.k1),
      k2(step.k2),
      eps(static_cast<float>(adam.eps)),
      lr(static_cast<float>(step.lr)),
      wd(static_cast<float>(step.weight_decay)),
      t(static_cast<uint32_t>(step.t)),
      seed(step.seed) {}

void adamw(const AdamW& adam, const AdamWStep& step, const AdamWArgs& args, Stream stream) {
  check_arguments(adam, args);
  stream.run([c = detail::AdamWConstants(adam, step), args] {
    const TraceSpan span(TraceLane::kCompute, "adamw", {{"elements", args.grad.numel()}});
    detail::adamw_cpu(c, args);
  });
}

void adamw_reference(const AdamW& adam, const AdamWStep& step, const AdamWArgs& args,
                     Stream stream) {
  check_arguments(adam, args);
  stream.run([c = detail::AdamWConstants(adam, step), args] { detail::adamw_ref(c, args); });
}

}  // namespace moiety::optim
