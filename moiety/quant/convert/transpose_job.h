// Codes to be transposed, as bytes. Internal to moiety/quant; the contract is in transpose.h.
#pragma once

#include <cstdint>
#include <span>

#include "moiety/formats/quantized.h"

namespace moiety::quant {

struct TransposeJob {
  const uint8_t* in = nullptr;  // codes [rows, cols], in_pitch bytes a row
  uint8_t* out = nullptr;       // codes [cols, rows], out_pitch bytes a row
  int64_t rows = 0, cols = 0, in_pitch = 0, out_pitch = 0;
  bool fp4 = false;  // two codes a byte; pad nibbles of `out` are 0
  float* amax = nullptr;
  float* tensor_scale = nullptr;  // [2], the first is copied to the second
};

// Throws Error(kInvalidArgument) unless `view` has row_data and col_data of a format whose
// directions share their codes.
TransposeJob make_transpose_job(const QuantizedView& view);

void transpose_reference(const TransposeJob& job);
void transpose_cpu(std::span<const TransposeJob> jobs);

}  // namespace moiety::quant
