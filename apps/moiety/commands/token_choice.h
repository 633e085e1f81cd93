// The choice of the next token of a generated text.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace moiety::app {

struct ChoiceRules {
  double temperature = 0;  // 0: the likeliest token
  int64_t top_k = 0;       // only the k likeliest tokens; 0: all
  double top_p = 1;        // of those the fewest that together have at least this share
  uint64_t seed = 0;
};

class TokenChoice {
 public:
  explicit TokenChoice(const ChoiceRules& rules) : rules_(rules) {}

  // Chooses by temperature, then top-k, then top-p. Equal logits go by ascending index. Token `n`
  // of sequence `b` has a random number of its own (docs/spec/README.md#random-numbers), so choices
  // do not depend on batching.
  int32_t choose(std::span<const float> logits, uint32_t n, uint32_t b = 0);

 private:
  ChoiceRules rules_;
  std::vector<int32_t> order_;
  std::vector<double> weight_;
};

}  // namespace moiety::app
