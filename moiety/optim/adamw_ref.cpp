#include <cmath>
#include <type_traits>

#include "moiety/optim/adamw.h"
#include "moiety/optim/stochastic_bf16.h"

namespace moiety::optim::detail {
namespace {

template <class T>
T store_moment(float x, const AdamWConstants& c, const ElementRun& run, int64_t i, Moment which) {
  if constexpr (std::is_same_v<T, float>) return x;
  const uint64_t logical = run.columns.in_tensor(run.logical + (i - run.begin));
  const PhiloxBlock words = philox(rng_key(c.seed, RngDomain::kMoments),
                                   moment_counter(logical >> 2, run.tensor_id, c.t, which));
  return static_cast<T>(round_stochastic(x, words[logical & 3]));
}

// W: NoWeight where none is stored.
template <class M, class W>
void update(const AdamWConstants& c, const AdamWArgs& a) {
  const float* grad = a.grad.data<const float>();
  float* master = a.master.data<float>();
  M* exp_avg = a.exp_avg.data<M>();
  M* exp_avg_sq = a.exp_avg_sq.data<M>();
  W* weight = static_cast<W*>(a.weight.raw());
  for (const ElementRun& run : a.runs) {
    const float wd = run.decay ? c.wd : 0.0f;
    for (int64_t i = run.begin; i < run.end; ++i) {
      const float g = grad[i] * c.s;
      const float m = std::fma(c.b1, static_cast<float>(exp_avg[i]), c.c1 * g);
      const float v = std::fma(c.b2, static_cast<float>(exp_avg_sq[i]), (c.c2 * g) * g);
      const float u = (m * c.k1) / (std::sqrt(v * c.k2) + c.eps);
      const float p = std::fma(-c.lr, std::fma(wd, master[i], u), master[i]);
      exp_avg[i] = store_moment<M>(m, c, run, i, Moment::kExpAvg);
      exp_avg_sq[i] = store_moment<M>(v, c, run, i, Moment::kExpAvgSq);
      master[i] = p;
      if constexpr (!std::is_same_v<W, NoWeight>) weight[i] = static_cast<W>(p);
    }
  }
}

template <class M>
void update_moments(const AdamWConstants& c, const AdamWArgs& a) {
  if (!a.weight.defined()) return update<M, NoWeight>(c, a);
  a.weight.dtype() == DType::kFloat32 ? update<M, float>(c, a) : update<M, bf16>(c, a);
}

}  // namespace

void adamw_ref(const AdamWConstants& c, const AdamWArgs& a) {
  a.exp_avg.dtype() == DType::kFloat32 ? update_moments<float>(c, a) : update_moments<bf16>(c, a);
}

}  // namespace moiety::optim::detail
