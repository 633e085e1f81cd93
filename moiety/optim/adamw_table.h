// The contents of an AdamWTable, and the implementations over checked arguments. Internal to
// moiety/optim.
#pragma once

#include <cmath>
#include <vector>

#include "moiety/base/rng.h"
#include "moiety/optim/adamw.h"

namespace moiety::optim {
namespace detail {
// The constants of a run in fp32.
struct AdamWConstants {
  AdamWConstants(const AdamW& adam, uint64_t seed)
      : b1(static_cast<float>(adam.beta1)),
        b2(static_cast<float>(adam.beta2)),
        c1(static_cast<float>(1 - adam.beta1)),
        c2(static_cast<float>(1 - adam.beta2)),
        eps(static_cast<float>(adam.eps)),
        key(rng_key(seed, RngDomain::kMoments)) {}
  float b1, b2, c1, c2, eps;
  PhiloxKey key;  // key of stochastic rounding
};

// An element's moments and master after a step, before they are rounded to be stored.
struct AdamWElement {
  float m, v, p;
};
MOIETY_HD_INLINE AdamWElement update_element(const AdamWConstants& c, const AdamWStep& x, float wd,
                                             float grad, AdamWElement old) {
  const float g = grad * x.s;
  const float m = std::fma(c.b1, old.m, c.c1 * g);
  const float v = std::fma(c.b2, old.v, (c.c2 * g) * g);
  const float u = (m * x.k1) / (std::sqrt(v * x.k2) + c.eps);
  return {m, v, std::fma(-x.lr, std::fma(wd, old.p, u), old.p)};
}

struct NoWeight {};  // stands for an element type: no weight is stored

struct AdamWDeviceTable;  // adamw_cuda.cu
std::shared_ptr<const AdamWDeviceTable> make_device_table(std::span<const AdamWArgs> segments,
                                                          Device device);

void adamw_ref(const AdamWConstants& constants, const AdamWStep& step, const AdamWArgs& args);
void adamw_cpu(const AdamWConstants& constants, const AdamWStep& step, const AdamWArgs& args);
void adamw_cuda(const AdamWConstants& constants, TensorView step, const AdamWDeviceTable& table,
                const Stream& stream);
}  // namespace detail

struct AdamWTable::Impl {
  Device device;
  std::vector<ElementRun> runs;     // runs of all segments, into which their spans point
  std::vector<AdamWArgs> segments;  // segments that have runs
  int64_t elements = 0;             // number of elements in runs
  std::shared_ptr<const detail::AdamWDeviceTable> on_gpu;
};

}  // namespace moiety::optim
