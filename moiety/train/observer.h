// What a training tells its caller, on rank 0 alone and from rank 0's thread. Every function does
// nothing until it is overridden; what one throws ends the run.
#pragma once

#include <string>
#include <string_view>

#include "moiety/base/json_line.h"
#include "moiety/base/log.h"
#include "moiety/train/metrics.h"

namespace moiety::train {

// What a step took, for times and rates: seconds, tokens, model FLOPs of one rank, milliseconds
// that rank 0 waited for data and, mean over ranks, for other ranks.
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

  // A step is complete. `record` holds what belongs to the step; its times, rates, MFU and memory
  // are 0: they follow from `work`, over as many steps as the caller likes.
  virtual void step(const StepRecord& /*record*/, const StepWork& /*work*/) {}
  // "start" or "resume" first, then "eval", "checkpoint", "skip", "halt", "stop"
  // (docs/seeing.md#metricsjsonl says their fields). `step`: completed steps.
  virtual void event(std::string_view /*name*/, int64_t /*step*/, const JsonLine& /*fields*/) {}
  // A line for people.
  virtual void say(LogLevel /*level*/, const std::string& /*line*/) {}

  // After `step` steps, in `seconds`: the loss of validation samples, and a checkpoint's part that
  // held training up.
  virtual void evaluated(int64_t /*step*/, const EvaluationResult& /*result*/, double /*seconds*/) {
  }
  virtual void saved(int64_t /*step*/, double /*seconds*/) {}

  // TFLOP/s of a rank that MFU refers to: bf16, and the recipe's.
  virtual void peaks(double /*bf16*/, double /*recipe*/) {}
};

}  // namespace moiety::train
