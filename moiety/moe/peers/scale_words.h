// Scales of rows in the layouts of GEMMs (payload.h), as kernels write them.
#pragma once

#include "moiety/moe/peers/primitives.h"
#include "moiety/quant/scale_layout_job.h"

namespace moiety::moe::peers {

// A row has words of 4 bytes that are `step` apart, the last one filled with zeros.
struct ScaleWords {
  std::byte* to;
  int64_t rows, cols, width, bytes,
      step;  // `width` of a scale, `bytes` of a row's; step 0: compact
  ScaleLayout layout;

  // Puts the scales at `from`, or zeros.
  template <class Warp>
  MOIETY_STEP void put(Warp& warp, int64_t row, const std::byte* from) const {
    std::byte* const word = to + width * quant::layout_index(layout, rows, cols, row, 0);
    warp.each(ceil_div(bytes, 4), [&](int64_t i) {
      Unit<4> held{};
      for (int64_t b = 0; b < 4 && from && 4 * i + b < bytes; ++b) held.bytes[b] = from[4 * i + b];
      store_unit<4>(word + i * step, held);
    });
  }
  // The rows that the layout adds.
  MOIETY_HD_INLINE int64_t pads() const {
    const bool any = step > 0 && layout == ScaleLayout::kSm90MnMajor;
    return any ? round_up(rows, 4) - rows : 0;
  }
};

}  // namespace moiety::moe::peers
