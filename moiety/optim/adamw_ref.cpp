#include <cmath>
#include <type_traits>

#include "moiety/optim/adamw_table.h"
#include "moiety/optim/stochastic_bf16.h"

namespace moiety::optim::detail {
namespace {

template <class T>
T store_moment(float x, const AdamWConstants& c, uint32_t t, const ElementRun& run, int64_t i,
               Moment which) {
  if constexpr (std::is_same_v<T, float>) return x;
  const uint64_t logical = run.columns.in_tensor(run.logical + (i - run.begin));
  const PhiloxBlock words = philox(c.key, moment_counter(logical >> 2, run.tensor_id, t, which));
  return static_cast<T>(round_stochastic(x, words[logical & 3]));
}

// G, M and W are the types of gradient, moments and weight; NoWeight if no weight is stored.
template <class G, class M, class W>
void update(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a) {
  const G* grad = a.grad.data<const G>();
  float* master = a.master.data<float>();
  M* exp_avg = a.exp_avg.data<M>();
  M* exp_avg_sq = a.exp_avg_sq.data<M>();
  W* weight = static_cast<W*>(a.weight.raw());
  for (const ElementRun& run : a.runs) {
    const float wd = run.decay ? x.wd : 0.0f;
    for (int64_t i = run.begin; i < run.end; ++i) {
      const float g = static_cast<float>(grad[i]) * x.s;
      const float m = std::fma(c.b1, static_cast<float>(exp_avg[i]), c.c1 * g);
      const float v = std::fma(c.b2, static_cast<float>(exp_avg_sq[i]), (c.c2 * g) * g);
      const float u = (m * x.k1) / (std::sqrt(v * x.k2) + c.eps);
      const float p = std::fma(-x.lr, std::fma(wd, master[i], u), master[i]);
      exp_avg[i] = store_moment<M>(m, c, x.t, run, i, Moment::kExpAvg);
      exp_avg_sq[i] = store_moment<M>(v, c, x.t, run, i, Moment::kExpAvgSq);
      master[i] = p;
      if constexpr (!std::is_same_v<W, NoWeight>) weight[i] = static_cast<W>(p);
    }
  }
}

template <class G, class M>
void update_moments(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a) {
  if (!a.weight.defined()) return update<G, M, NoWeight>(c, x, a);
  a.weight.dtype() == DType::kFloat32 ? update<G, M, float>(c, x, a) : update<G, M, bf16>(c, x, a);
}

template <class G>
void update_gradient(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a) {
  a.exp_avg.dtype() == DType::kFloat32 ? update_moments<G, float>(c, x, a)
                                       : update_moments<G, bf16>(c, x, a);
}

}  // namespace

void adamw_ref(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a) {
  a.grad.dtype() == DType::kFloat32 ? update_gradient<float>(c, x, a)
                                    : update_gradient<bf16>(c, x, a);
}

}  // namespace moiety::optim::detail
