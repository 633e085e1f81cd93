// The two sides of the optimizer that the executor knows (docs/spec/gtp.md#executor). Both are
// called by the thread that calls the executor, in the order of its calls; neither waits for the
// device.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/gtp/sharded_weight.h"
#include "moiety/gtp/trace.h"

namespace moiety::gtp {

// Where shards come from.
class ParamSource {
 public:
  virtual ~ParamSource() = default;
  // Makes `stream` wait until the bundle's shards and its main_grads are the step's: shards
  // written and published, gradients read (E1). Called once for each bundle that a step uses,
  // before anything of it is touched.
  virtual void ensure_ready(BundleId bundle, const Stream& stream) = 0;
};

// Where gradients go.
class GradSink {
 public:
  virtual ~GradSink() = default;
  // main_grad of the weight is whole once `event` has happened (E5). Once for each trained weight
  // in a step that has gradients at all; those without contribution are zero.
  virtual void on_grad_ready(WeightId weight, const Event& event) = 0;
  // A weight that was reported gets a further contribution: the step left its recorded order.
  // Makes `stream` wait until nobody reads main_grad; what was computed of it counts no more. When
  // the contributions have been added, on_grad_ready follows again.
  virtual void on_grad_late(WeightId weight, const Stream& stream) = 0;
  // The step before ended by an exception. Gradients begin anew, those of weights too that the
  // executor does not know: what was reported and contributed counts no more. Called when the next
  // step begins, for then it may wait for whoever reads main_grads.
  virtual void on_step_abandoned() {}
};

}  // namespace moiety::gtp
