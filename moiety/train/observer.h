// The words of a training to its caller, only on rank 0 and from rank 0's thread. Every function
// does nothing until it is overridden; an exception from one ends the run.
#pragma once

#include <string>
#include <string_view>

#include "moiety/base/json_line.h"
#include "moiety/base/log.h"
#include "moiety/train/metrics.h"

namespace moiety::train {

// The work of a step, for times and rates: seconds, tokens, model FLOPs of one rank, milliseconds
// that rank 0 waited for data and, as a mean over ranks, for other ranks.
struct StepWork {
  double seconds = 0;
  double tokens = 0;
  double flops = 0;
  double data_wait_ms = 0;
  WaitTimes waits = {};
};

class Observer {
 public:
  virtual ~Observer() = default;

  // A step is complete. `record` holds the values of the step; its times, rates, MFU and memory are
  // 0, since they follow from `work`, over as many steps as the caller likes.
  virtual void step(const StepRecord& /*record*/, const StepWork& /*work*/) {}
  // An event: "start" or "resume" first, then "eval", "checkpoint", "skip", "halt", "stop"
  // (docs/seeing.md#metricsjsonl has their fields). `step` counts completed steps.
  virtual void event(std::string_view /*name*/, int64_t /*step*/, const JsonLine& /*fields*/) {}
  // A line for people.
  virtual void say(LogLevel /*level*/, const std::string& /*line*/) {}

  // The results of an evaluation and of a checkpoint after `step` steps; `seconds` is the time for
  // which each held training up.
  virtual void evaluated(int64_t /*step*/, const EvaluationResult& /*result*/, double /*seconds*/) {
  }
  virtual void saved(int64_t /*step*/, double /*seconds*/) {}

  // The TFLOP/s of a rank that MFU refers to: for bf16, and for the recipe.
  virtual void peaks(double /*bf16*/, double /*recipe*/) {}
};

}  // namespace moiety::train
