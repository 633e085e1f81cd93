// The jobs of the groups of a grouped tensor, on host and device. Internal to moiety/quant.
#pragma once

#include <cstdint>

#include "moiety/base/host_device.h"
#include "moiety/quant/quantize/quantize_job.h"

namespace moiety::quant {

// The rows that a group claims, and whether the claim is possible.
struct Claim {
  int64_t begin, rows;
  bool valid;
};
// `begin` and `next` are begin[e] and begin[e + 1]; `count` is null if groups are tight.
MOIETY_HD inline Claim claim(int64_t begin, int64_t next, const int64_t* count, int64_t capacity) {
  const bool ordered = begin >= 0 && next >= begin;
  const int64_t room = ordered ? next - begin : 0;
  const int64_t rows = count ? *count : room;
  return {begin, rows, ordered && rows >= 0 && rows <= room && begin <= capacity - rows};
}

// The columns that a group takes in transposed col arrays.
MOIETY_HD inline int64_t padded_group_rows(int64_t rows) { return (rows + 127) / 128 * 128; }

namespace detail {
template <class T>
MOIETY_HD void advance(T*& p, int64_t n) {
  if (p) p += n;
}
MOIETY_HD inline void advance_bytes(void*& p, int64_t n) {
  if (p) p = static_cast<uint8_t*>(p) + n;
}
}  // namespace detail

// The job of group e, with its pointers and options: `rows` rows of X from `begin`, col arrays from
// column `column`.
MOIETY_HD inline QuantizeJob group_job(const QuantizeJob& whole, int64_t e, int64_t begin,
                                       int64_t rows, int64_t column) {
  QuantizeJob job = whole;
  const Format format = whole.spec.format;
  const int64_t scale_bytes = is_fp8_block(format) ? 4 : 1;
  job.x = static_cast<const uint8_t*>(whole.x) +
          begin * whole.stride * (whole.dtype == DType::kFloat32 ? 4 : 2);
  job.rows = rows;
  job.full_rows = rows;
  job.padded_rows = padded_group_rows(rows);
  if (whole.expert) job.expert = whole.expert + static_cast<uint32_t>(e);
  detail::advance(job.row.data, begin * whole.row.pitch);
  detail::advance_bytes(job.row.scales, begin * whole.row.scale_pitch * scale_bytes);
  if (format == Format::kMxfp8) {
    detail::advance(job.col.data, column * whole.col.pitch);
    detail::advance_bytes(job.col.scales, column / 32 * whole.col.scale_pitch);
  } else {
    detail::advance(job.col.data, is_fp4(format) ? column / 2 : column);
    if (job.col.scales) {
      detail::advance_bytes(job.col.scales, column / block_shape(format).cols * scale_bytes);
    }
  }
  for (int i = 0; i < 2; ++i) {
    detail::advance(job.amax[i], whole.spec.row_scaled ? begin : e);
    detail::advance(job.tensor_scale[i], whole.spec.row_scaled ? begin : e);
  }
  detail::advance(job.flags, e);
  detail::advance(job.delayed_scale, e);
  detail::advance(job.delayed_scale_inv, e);
  detail::advance(job.step_amax, e);
  return job;
}

}  // namespace moiety::quant
