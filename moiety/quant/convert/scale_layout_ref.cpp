#include <cstring>

#include "moiety/quant/scale_layout_job.h"

namespace moiety::quant {

void convert_scales_reference(const ScaleMatrix& in, ScaleLayout layout, uint8_t* out) {
  std::memset(out, 0, in.width * layout_scales(layout, in.rows, in.cols));
  for (int64_t r = 0; r < in.rows; ++r) {
    for (int64_t c = 0; c < in.cols; ++c) {
      std::memcpy(out + in.width * layout_index(layout, in.rows, in.cols, r, c),
                  in.data + in.width * in.index(r, c), in.width);
    }
  }
}

}  // namespace moiety::quant
