// AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019) over a flat
// segment, with fixed bits: spec optimizer_checkpoint, section 5.
//
// Per element, in fp32, rounded to nearest even after each operation, fma only where it stands:
//   g = grad * s
//   m = fma(b1, m, c1*g)            c1 = f32(1 - beta1)
//   v = fma(b2, v, (c2*g)*g)        c2 = f32(1 - beta2)
//   u = (m*k1) / (sqrt(v*k2) + eps)
//   p = fma(-lr, fma(wd, p, u), p)  p is the master; the weight is p, or p rounded to bf16
// Moments are stored as fp32, or as bf16 with stochastic rounding: the low 16 bits of the word of
// rng domain 2 are added to the fp32 bits, which are then cut (infinity and NaN as bf16 does it).
// Nearest rounding would freeze exp_avg_sq. u is computed from the unrounded moments.
#pragma once

#include <cstdint>
#include <span>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/optim/buffer_layout.h"

namespace moiety::optim {

struct AdamW {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;  // > 0, so that an element whose gradient was always zero stays
};

// What belongs to a step: see decide() in step_rule.h.
struct AdamWStep {
  float s = 1;   // factor of gradients: 1/tokens and clipping
  float k1 = 1;  // bias corrections
  float k2 = 1;
  double lr = 0;
  double weight_decay = 0;  // of the runs that decay
  int64_t t = 1;            // applied steps, this one included
  uint64_t seed = 0;        // of the stochastic rounding
};

struct AdamWArgs {
  TensorView grad;                   // float32 [n]
  TensorView master;                 // float32 [n]
  TensorView exp_avg, exp_avg_sq;    // float32 or bfloat16 [n]
  TensorView weight;                 // optional: float32 or bfloat16 [n]
  std::span<const ElementRun> runs;  // of the n elements; what is in no run is not touched
};

void adamw(const AdamW& adam, const AdamWStep& step, const AdamWArgs& args, Stream stream);
void adamw_reference(const AdamW& adam, const AdamWStep& step, const AdamWArgs& args,
                     Stream stream);

// The constants of a step in fp32, and the two implementations over checked arguments.
namespace detail {
struct AdamWConstants {
  AdamWConstants(const AdamW& adam, const AdamWStep& step);
  float s, b1, b2, c1, c2, k1, k2, eps, lr, wd;
  uint32_t t;
  uint64_t seed;
};
struct NoWeight {};  // in the place of an element type: no weight is stored
void adamw_ref(const AdamWConstants& constants, const AdamWArgs& args);
void adamw_cpu(const AdamWConstants& constants, const AdamWArgs& args);
}  // namespace detail

}  // namespace moiety::optim
