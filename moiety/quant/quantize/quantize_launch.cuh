// The interface between the host side of quantization on GPUs and its kernels: one source file per
// family of formats.
#pragma once

#include "moiety/base/launch.cuh"
#include "moiety/formats/bf16.h"
#include "moiety/quant/quantize/quantize_source.cuh"

namespace moiety::quant::device {

constexpr int kScaledRows = 4;  // rows in a tile of row-scaled jobs

// The kernel that serves a source, the same for all of its jobs.
struct CastKind {
  Format format;
  DType dtype;
  bool stochastic, row_scaled;
  bool col;      // col codes are wanted
  bool rotated;  // and col codes are rotated
  friend bool operator==(const CastKind&, const CastKind&) = default;
};
inline CastKind kind_of(const QuantizeJob& job) {
  return {job.spec.format,
          job.dtype,
          job.stochastic(),
          job.spec.row_scaled,
          job.want_col && job.col.data,
          job.spec.rht_col};
}

// All launches take at most `blocks` blocks, which walk over the source's tiles.
void launch_fp8(const CastKind& kind, const Source& source, int64_t blocks, const Stream& stream);
void launch_mxfp8(const CastKind& kind, const Source& source, int64_t blocks, const Stream& stream);
void launch_nvfp4(const CastKind& kind, const Source& source, int64_t blocks, const Stream& stream);
// For row_scaled jobs; without `cast` it only measures the amax.
void launch_scaled_rows(const CastKind& kind, const Source& source, bool cast, int64_t blocks,
                        const Stream& stream);
// Measures the amax of X and, if `rotated`, that of its rotated columns.
void launch_measure(const CastKind& kind, bool rotated, const Source& source, int64_t blocks,
                    const Stream& stream);

// Calls body(T{}, stochastic) with the element type and the rounding as types.
template <class Body>
void with_kernel_types(const CastKind& kind, Body&& body) {
  const auto with_rounding = [&](auto element) {
    if (kind.stochastic) {
      body(element, std::true_type{});
    } else {
      body(element, std::false_type{});
    }
  };
  if (kind.dtype == DType::kFloat32) {
    with_rounding(float{});
  } else {
    with_rounding(bf16{});
  }
}

}  // namespace moiety::quant::device
