// One matrix to be quantized, its arguments checked and resolved to pointers: a tensor, one of
// many, or the rows of a group. Internal to moiety/quant; contract: quantize.h.
#pragma once

#include <cstdint>
#include <span>

#include "moiety/quant/quantize.h"

namespace moiety::quant {

// The arrays of one direction.
struct QuantizeOutput {
  uint8_t* data = nullptr;
  void* scales = nullptr;   // of tiles: of both directions, in `row`, whichever is asked for
  int64_t pitch = 0;        // bytes from one row of codes to the next
  int64_t scale_pitch = 0;  // scales from one row of scales to the next
};

struct QuantizeJob {
  QuantSpec spec;
  const void* x = nullptr;  // [rows, cols], `stride` elements apart
  DType dtype = DType::kFloat32;
  int64_t rows = 0, cols = 0, stride = 0;
  bool want_row = false, want_col = false;
  QuantizeOutput row, col;
  int64_t padded_rows = 0;  // rows of X that the col arrays count; those past `rows` are zeros
  float* amax[2] = {};      // index 0 row, 1 col; null: the format has none
  float* tensor_scale[2] = {};
  uint32_t* flags = nullptr;
  const uint32_t* skip = nullptr;
  // Of QuantizeOptions.
  const RngState* rng = nullptr;
  uint32_t tensor_id = 0;
  uint32_t expert = 0;
  int64_t row0 = 0, col0 = 0, full_rows = 0, full_cols = 0;
  bool amax_given = false;
  const float* delayed_scale = nullptr;  // null: current scaling
  const float* delayed_scale_inv = nullptr;
  float* step_amax = nullptr;

  MOIETY_HD bool skipped() const { return skip && *skip != 0; }
  MOIETY_HD bool stochastic() const { return spec.rounding == Rounding::kStochastic; }
  // Col codes are the row codes, transposed: with tiles, and with one scale for everything.
  MOIETY_HD bool shares_codes() const {
    return is_tile(spec.format) || spec.format == Format::kFp8Tensor;
  }
  // The amax comes from X, before anything is cast.
  MOIETY_HD bool measures_first() const {
    return is_tensor_scaled(spec.format) && !amax_given && !delayed_scale;
  }
  // Which amax a direction uses: col has its own where it is rotated, or alone.
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

// Checks the arguments of `operation`. With `cast` false the data of `out` need not be defined: the
// job can only be measured.
QuantizeJob make_quantize_job(const char* operation, const TensorView& x, const QuantizedView& out,
                              const QuantizeOptions& options, bool cast = true);
QuantizeJob make_grouped_job(const char* operation, const TensorView& x, const RowGroups& groups,
                             const QuantizedView& out, const QuantizeOptions& options,
                             bool cast = true);

// The jobs of the groups as their sizes are now, in memory of the calling thread, valid until its
// next call. Faulty groups are recorded, and empty.
std::span<const QuantizeJob> group_jobs(const QuantizeJob& whole, const RowGroups& groups);

// job.amax from X; and both from `skip` on: everything that quantize() does.
void measure_reference(const QuantizeJob& job);
void quantize_reference(const QuantizeJob& job);
// The same for any number of jobs, whose `skip` is that of the first.
void measure_cpu(std::span<const QuantizeJob> jobs);
void quantize_cpu(std::span<const QuantizeJob> jobs);

}  // namespace moiety::quant
