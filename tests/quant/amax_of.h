// The value that an AmaxSink must hold: the bits of compute_amax of a matrix, or of each of its
// groups.
#pragma once

#include <bit>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/quant/quantize.h"
#include "tests/support/bits.h"

namespace moiety::quant {

inline std::vector<uint32_t> amax_of(const TensorView& x, const RowGroups* groups) {
  const int64_t n = groups ? groups->experts : 1;
  if (n == 0) return {};
  const Tensor amax(DType::kFloat32, {2, n});
  QuantizedView view;
  view.spec = QuantSpec::of(Format::kNvfp4);
  view.rows = x.size(0);
  view.cols = x.size(1);
  view.amax = view.tensor_scale =
      groups ? amax.view() : TensorView(amax.view().raw(), DType::kFloat32, {2});
  groups ? compute_amax_grouped(x, *groups, view, {}, {}) : compute_amax(x, view, {}, {});
  const auto* bits = static_cast<const uint32_t*>(amax.view().raw());
  return {bits, bits + n};
}

}  // namespace moiety::quant
