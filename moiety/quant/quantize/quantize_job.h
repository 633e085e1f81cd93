// One matrix to be quantized, with its arguments checked and resolved to pointers: a tensor, one of
// many, or the rows of a group. Internal to moiety/quant; the contract is in quantize.h.
#pragma once

#include <cstdint>
#include <span>

#include "moiety/quant/quantize.h"

namespace moiety::quant {

// The arrays of one direction.
struct QuantizeOutput {
  uint8_t* data = nullptr;
  void* scales = nullptr;   // scales of tiles, which serve both directions, are in `row`
  int64_t pitch = 0;        // bytes from one row of codes to the next
  int64_t scale_pitch = 0;  // scales from one row of scales to the next
};

struct QuantizeJob {
  QuantSpec spec;
  const void* x = nullptr;  // [rows, cols]; rows are `stride` elements apart
  DType dtype = DType::kFloat32;
  int64_t rows = 0, cols = 0, stride = 0;
  bool want_row = false, want_col = false;
  QuantizeOutput row, col;
  int64_t padded_rows = 0;  // rows of X that the col arrays count; those past `rows` are zeros
  float* amax[2] = {};      // index 0 row, 1 col; null if the format has none
  float* tensor_scale[2] = {};
  uint32_t* flags = nullptr;
  const uint32_t* skip = nullptr;
  // From QuantizeOptions.
  const RngState* rng = nullptr;
  uint32_t tensor_id = 0;
  uint32_t expert = 0;
  int64_t row0 = 0, col0 = 0, full_rows = 0, full_cols = 0;
  bool amax_given = false;
  const float* delayed_scale = nullptr;  // null with current scaling
  const float* delayed_scale_inv = nullptr;
  float* step_amax = nullptr;

  MOIETY_HD bool skipped() const { return skip && *skip != 0; }
  MOIETY_HD bool stochastic() const { return spec.rounding == Rounding::kStochastic; }
  // Whether the col codes are the row codes, transposed: with tiles, and with one scale for
  // everything.
  MOIETY_HD bool shares_codes() const {
    return is_tile(spec.format) || spec.format == Format::kFp8Tensor;
  }
  // Whether the amax comes from X, before anything is cast.
  MOIETY_HD bool measures_first() const {
    return is_tensor_scaled(spec.format) && !amax_given && !delayed_scale;
  }
  // The index of the amax that a direction uses: col has its own if it is rotated, or alone.
  MOIETY_HD int amax_index(Direction direction) const {
    return direction == Direction::kCol && (spec.rht_col || !want_row) ? 1 : 0;
  }
  MOIETY_HD RandomStream random_stream(Direction direction) const {
    return RandomStream::make(*rng, tensor_id, expert, direction == Direction::kCol);
  }
  MOIETY_HD BlockPosition position(Direction direction) const {
    return direction == Direction::kRow ? BlockPosition::make(row0, col0, full_cols)
                                        : BlockPosition::make(col0, row0, full_rows);
  }
};

// The job of `operation`, with checked arguments. With `cast` false the data of `out` need not be
// defined: the job can then only be measured.
QuantizeJob make_quantize_job(const char* operation, const TensorView& x, const QuantizedView& out,
                              const QuantizeOptions& options, bool cast = true);
QuantizeJob make_grouped_job(const char* operation, const TensorView& x, const RowGroups& groups,
                             const QuantizedView& out, const QuantizeOptions& options,
                             bool cast = true);

// The jobs of the groups with their present sizes, in memory of the calling thread, valid until its
// next call. Faulty groups are recorded, and empty.
std::span<const QuantizeJob> group_jobs(const QuantizeJob& whole, const RowGroups& groups);

// measure_* sets job.amax from X. quantize_* does that and everything else that quantize() does,
// from `skip` on.
void measure_reference(const QuantizeJob& job);
void quantize_reference(const QuantizeJob& job);
// The same for any number of jobs, whose `skip` is that of the first.
void measure_cpu(std::span<const QuantizeJob> jobs);
void quantize_cpu(std::span<const QuantizeJob> jobs);

}  // namespace moiety::quant
