#include <algorithm>

#include "moiety/formats/bf16.h"
#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/formats/ue8m0.h"
#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/hadamard.h"
#include "moiety/quant/quantize/ieee_scope.h"

namespace moiety::quant {
namespace {

float code_value(const DequantizeJob& job, int64_t r, int64_t c) {
  const uint8_t* row = job.codes + r * job.pitch;
  switch (job.spec.element) {
    case DType::kE2M1:
      return E2M1::decode(E2M1::unpack(row[c / 2], c % 2));
    case DType::kE5M2:
      return E5M2::decode(row[c]);
    default:
      return E4M3::decode(row[c]);
  }
}

float scale_value(const DequantizeJob& job, int64_t r, int64_t c) {
  const int64_t i = r / job.block_rows * job.row_stride + c / job.block_cols * job.col_stride;
  if (is_fp8_block(job.spec.format)) return static_cast<const float*>(job.scales)[i];
  const uint8_t byte = static_cast<const uint8_t*>(job.scales)[i];
  return is_fp4(job.spec.format) ? E4M3::decode(byte) : UE8M0::decode(byte);
}

float value(const DequantizeJob& job, int64_t r, int64_t c) {
  float v = code_value(job, r, c);
  if (job.scales) v = v * scale_value(job, r, c);
  if (job.tensor_scale) v = v * job.tensor_scale[r * job.tensor_stride];
  return v;
}

void store(const DequantizeJob& job, int64_t r, int64_t c, float v) {
  const int64_t i = r * job.out_stride + c;
  if (job.dtype == DType::kBFloat16) {
    static_cast<bf16*>(job.out)[i] = bf16(v);
  } else {
    static_cast<float*>(job.out)[i] = canonical(v);
  }
}

}  // namespace

void dequantize_reference(const DequantizeJob& job) {
  const IeeeScope scope;
  for (int64_t r = 0; r < job.rows; ++r) {
    if (!job.undo_rht) {
      for (int64_t c = 0; c < job.out_cols; ++c) store(job, r, c, value(job, r, c));
      continue;
    }
    for (int64_t c0 = 0; c0 < job.out_cols; c0 += 16) {
      float y[16];
      for (int64_t i = 0; i < 16; ++i) y[i] = value(job, r, c0 + i);
      undo_rht(y, job.spec.rht_signs);
      const int64_t n = std::min<int64_t>(16, job.out_cols - c0);
      for (int64_t i = 0; i < n; ++i) store(job, r, c0 + i, y[i]);
    }
  }
}

}  // namespace moiety::quant
