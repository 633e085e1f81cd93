#include "moiety/moe/dispatch_ref.h"

namespace moiety::moe::ref {

void dispatch(const Plan& plan, const QuantizedBytes& bytes, const QuantizedRows& x,
              const PerRank<float>* w, bool zero_tail, QuantizedRows& rows,
              PerRank<float>& slot_w) {
  PerRank<float> none(plan.rank.size());
  dispatch<uint8_t, float>(plan, bytes.data, x.data, w, zero_tail, rows.data, slot_w);
  dispatch<uint8_t, float>(plan, bytes.scales, x.scales, nullptr, zero_tail, rows.scales, none);
  if (bytes.row_scale == 0) return;
  dispatch<uint8_t, float>(plan, bytes.row_scale, x.row_scale, nullptr, zero_tail, rows.row_scale,
                           none);
}

std::vector<uint8_t> swizzled_scales(const Plan::Rank& rank, int64_t capacity, int64_t cols,
                                     bool zero_tail, const std::vector<uint8_t>& compact,
                                     uint8_t before) {
  const int64_t quads = (cols + 3) / 4, written = zero_tail ? capacity : rank.offset.back();
  std::vector<uint8_t> out((capacity + 127) / 128 * 512 * quads, before);
  for (int64_t r = 0; r < written; ++r) {
    for (int64_t c = 0; c < 4 * quads; ++c) {
      const int64_t tile = r / 128 * quads + c / 4;
      const int64_t at = 512 * tile + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
      out[at] = c < cols ? compact[r * cols + c] : 0;
    }
  }
  return out;
}

std::vector<uint8_t> column_major_scales(const Plan::Rank& rank, int64_t capacity, int64_t cols,
                                         bool zero_tail, const std::vector<uint8_t>& compact,
                                         uint8_t before) {
  const int64_t leading = (capacity + 3) / 4 * 4;
  const int64_t written = zero_tail ? capacity : rank.offset.back();
  std::vector<uint8_t> out(4 * cols * leading, before);
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = 0; r < leading; ++r) {
      for (int64_t byte = 0; byte < 4; ++byte) {
        uint8_t& to = out[4 * (c * leading + r) + byte];
        if (r < written) to = compact[4 * (r * cols + c) + byte];
        if (r >= capacity) to = 0;
      }
    }
  }
  return out;
}

}  // namespace moiety::moe::ref
