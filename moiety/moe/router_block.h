// The router's arithmetic for a block of tokens: the reference. Internal. These are templates, so
// that gradient checks run them in double, and inlined by force, so that router_cpu.cpp compiles
// them for every instruction set; router_cuda.cu follows them lane by lane.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "moiety/base/host_device.h"
#include "moiety/base/math.h"
#include "moiety/moe/router.h"

namespace moiety::moe::detail {

inline constexpr int64_t kMaxExperts = 4096;
inline constexpr int64_t kMaxTopK = 32;
inline constexpr int64_t kBlock = 64;  // tokens whose statistics are summed in fp32

// The blocks of tokens over which statistics are summed: they start anew at each segment.
struct Blocks {
  int64_t segment_tokens;
  int64_t per_segment;
  int64_t count;

  Blocks(int64_t tokens, int64_t segments)
      : segment_tokens(segments > 0 ? tokens / segments : 0),
        per_segment((segment_tokens + kBlock - 1) / kBlock),
        count(per_segment * segments) {}
  MOIETY_HD int64_t segment(int64_t i) const { return i / per_segment; }
  MOIETY_HD int64_t begin(int64_t i) const {
    return segment(i) * segment_tokens + i % per_segment * kBlock;
  }
  MOIETY_HD int64_t end(int64_t i) const {
    return std::min(begin(i) + kBlock, (segment(i) + 1) * segment_tokens);
  }
};

// A number that is added to divisors that could be 0 (all scores of a token underflow); it is too
// small to change others.
template <class T>
inline constexpr T kTiny = T(1e-20);

// Whether a is chosen before b, which has a smaller index.
template <class T>
MOIETY_HD_INLINE bool exceeds(T a, T b) {
  return a > b || (b != b && a == a);
}

// out[0..k) := the indices of the k first of c[0..n) by (descending value, index), NaN last.
template <class T>
MOIETY_INLINE void choose_largest(const T* c, int64_t n, int64_t k, int32_t* out) {
  int64_t size = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (size == k && !exceeds(c[i], c[out[k - 1]])) continue;
    int64_t j = size < k ? size++ : k - 1;
    for (; j > 0 && exceeds(c[i], c[out[j - 1]]); --j) out[j] = out[j - 1];
    out[j] = static_cast<int32_t>(i);
  }
}

// Sets c := -inf outside the best groups.
template <class T>
MOIETY_INLINE void keep_best_groups(const RouterConfig& config, T* c) {
  const int64_t size = config.experts / config.groups;
  std::array<T, kMaxExperts> score;
  std::array<int32_t, kMaxExperts> order;
  for (int64_t g = 0; g < config.groups; ++g) {
    const T* group = c + g * size;
    choose_largest(group, size, std::min<int64_t>(size, 2), order.data());
    score[g] = size > 1 ? group[order[0]] + group[order[1]] : group[0];
  }
  choose_largest(score.data(), config.groups, config.groups, order.data());
  for (int64_t i = config.group_top_k; i < config.groups; ++i) {
    std::fill_n(c + order[i] * size, size, -std::numeric_limits<T>::infinity());
  }
}

// p := softmax(x); returns log(sum exp(x)).
template <class T>
MOIETY_INLINE T softmax(const T* x, int64_t n, T* p) {
  T largest = -std::numeric_limits<T>::infinity();
  for (int64_t e = 0; e < n; ++e) largest = x[e] > largest ? x[e] : largest;
  for (int64_t e = 0; e < n; ++e) p[e] = exp_nonpositive(x[e] - largest);
  const T sum = lane_sum<T>(n, [&](T v, int64_t e) { return v + p[e]; });
  for (int64_t e = 0; e < n; ++e) p[e] /= sum;
  return largest + log(sum);
}

// The values of a token that follow from its logits alone.
template <class T>
struct Scores {
  std::array<T, kMaxExperts> softmax;
  std::array<T, kMaxExperts> sigmoid;  // used only with Score::kSigmoid
  T lse;
  const T* p;  // the scores
  T divisor;   // q is p / divisor

  MOIETY_INLINE void compute(const RouterConfig& config, const T* x) {
    const int64_t n = config.experts;
    lse = detail::softmax(x, n, softmax.data());
    p = softmax.data();
    divisor = 1;
    if (config.score == Score::kSigmoid) {
      for (int64_t e = 0; e < n; ++e) sigmoid[e] = moiety::sigmoid(x[e]);
      p = sigmoid.data();
      divisor = kTiny<T> + lane_sum<T>(n, [&](T v, int64_t e) { return v + sigmoid[e]; });
    }
  }
  // The divisor such that the weights of the chosen are scale * p / divisor.
  MOIETY_INLINE T weight_divisor(const RouterConfig& config, const int32_t* idx) const {
    if (!config.renormalize) return 1;
    T z = p[idx[0]];
    for (int64_t k = 1; k < config.top_k; ++k) z += p[idx[k]];
    return z + kTiny<T>;
  }
};

template <class T>
struct ForwardRows {
  RouterConfig config;
  const T* logits;       // [T, E]
  const T* bias;         // [E] or null
  const uint8_t* mask;   // [T] or null
  const int32_t* given;  // [T, K] or null: the choice
  int32_t* idx;          // [T, K]
  T* weight;             // [T, K]
};

// Whether the choice of token t is given, but is none.
template <class T>
MOIETY_HD_INLINE bool given_none(const ForwardRows<T>& rows, int64_t t) {
  const int64_t top_k = rows.config.top_k;
  for (int64_t k = 0; rows.given && k < top_k; ++k) {
    const int32_t e = rows.given[t * top_k + k];
    if (e < 0 || e >= rows.config.experts) return true;
  }
  return false;
}

// Routes tokens [begin, end), at most kBlock; overwrites count and sum [E+1] with their statistics.
template <class T>
MOIETY_INLINE void forward_block(const ForwardRows<T>& rows, int64_t begin, int64_t end,
                                 int32_t* count, T* sum) {
  const RouterConfig& config = rows.config;
  const int64_t n = config.experts, top_k = config.top_k;
  Scores<T> scores;
  std::array<T, kMaxExperts> c;
  std::fill_n(count, n + 1, 0);
  std::fill_n(sum, n + 1, T(0));
  for (int64_t t = begin; t < end; ++t) {
    int32_t* idx = rows.idx + t * top_k;
    T* weight = rows.weight + t * top_k;
    if ((rows.mask && !rows.mask[t]) || given_none(rows, t)) {
      std::fill_n(idx, top_k, -1);
      std::fill_n(weight, top_k, T(0));
      continue;
    }
    scores.compute(config, rows.logits + t * n);
    const T* p = scores.p;
    if (rows.given) {
      std::copy_n(rows.given + t * top_k, top_k, idx);
    } else if (config.force_balance) {
      for (int64_t k = 0; k < top_k; ++k) idx[k] = static_cast<int32_t>((t * top_k + k) % n);
    } else {
      for (int64_t e = 0; e < n; ++e) c[e] = rows.bias ? p[e] + rows.bias[e] : p[e];
      if (config.groups > 1) keep_best_groups(config, c.data());
      choose_largest(c.data(), n, top_k, idx);
    }
    const T z = scores.weight_divisor(config, idx);
    for (int64_t k = 0; k < top_k; ++k) {
      weight[k] = T(config.scale) * p[idx[k]] / z;
      ++count[idx[k]];
    }
    ++count[n];
    for (int64_t e = 0; e < n; ++e) sum[e] += p[e] / scores.divisor;
    sum[n] += scores.lse * scores.lse;
  }
}

template <class T>
struct BackwardRows {
  RouterConfig config;
  const T* logits;     // [T, E]
  const int32_t* idx;  // [T, K]
  const T* dweight;    // [T, K]
  T* dlogits;          // [T, E]
};

// dp += the gradient that flows from dweight back through the weights of the chosen.
template <class T>
MOIETY_INLINE void add_weight_gradient(const RouterConfig& config, const Scores<T>& scores,
                                       const int32_t* idx, const T* dweight, T* dp) {
  const T z = scores.weight_divisor(config, idx);
  const T scale = T(config.scale);
  T mean = 0;  // mean of dweight, weighted by the weights before the scale
  if (config.renormalize) {
    for (int64_t k = 0; k < config.top_k; ++k) mean += dweight[k] * (scores.p[idx[k]] / z);
  }
  for (int64_t k = 0; k < config.top_k; ++k) dp[idx[k]] += scale / z * (dweight[k] - mean);
}

// Backward of tokens [begin, end) of one segment. dq [E] is the auxiliary loss's part of the
// gradient of q (null: none); z_slope * lse * softmax is the z loss's part of that of the logits.
template <class T>
MOIETY_INLINE void backward_block(const BackwardRows<T>& rows, int64_t begin, int64_t end,
                                  const T* dq, T z_slope) {
  const RouterConfig& config = rows.config;
  const int64_t n = config.experts;
  Scores<T> scores;
  std::array<T, kMaxExperts> dp;
  for (int64_t t = begin; t < end; ++t) {
    const int32_t* idx = rows.idx + t * config.top_k;
    T* dx = rows.dlogits + t * n;
    if (idx[0] < 0) {
      std::fill_n(dx, n, T(0));
      continue;
    }
    scores.compute(config, rows.logits + t * n);
    const T* p = scores.p;
    std::fill_n(dp.data(), n, T(0));
    add_weight_gradient(config, scores, idx, rows.dweight + t * config.top_k, dp.data());
    if (config.score == Score::kSoftmax) {
      if (dq) {
        for (int64_t e = 0; e < n; ++e) dp[e] += dq[e];
      }
      const T dot = lane_sum<T>(n, [&](T v, int64_t e) { return v + dp[e] * p[e]; });
      for (int64_t e = 0; e < n; ++e) dx[e] = p[e] * (dp[e] - dot);
    } else {
      if (dq) {
        const T z = scores.divisor;
        const T dot = lane_sum<T>(n, [&](T v, int64_t e) { return v + dq[e] * (p[e] / z); });
        for (int64_t e = 0; e < n; ++e) dp[e] += (dq[e] - dot) / z;
      }
      for (int64_t e = 0; e < n; ++e) dx[e] = dp[e] * p[e] * (T(1) - p[e]);
    }
    if (z_slope != 0) {
      const T factor = z_slope * scores.lse;
      for (int64_t e = 0; e < n; ++e) dx[e] += factor * scores.softmax[e];
    }
  }
}

// The slope of the auxiliary loss in the mean of q_e, before its coefficient: f_e of
// docs/spec/trainer.md#router.
MOIETY_HD inline double aux_slope(const RouterConfig& config, int64_t count, int64_t tokens) {
  if (tokens == 0) return 0;
  const double share = static_cast<double>(count) / static_cast<double>(tokens);
  const double choices = config.aux == AuxLoss::kHf ? 1.0 : static_cast<double>(config.top_k);
  return static_cast<double>(config.experts) * share / choices;
}

// The number of tokens over which that mean is taken: those of the scope for `sequence`, else those
// of the statistics (which for `hf` hold those of every layer).
MOIETY_HD inline int64_t aux_tokens(const RouterConfig& config, int64_t stats_tokens,
                                    int64_t scope_tokens) {
  return config.aux == AuxLoss::kSequence ? scope_tokens : stats_tokens;
}

// n / tokens times the coefficient of a loss that is a mean over the tokens. `scope` is {n, N}.
MOIETY_HD inline double loss_factor(double coef, const int64_t* scope, int64_t tokens) {
  if (tokens <= 0) return 0;
  return coef * (static_cast<double>(scope[0]) / static_cast<double>(tokens));
}

// Arguments of backward_block: dq[e] of a segment whose counts are `count` [E+1], if there is an
// auxiliary loss, and z_slope.
MOIETY_HD inline bool has_aux(const RouterConfig& config) {
  return config.aux != AuxLoss::kNone && config.aux_coef != 0;
}
MOIETY_HD inline float aux_gradient(const RouterConfig& config, const int64_t* count,
                                    const int64_t* scope, int64_t e) {
  const int64_t tokens = count[config.experts];
  const double factor = loss_factor(config.aux_coef, scope, aux_tokens(config, tokens, scope[1]));
  return static_cast<float>(factor * aux_slope(config, count[e], tokens));
}
MOIETY_HD inline float z_slope(const RouterConfig& config, const int64_t* scope) {
  return static_cast<float>(loss_factor(2.0 * config.z_coef, scope, scope[1]));
}

// One bias after a step of router_update_bias; `total` is the sum of the counts.
MOIETY_HD inline float moved_bias(float bias, float rate, int64_t total, int64_t experts,
                                  int64_t count) {
  const int64_t lack = total - experts * count;  // has the sign of mean - c_e, in integers
  if (lack == 0) return bias;
  return bias + (lack > 0 ? rate : -rate);
}

// The blocks with fixed bits, which router_cpu.cpp defines for each instruction set.
void forward_block_cpu(const ForwardRows<float>& rows, int64_t begin, int64_t end, int32_t* count,
                       float* sum);
void backward_block_cpu(const BackwardRows<float>& rows, int64_t begin, int64_t end,
                        const float* dq, float z_slope);

// The parts of router_forward after the product, and of router_backward before the products.
void forward_rows(const RouterConfig& config, const RouterChooseArgs& args);
void backward_rows(const RouterConfig& config, const RouterChooseBackwardArgs& args);

}  // namespace moiety::moe::detail
