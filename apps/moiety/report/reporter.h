// What rank 0 says about a training run: step lines with progress, metrics.jsonl, event files for
// TensorBoard, plots.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "apps/moiety/config/options.h"
#include "apps/moiety/report/console.h"
#include "apps/moiety/report/run_directory.h"
#include "apps/moiety/report/run_history.h"
#include "apps/moiety/report/tensorboard.h"
#include "moiety/base/json_line.h"
#include "moiety/base/log.h"
#include "moiety/train/memory_use.h"
#include "moiety/train/metrics.h"

namespace moiety::app {

class Reporter {
 public:
  // Touches no file before the first event.
  Reporter(const Options& options, int64_t steps, RunDirectory& directory, Console& console);
  // However the run ends, its plots are drawn.
  ~Reporter();
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  // Every `log.every` steps (and the last) a line and a record, with the mean time since the last
  // ones. `record` holds what belongs to the step; times and rates are filled in here: `seconds` of
  // the step, its tokens, model FLOPs of one rank, milliseconds that it waited for data and, mean
  // over ranks, for other ranks.
  struct Work {
    double seconds = 0;
    double tokens = 0;
    double flops = 0;
    double data_wait_ms = 0;
    WaitTimes waits = {};
  };
  void step(StepRecord record, const Work& work);

  // A line of the run, not of rank 0.
  template <class... Args>
  void say(LogLevel level, std::string_view format, const Args&... args) {
    const int rank = log_rank();
    set_log_rank(-1);
    log_line(level, text(format, args...));
    set_log_rank(rank);
  }

  // A record of an event. `fields` go behind v, t, event and step. The first one is start or
  // resume.
  void event(std::string_view name, int64_t step, const JsonLine& fields = {});
  void evaluation(double seconds) { eta_.add_evaluation(seconds); }
  void checkpoint(double seconds) { eta_.add_checkpoint(seconds); }

  // TFLOP/s of a rank that MFU refers to: bf16, and the recipe's.
  void set_peaks(double bf16, double recipe) { peak_ = bf16, recipe_peak_ = recipe; }
  // Where rank 0 computes: whose memory the lines tell of.
  void set_device(Device device) { device_ = device; }

 private:
  double eta_seconds(int64_t step) const;
  void fill_in(StepRecord& record) const;
  // What training that goes on behind `step` adds to.
  void open(int64_t step);
  void draw_plots();

  const Options& options_;
  int64_t steps_;
  RunDirectory& directory_;
  Console& console_;
  Eta eta_;
  double peak_ = 0, recipe_peak_ = 0;
  Device device_;
  Work since_line_;
  int64_t steps_since_line_ = 0;
  RunHistory history_;
  bool plots_are_old_ = false, plots_failed_ = false;
  std::optional<EventWriter> tensorboard_;
};

// Seconds between calls.
class Stopwatch {
 public:
  double lap() {
    const auto now = Clock::now();
    const std::chrono::duration<double> d = now - start_;
    start_ = now;
    return d.count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace moiety::app
