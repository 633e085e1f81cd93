// The calls that one training step makes to the executor of gtp, found without running it: the
// planner needs them to plan a layout that nobody has started yet.
//
// The order is that of transformer.cpp and its blocks. Each micro-batch makes these calls:
//
//   forward   embed (the table or its rows)
//             every layer: qkv, o, then fc1 and fc2 of a dense layer or of the shared expert,
//               then the experts' fc1 and fc2 in one call
//             head, between the two calls of its gradient, which is formed with the loss
//   backward  every layer, the last one first:
//               what memory.recompute runs again (under full: qkv and o; then the fc1 that follows,
//                 before its gradients)
//               dense or shared: fc2 dx, fc2 dw, fc1 dw, fc1 dx
//               experts: both dx in one call, between the two calls of the dw of fc2 and fc1
//               o dx, o dw, qkv dw, qkv dx
//             embed's dw, or that of its rows
//
// With moe.delay_wgrad the experts' dw, fc2's and fc1's, come before the calls of the experts of
// the next MoE layer, or before embed's; with Overlap::kWgrad too, where rows travel, fc1's alone.
//
// With Overlap::kMicroBatch a micro-batch's backward and the next one's forward take turns: where a
// MoE layer's rows have set out, the calls of the other go on.
//
// Gradients that nobody needs because parameters are frozen (needs.h) are left out, and so are the
// layers that backward does not come to.
//
// A dx reads the weight (kBwd); a dw is kGradBuffer and kGrad. Norms, router and the shared gate
// are not cut and make no calls.
#pragma once

#include <vector>

#include "moiety/gtp/layout.h"
#include "moiety/gtp/plan.h"
#include "moiety/model/config.h"
#include "moiety/model/precision.h"

namespace moiety::model {

struct StepShape {
  gtp::Grid grid;
  int64_t sequences = 1, seq_len = 1;  // per micro-batch on a data rank; tp peers share them
  int micro_batches = 1;
  DType storage = DType::kBFloat16;  // or float32
  DType wire = DType::kFloat32;      // format of gradients; or bfloat16
  // Ranks map each other's memory. Then reduces need no memory of their own, and rows of the
  // embedding move instead of the table where they are fewer bytes.
  bool mapped = true;
};

struct StepTrace {
  // Bundles have the names of the parameters; group 0 is gtp, 1 is egtp.
  std::vector<gtp::BundleSpec> bundles;
  // Events with their work, computed from shapes with the policy's rates; routing is taken to be
  // balanced.
  std::vector<gtp::TraceEvent> events;
};

// Throws Error(kInvalidArgument) naming the tensor or degree if the layout does not cut the model.
StepTrace step_trace(const Config& config, const Precision& precision, const StepShape& shape,
                     const gtp::Policy& policy);

}  // namespace moiety::model
