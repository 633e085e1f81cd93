// One direction of a quantized tensor: a matrix of codes, and the place of the scale of each.
// Internal to moiety/quant; the contract is in dequantize.h.
#pragma once

#include <cstdint>

#include "moiety/base/stream.h"
#include "moiety/formats/quantized.h"

namespace moiety::quant {

enum class Dequantized : uint8_t { kValues, kOperand };

struct DequantizeJob {
  QuantSpec spec;
  Dequantized what = Dequantized::kValues;
  bool undo_rht = false;
  const uint8_t* codes = nullptr;  // [rows, cols], `pitch` bytes a row
  int64_t rows = 0, cols = 0, pitch = 0;
  // Element (r, c) has scale (r / block_rows) * row_stride + (c / block_cols) * col_stride.
  const void* scales = nullptr;  // null if there are none, or none are applied
  int64_t block_rows = 1, block_cols = 1, row_stride = 0, col_stride = 0;
  const float* tensor_scale = nullptr;  // for row r: at r * tensor_stride; null if none is applied
  int64_t tensor_stride = 0;
  // [rows, out_cols]; columns beyond `cols` come from codes too, the tail of a rotated block
  void* out = nullptr;
  DType dtype = DType::kFloat32;
  int64_t out_cols = 0, out_stride = 0;
};

DequantizeJob make_dequantize_job(const char* operation, const QuantizedView& x,
                                  Direction direction, const TensorView& out, Dequantized what,
                                  bool undo_rht);

void dequantize_reference(const DequantizeJob& job);
void dequantize_cpu(const DequantizeJob& job);
void dequantize_cuda(const DequantizeJob& job, const Stream& stream);

}  // namespace moiety::quant
