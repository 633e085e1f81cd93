// The model of docs/spec/trainer.md#forward written down once more, in double, without blocks,
// fusion or saved state: what the tests compare with. Weights go by their checkpoint names.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "moiety/model/config.h"

namespace moiety::model {

using Weights = std::map<std::string, std::vector<double>>;

struct NaiveBatch {
  int64_t sequences = 0, seq_len = 0;
  std::vector<int32_t> token, target;
  std::vector<uint8_t> mask;      // empty: all targets count
  std::vector<int32_t> position;  // empty: no documents
  int64_t tokens() const { return sequences * seq_len; }
  bool is_target(int64_t t) const { return target[t] != -100 && (mask.empty() || mask[t]); }
};

// The chosen experts of every token, by MoE layer: [layer][t * K + k].
using Choice = std::vector<std::vector<int64_t>>;

struct NaiveResult {
  std::vector<double> logits;  // [T, V]
  std::vector<double> loss;    // [T]
  double loss_sum = 0;
  double aux = 0, z = 0;  // of the micro-batch, without coefficients
  double objective = 0;   // what backward is the gradient of
  Choice choice;
};

// `choice`: empty, or the experts to use instead of the best (so that the objective is smooth).
NaiveResult naive_forward(const Config& config, const Weights& weights, const NaiveBatch& batch,
                          const Choice& choice = {});

}  // namespace moiety::model
