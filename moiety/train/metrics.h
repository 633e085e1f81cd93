// The report on a step: one line for people, one record of metrics.jsonl
// (docs/seeing.md#metricsjsonl).
#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "moiety/base/trace.h"

namespace moiety::train {

// Milliseconds that a step stands at waits for other ranks, mean over ranks.
struct WaitTimes {
  std::array<double, kWaitAxes.size()> ms{};  // by axis

  double sum_ms() const { return std::accumulate(ms.begin(), ms.end(), 0.0); }
  WaitTimes& operator+=(const WaitTimes& b) {
    for (size_t a = 0; a < ms.size(); ++a) ms[a] += b.ms[a];
    return *this;
  }
  WaitTimes operator/(double n) const {
    WaitTimes out = *this;
    for (double& x : out.ms) x /= n;
    return out;
  }
};

// The loss of a model on validation samples: of each file, and the mean over all of their tokens.
struct EvaluationLoss {
  std::string name;          // the file's path; empty for all of them
  double loss = 0;           // mean cross-entropy, nats per token
  double bits_per_byte = 0;  // of the text; NaN where the samples have none
  int64_t tokens = 0;
};
struct EvaluationResult : EvaluationLoss {
  std::vector<EvaluationLoss> files;  // in the order of the sources
  std::vector<double> balance;        // by MoE layer: pairs of the busiest expert / mean
};

// The host's actions on a rank while it enqueued a step.
struct HostActivity {
  int64_t allocations = 0;  // of memory of the GPU
  int64_t waits = 0;        // for the GPU
};

struct StepRecord {
  int64_t step = 0;    // completed steps
  int64_t steps = 0;   // steps of the whole run
  int64_t tokens = 0;  // trained on so far
  double loss = 0;     // mean cross-entropy of the valid targets, nats
  double aux = 0;      // load-balancing loss and z loss of the router, unweighted, sums over layers
  double z = 0;
  double aux_of_layer = 0;  // aux as the line shows it: comparable for any number of layers
  double grad_norm = 0;     // norm of the mean gradient, before clipping
  double lr = 0;
  double step_s = 0;  // evaluation and checkpoints excluded
  double tokens_per_s = 0;
  double tflops = 0;      // model FLOPs of one rank per second / 1e12
  double mfu = 0;         // %, of the bf16 peak
  double mfu_recipe = 0;  // %, of the recipe's peak
  double memory = 0;      // bytes
  double memory_total = 0;
  std::vector<double> balance;       // by MoE layer: pairs of the busiest expert / mean
  std::vector<double> rank_balance;  // by MoE layer: pairs of the busiest ep rank / mean
  double entropy = 0;   // entropy of the experts' shares / ln E, mean over layers; 1 is balanced
  int64_t dropped = 0;  // (token, expert) pairs
  double data_wait_ms = 0;
  WaitTimes waits;
  double comm = 0;                       // %, these waits in the step
  std::optional<HostActivity> activity;  // on a GPU
  std::optional<double>
      fill;  // share of the tokens that are no padding, where documents are packed
  bool skipped = false;
  bool forced = false;  // the router balances by force
  std::string recipe;
};

// The line for people: "step 120/1000 loss 3.4125 aux 1.031 gnorm 0.84 lr 2.9e-04 tok/s 41.2k
// TFLOP/s 312.4 MFU 31.6 mem 61.3/79.6G bal 1.18/1.42 drop 0 comm 4.1 eta 2m05s". z follows aux if
// `with_z`; eta is left out if there is none.
std::string step_line(const StepRecord& record, bool with_z, std::optional<double> eta_s);
// The record's fields; `time` is in Unix seconds.
std::string step_json(const StepRecord& record, double time);

// The pairs of the busiest part / mean, over `parts` equal parts of a layer's experts; 1 is
// balanced.
double imbalance(const int64_t* pairs, int64_t experts, int64_t parts);
// The balance of the layers; 1 if there is none.
struct Balance {
  double mean, worst;
};
Balance balance_of(const std::vector<double>& layers);
// The entropy of the experts' shares / ln E.
double balance_entropy(const int64_t* pairs, int64_t experts);

// A number with three significant digits: "41.2k", "1.31M".
std::string si_text(double value);
// A duration as text: "3s", "2m05s", "1h02m", "3d04h".
std::string duration_text(double seconds);

// An estimate of the remaining time: step time smoothed over about 50 steps, and the mean cost of
// the evaluations and of the checkpoints so far.
class Eta {
 public:
  void add_step(double seconds);
  void add_evaluation(double seconds) { evaluation_.add(seconds); }
  void add_checkpoint(double seconds) { checkpoint_.add(seconds); }
  double seconds(int64_t steps, int64_t evaluations, int64_t checkpoints) const;

 private:
  struct Mean {
    double sum = 0;
    int64_t count = 0;
    void add(double x) { sum += x, ++count; }
    double value() const { return count > 0 ? sum / double(count) : 0; }
  };
  double step_ = 0;
  int64_t steps_ = 0;
  Mean evaluation_, checkpoint_;
};

}  // namespace moiety::train
