// Quantization of matrices, with the arithmetic of docs/spec/formats.md#scales and the random
// numbers of docs/spec/formats.md#random-bits.
//
// X is bf16 or float32 [M, K] with contiguous columns and any row stride; any M, K >= 0. Outputs
// are those of formats/quantized.h whose data are defined (row, col or both), compact; their bases
// are aligned to 16 bytes and overlap no input. Every byte of an output is written, pads with 0;
// amax[i] and tensor_scale[i] of a direction that is not asked for are untouched. Bits depend only
// on values, spec, seed and draw: not on device, threads, tiling, or how a tensor is cut.
//
// An inf or NaN under a scale that was measured on these data gives NaN codes and a NaN scale, and
// so do blocks of NVFP4 under amax_given: their own amax is measured all the same. Under a scale
// that was given (delayed, or amax_given of kFp8Tensor) NaN stays NaN and inf saturates. All of it
// sets kFlagNonFinite in `flags`, if that is defined.
//
// No call allocates, synchronizes or reads device data on the host, so all can be captured in a
// graph. Errors name operation, argument and value: kInvalidArgument for shapes, dtypes, devices
// and specs that do not go together, kUnsupported where a format has no such form.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "moiety/base/stream.h"
#include "moiety/formats/quantized.h"
#include "moiety/quant/delayed_scaling.h"
#include "moiety/quant/rounding.h"
#include "moiety/quant/row_groups.h"

namespace moiety::quant {

struct QuantizeOptions {
  // The seed and draw of stochastic rounding, in memory of the tensor's device.
  const RngState* rng = nullptr;
  uint32_t tensor_id = 0;
  int32_t expert = 0;  // global expert number + 1; 0 for a tensor that is no expert's
  // The place of X in the tensor of which it is a shard; multiples of 16 along blocks. Full sizes
  // of 0 mean those of X.
  int64_t row0 = 0, col0 = 0, full_rows = 0, full_cols = 0;
  // Use view.amax as it is (from compute_amax, reduced over ranks, or from the producer of X).
  bool amax_given = false;
  // kFp8Tensor: cast with the stored scale, and raise step_amax to the amax of X.
  const DelayedScaling* delayed = nullptr;
  // uint32 [1], optional: if it is not 0 when the operation runs, no output changes.
  TensorView skip = {};
};

// Sets view.amax from X: [0] for the row direction, [1] for col (of the transformed columns if
// rht_col, else the same value); with row_scaled [M]. Directions are those whose data are defined,
// as for quantize, and both if neither is. A format that is not tensor-scaled is an
// Error(kInvalidArgument).
void compute_amax(TensorView x, const QuantizedView& view, const QuantizeOptions& options,
                  Stream stream);

void quantize(TensorView x, const QuantizedView& out, const QuantizeOptions& options,
              Stream stream);

// A table of tensors that are quantized in one launch per pass, with the bits of one call each. It
// copies the items and lives on the tensors' device, so a step passes one pointer. Options may
// differ, except for `skip`, which is the first item's. Outputs must not overlap.
struct QuantizeItem {
  TensorView x;  // not used by transpose_quantized
  QuantizedView out;
  QuantizeOptions options = {};
};
class QuantizeTable {
 public:
  explicit QuantizeTable(std::span<const QuantizeItem> items);
  ~QuantizeTable();
  QuantizeTable(QuantizeTable&&) noexcept;
  QuantizeTable& operator=(QuantizeTable&&) noexcept;

  std::span<const QuantizeItem> items() const;
  struct Device;  // arrays of pointers and sizes on a GPU
  const Device* device() const;
  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};
void quantize_many(const QuantizeTable& table, Stream stream);

// Quantizes the rows of experts: rows of x [capacity, K] that belong to groups with sizes on the
// device. Group e gets the bits of quantize() of its rows, with amax and tensor_scale of its own
// ([2][E]), expert options.expert + e (if options.expert > 0), and random bits from row 0 of the
// group. The views of options.delayed have an element for each group (history: a row).
//
// Row outputs are indexed by row of the buffer, as if there were no groups; rows of no group are
// neither read nor written.
//
// Transposed col outputs are [K][P], P = grouped_columns(capacity, E). Group e begins at column c_e
// = sum over j < e of 128 * ceil(n_j / 128); columns up to c_e + 128 * ceil(n_e / 128) are written,
// those past n_e like rows of +0 (FP8 block: pad scales 1; others: 0). MXFP8 col has codes [P][K]
// from row c_e and scales [P/32][K] from row c_e / 32.
//
// Formats of tiles are for weights, one tensor per expert (quantize_many), and Error(kUnsupported)
// here. An empty group has amax 0, scale 1 and no data. A faulty group is empty, and recorded in
// groups.status.
void quantize_grouped(TensorView x, const RowGroups& groups, const QuantizedView& out,
                      const QuantizeOptions& options, Stream stream);
// Sets the amax of each group, [2][E], as compute_amax does.
void compute_amax_grouped(TensorView x, const RowGroups& groups, const QuantizedView& view,
                          const QuantizeOptions& options, Stream stream);

}  // namespace moiety::quant
