// AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019) over flat
// segments, with fixed bits: docs/spec/optimizer.md#adamw.
//
// Each element is computed in fp32, rounded to nearest even after each operation; fma is used
// exactly where it stands:
//    g = grad * s
//    m = fma(b1, m, c1*g)            c1 = f32(1 - beta1)
//    v = fma(b2, v, (c2*g)*g)        c2 = f32(1 - beta2)
//    u = (m*k1) / (sqrt(v*k2) + eps)
//    p = fma(-lr, fma(wd, p, u), p)  p is the master; the weight is p, or p rounded to bf16
// Moments are stored as fp32, or as bf16 with stochastic rounding: the low 16 bits of the word of
// rng domain 2 are added to the fp32 bits, which are then cut (infinity and NaN are converted as
// bf16 does it). Rounding to nearest would freeze exp_avg_sq. u is computed from the unrounded
// moments.
//
// A GPU gives the same bits, except for the payload of a NaN in fp32.
#pragma once

#include <cstdint>
#include <memory>
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

// The numbers of one step, as step_rule (step_rule.h) writes them. They lie in memory of the
// stream's device and are read when the operation runs.
struct AdamWStep {
  float s = 1;   // factor of gradients: 1/tokens and clipping
  float k1 = 1;  // bias corrections
  float k2 = 1;
  float lr = 0;
  float wd = 0;      // weight decay, for the runs that decay
  uint32_t t = 1;    // applied steps, this one included
  int32_t skip = 0;  // if not 0 nothing changes
  uint32_t unused = 0;
};
static_assert(sizeof(AdamWStep) == 32);

struct AdamWArgs {
  TensorView grad;                 // float32 or bfloat16 [n]
  TensorView master;               // float32 [n]
  TensorView exp_avg, exp_avg_sq;  // float32 or bfloat16 [n], the same in all segments
  TensorView weight;               // optional: float32 or bfloat16 [n]
  // ranges of the n elements; elements in no run stay as they are
  std::span<const ElementRun> runs;
};

// The segments of all buckets, made once. Their tensors lie on `device` and outlive the table; runs
// are copied. Copies are cheap and share the table's contents. Making a table allocates, and waits
// for a GPU.
class AdamWTable {
 public:
  AdamWTable() = default;  // a table without segments
  AdamWTable(std::span<const AdamWArgs> segments, Device device);

  struct Impl;

 private:
  friend void adamw(const AdamW&, uint64_t, TensorView, const AdamWTable&, Stream);
  friend void adamw_reference(const AdamW&, uint64_t, TensorView, const AdamWTable&, Stream);
  std::shared_ptr<const Impl> impl_;
};

// Updates all segments of the table. `seed` is that of stochastic rounding; `step` is an AdamWStep,
// uint8 [32], aligned to 4. The stream is of the table's device; on a GPU the update is one launch.
// The reference runs on the CPU.
void adamw(const AdamW& adam, uint64_t seed, TensorView step, const AdamWTable& table,
           Stream stream);
void adamw_reference(const AdamW& adam, uint64_t seed, TensorView step, const AdamWTable& table,
                     Stream stream);

}  // namespace moiety::optim
