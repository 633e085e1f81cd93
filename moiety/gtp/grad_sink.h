// The two sides of the optimizer that the executor knows (docs/spec/gtp.md#executor). The thread
// that calls the executor calls both, in the order of the executor's calls; neither waits for the
// device.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/gtp/sharded_weight.h"
#include "moiety/gtp/trace.h"

namespace moiety::gtp {

// The source of shards.
class ParamSource {
 public:
  virtual ~ParamSource() = default;
  // Makes `stream` wait until the bundle's shards and main_grads are those of the step: shards
  // written and published, gradients read (E1). Called once for each bundle that a step uses,
  // before anything of it is touched.
  virtual void ensure_ready(BundleId bundle, const Stream& stream) = 0;
};

// The receiver of gradients.
class GradSink {
 public:
  virtual ~GradSink() = default;
  // Says that main_grad of the weight is complete once `event` has happened (E5). Called once for
  // each trained weight in a step that has any gradients; those without contribution are zero.
  virtual void on_grad_ready(WeightId weight, const Event& event) = 0;
  // Says that a weight that was reported gets a further contribution, since the step left its
  // recorded order. Makes `stream` wait until nobody reads main_grad; results computed from it are
  // void. When the contributions have been added, on_grad_ready follows again.
  virtual void on_grad_late(WeightId weight, const Stream& stream) = 0;
  // Says that the step before ended by an exception. Gradients begin anew, also those of weights
  // that the executor does not know: reports and contributions are void. Called when the next step
  // begins, since it may then wait for readers of main_grads.
  virtual void on_step_abandoned() {}
};

}  // namespace moiety::gtp
