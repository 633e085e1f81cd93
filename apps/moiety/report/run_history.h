// The history of a run, read from metrics.jsonl for plots.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moiety::app {

enum class Metric {
  kLoss,
  kAux,
  kZ,
  kGradNorm,
  kLr,
  kTokensPerSecond,
  kTflops,
  kMfu,
  kStepMs,
  kDataWaitMs,
  kComm,
  kMemory,
  kBalanceMean,   // mean over layers
  kBalanceWorst,  // the worst layer
  kEntropy,
  kDropped,
};
inline constexpr int kMetrics = 16;

// The value of a quantity that a record does not have.
inline constexpr float kAbsent = std::numeric_limits<float>::lowest();

struct StepPoint {
  int64_t step = 0;
  double tokens = 0;
  double time = 0;  // of the clock; in a RunHistory: seconds of training, pauses left out
  std::array<float, kMetrics> value{};

  float& of(Metric m) { return value[static_cast<int>(m)]; }
  float of(Metric m) const { return value[static_cast<int>(m)]; }
};

struct EvaluationPoint {
  int64_t step = 0;
  double tokens = 0;  // trained on until this step
  double time = 0;
  double loss = 0;                                      // the mean over all files
  std::vector<std::pair<std::string, double>> files{};  // each file's, where there are several
};

class RunHistory {
 public:
  // The run starts or continues behind `step`: records of later steps are dropped. `branch`, above
  // 0, is the one that it follows from now on: where that is a new one, behind `parent`'s records.
  void restart(int64_t step, double time, int64_t branch = 0, int64_t parent = 0);
  // Adds a step. One that is not behind the last one begins anew there.
  void add(StepPoint point);
  // `point.time` is of the clock.
  void add_evaluation(EvaluationPoint point);

  std::span<const StepPoint> steps() const { return steps_; }
  std::span<const EvaluationPoint> evaluations() const { return evaluations_; }

 private:
  struct Records {
    std::vector<StepPoint> steps;
    std::vector<EvaluationPoint> evaluations;
  };

  void drop_after(int64_t step);
  void follow(int64_t branch, int64_t parent);

  std::vector<StepPoint> steps_;
  std::vector<EvaluationPoint> evaluations_;
  int64_t branch_ = 1;
  std::map<int64_t, Records> others_;  // by branch, as each was left
  double pause_ = 0;                   // clock - seconds of training
  bool running_ = false;
};

// Adds one record. False if the line is none, such as the last line of a run that was killed.
bool add_record(std::string_view line, RunHistory& history);

// The records of DIR/metrics.jsonl (or of a file of that kind). Throws DataError if there is none.
RunHistory read_history(const std::filesystem::path& path);

}  // namespace moiety::app
