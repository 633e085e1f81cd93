// X as values of codes, for kernels that quantize it anew (requantize.h): bf16(dequantize(rows)),
// with the arithmetic of dequantize_cuda.cu. Rows have one-dimensional blocks, so that sixteen codes
// side by side, from a multiple of sixteen on, share a scale.
#pragma once

#include "moiety/formats/ue8m0.h"
#include "moiety/quant/convert/dequantize_device.cuh"
#include "moiety/quant/quantize/quantize_tile.cuh"

namespace moiety::quant::device {

// n elements of bf16, 4 or 16, of which the first `valid` exist; the others are +0.
template <int n>
struct CodedRun {
  Elements<bf16, n> out{};

  // From row r and column c, a multiple of n.
  __device__ CodedRun(const DequantizeJob& rows, int64_t r, int64_t c, int valid) {
    if (valid <= 0) return;
    if (is_fp4(rows.spec.format)) {
      decode_as<E2M1>(rows, r, c);
    } else if (rows.spec.element == DType::kE5M2) {
      decode_as<E5M2>(rows, r, c);
    } else {
      decode_as<E4M3>(rows, r, c);
    }
    if (valid < n) keep_first<16>(out.word, valid);
  }

 private:
  template <class C>
  __device__ void decode_as(const DequantizeJob& rows, int64_t r, int64_t c) {
    constexpr bool kFp4 = C::kMaxCode == E2M1::kMaxCode;
    const uint8_t* from = rows.codes + r * rows.pitch + (kFp4 ? c / 2 : c);
    float v[n];
    if constexpr (kFp4) {
      // Rows are whole blocks of eight bytes.
      uint32_t word[(n / 2 + 3) / 4] = {};
      if constexpr (n == 4) {
        word[0] = *reinterpret_cast<const uint16_t*>(from);
      } else {
        const auto both = *reinterpret_cast<const uint2*>(from);
        word[0] = both.x;
        word[1] = both.y;
      }
      decode<C>(word, v);
    } else {
      Window<n / 4> window;
      window.load(from, {rows.codes, rows.codes + rows.rows * rows.pitch});
      uint32_t word[n / 4];
      window.words(word);
      decode<C>(word, v);
    }
    const float scale = scale_of(rows, r * rows.row_stride + c / rows.block_cols);
    const float tensor = rows.tensor_scale ? rows.tensor_scale[r * rows.tensor_stride] : 1.0f;
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] *= scale;
    if (rows.tensor_scale) {
#pragma unroll
      for (int i = 0; i < n; ++i) v[i] *= tensor;
    }
#pragma unroll
    for (int i = 0; i < n; i += 2) out.word[i / 2] = bf16_word(v[i], v[i + 1]);
  }
  static __device__ float scale_of(const DequantizeJob& rows, int64_t i) {
    if (is_fp8_block(rows.spec.format)) return static_cast<const float*>(rows.scales)[i];
    const uint8_t code = static_cast<const uint8_t*>(rows.scales)[i];
    return is_fp4(rows.spec.format) ? decode_pair<E4M3>(code).x : UE8M0::decode(code);
  }
};

// The row of `source.coded` that is the first of the job's.
__device__ inline int64_t first_coded_row(const Source& source, const QuantizeJob& job) {
  const int64_t bytes =
      static_cast<const uint8_t*>(job.x) - static_cast<const uint8_t*>(source.job.x);
  return job.stride > 0 ? bytes / (2 * job.stride) : 0;
}

// The thread's units of a tile: of X, or with kCoded of the codes in its place.
template <bool kCoded, class T>
__device__ void take_units(const Source& source, const QuantizeJob& job, const Place& place,
                           Unit<T> (&x)[kUnits]) {
  if constexpr (!kCoded) {
    load_units(job, place, x);
  } else {
    const Extent extent = Extent::of(job, place);
    const int64_t row = first_coded_row(source, job) + place.row, col = place.col + unit_col();
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int valid = unit_row(i) < extent.rows ? min(extent.cols - unit_col(), kUnit) : 0;
      x[i] = CodedRun<kUnit>(source.coded, row + unit_row(i), col, valid).out;
    }
  }
}

}  // namespace moiety::quant::device
