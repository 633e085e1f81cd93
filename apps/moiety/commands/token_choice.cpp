#include "apps/moiety/commands/token_choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "moiety/base/rng.h"

namespace moiety::app {

int32_t TokenChoice::choose(std::span<const float> logits, uint32_t n, uint32_t b) {
  if (rules_.temperature == 0) {
    return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  const auto likelier = [&](int32_t i, int32_t j) { return logits[i] > logits[j]; };
  std::stable_sort(order_.begin(), order_.end(), likelier);
  size_t kept = order_.size();
  if (rules_.top_k > 0) kept = std::min<size_t>(kept, rules_.top_k);

  weight_.resize(kept);
  double total = 0;
  for (size_t i = 0; i < kept; ++i) {
    const double above = double(logits[order_[i]]) - double(logits[order_[0]]);
    total += weight_[i] = std::exp(above / rules_.temperature);
  }
  double share = 0;
  for (size_t i = 0; i < kept; ++i) {
    share += weight_[i];
    if (share >= rules_.top_p * total) kept = i + 1;
  }
  const PhiloxKey key = rng_key(rules_.seed, RngDomain::kGeneration);
  const double u = (double(philox(key, {n, b, 0, 0})[0]) + 0.5) * 0x1p-32;
  double left = u * share;
  for (size_t i = 0; i + 1 < kept; ++i) {
    left -= weight_[i];
    if (left < 0) return order_[i];
  }
  return order_[kept - 1];
}

}  // namespace moiety::app
