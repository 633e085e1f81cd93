// Rank 0's reports on a training run: step lines with progress, metrics.jsonl, event files for
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
#include "moiety/train/metrics.h"
#include "moiety/train/observer.h"

namespace moiety::app {

class Reporter final : public train::Observer {
 public:
  // It touches no file before the first event.
  Reporter(const Config& config, int64_t steps, RunDirectory& directory, Console& console);
  // Draws the plots of the run, however it ends.
  ~Reporter() override;
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  // Writes a line and a record every `log.every` steps (and for the last one), each with the mean
  // time since the one before. If it is 0, every step has a record, and a second at most one line.
  void step(const train::StepRecord& record, const train::StepWork& work) override;
  // Writes a line of the run, not of rank 0.
  void say(LogLevel level, const std::string& line) override;
  // Writes a record of an event. `fields` go behind v, t, event and step. With the first one, start
  // or resume, the configuration is written.
  void event(std::string_view name, int64_t step, const JsonLine& fields) override;
  void evaluated(int64_t step, const train::EvaluationResult& result, double seconds) override;
  void saved(int64_t, double seconds) override { eta_.add_checkpoint(seconds); }
  void peaks(double bf16, double recipe) override { peak_ = bf16, recipe_peak_ = recipe; }
  // Sets the device of rank 0, of whose memory the lines tell.
  void set_device(Device device) { device_ = device; }

 private:
  // The steps since a line or a record.
  struct Since {
    train::StepWork work;
    int64_t steps = 0;

    void add(const train::StepWork& step);
  };

  double eta_seconds(int64_t step) const;
  train::StepRecord filled_in(const train::StepRecord& record, const Since& since) const;
  bool is_due(int64_t step) const;
  bool line_is_due(int64_t step) const;
  void write_line(const train::StepRecord& record, double eta);
  void write_record(const train::StepRecord& record);
  // Opens the files to which training that continues behind `step` adds.
  void open(int64_t step);
  void draw_plots();

  const Config& config_;
  const Options& options_;
  int64_t steps_;
  RunDirectory& directory_;
  Console& console_;
  train::Eta eta_;
  double peak_ = 0, recipe_peak_ = 0;
  Device device_;
  Since since_line_, since_record_;
  std::chrono::steady_clock::time_point last_line_{};
  RunHistory history_;
  bool plots_are_old_ = false, plots_failed_ = false;
  std::optional<EventWriter> tensorboard_;
};

}  // namespace moiety::app
