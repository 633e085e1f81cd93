// Dequantization on GPUs. A thread takes as many codes of a row as make 16 bytes of output, so that
// a warp's stores are one run of 512 bytes, and does so in four rows, for loads that wait together.
#include <bit>
#include <type_traits>

#include "moiety/base/launch.cuh"
#include "moiety/formats/ue8m0.h"
#include "moiety/quant/dequantize_device.cuh"
#include "moiety/quant/dequantize_job.h"
#include "moiety/quant/hadamard.h"

namespace moiety::quant {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsOfThread = 4;
constexpr int kTileRows = kThreads / 32 * kRowsOfThread;

// What a code is multiplied with: where its scale lies, and what it is.
enum class Scales { kNone, kFloat, kE4M3, kUE8M0, kUE8M0Columns };

struct Params {
  DequantizeJob job;
  int row_shift, col_shift;  // of a block of scales
  uint32_t tile_columns;
};

template <Scales kScales>
__device__ float scale_at(const Params& p, int64_t r, int64_t c) {
  const int64_t i = (r >> p.row_shift) * p.job.row_stride + (c >> p.col_shift) * p.job.col_stride;
  if constexpr (kScales == Scales::kFloat) return static_cast<const float*>(p.job.scales)[i];
  const uint8_t byte = static_cast<const uint8_t*>(p.job.scales)[i];
  return kScales == Scales::kE4M3 ? E4M3::decode(byte) : UE8M0::decode(byte);
}

// Codes c to c + n - 1 of row r and what they are multiplied with.
template <class C, Scales kScales, int n>
struct Run {
  static constexpr int kFactors = kScales == Scales::kUE8M0Columns ? n : 1;
  device::CodeRun<C, n> codes;
  float scale[kFactors], tensor_scale;

  // `valid` of them exist. A row of FP4 is whole blocks.
  __device__ void load(const Params& p, int64_t r, int64_t c, int64_t valid) {
    codes.load(p.job.codes + r * p.job.pitch + (codes.kFp4 ? c / 2 : c), valid);
    if constexpr (kScales != Scales::kNone) {
#pragma unroll
      for (int i = 0; i < kFactors; ++i) {
        scale[i] = i < valid ? scale_at<kScales>(p, r, c + i) : 0.0f;
      }
    }
    if (p.job.tensor_scale) tensor_scale = p.job.tensor_scale[r * p.job.tensor_stride];
  }
  __device__ void values(const Params& p, float (&v)[n]) const {
    codes.decode(v);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if constexpr (kScales != Scales::kNone) v[i] *= scale[i % kFactors];
      if (p.job.tensor_scale) v[i] *= tensor_scale;
    }
  }
};

// kUndo: n is 16, the values of a rotated block.
template <class C, class T, Scales kScales, int n, bool kUndo>
__global__ void __launch_bounds__(kThreads) dequantize_tiles(const __grid_constant__ Params p) {
  const DequantizeJob& job = p.job;
  const uint32_t tile_row = blockIdx.x / p.tile_columns;
  const uint32_t tile_column = blockIdx.x - tile_row * p.tile_columns;
  const int64_t c = (int64_t{tile_column} * 32 + threadIdx.x % 32) * n;
  const int64_t r0 = int64_t{tile_row} * kTileRows + threadIdx.x / 32;
  const int64_t valid = job.out_cols - c;
  if (valid <= 0) return;
  Run<C, kScales, n> runs[kRowsOfThread];
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const int64_t r = r0 + i * (kThreads / 32);
    if (r < job.rows) runs[i].load(p, r, c, valid);
  }
  T* out = static_cast<T*>(job.out) + c;
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const int64_t r = r0 + i * (kThreads / 32);
    if (r >= job.rows) return;
    float v[n];
    runs[i].values(p, v);
    if constexpr (kUndo) undo_rht(v, job.spec.rht_signs);
    device::store_values(out + r * job.out_stride, v, valid);
  }
}

template <class C, class T, Scales kScales, bool kUndo>
void launch_tiles(const DequantizeJob& job, const Stream& stream) {
  constexpr int n = kUndo ? 16 : 16 / int(sizeof(T));
  const int64_t columns = blocks_for(job.out_cols, 32 * n);
  const Params p{job, std::countr_zero(static_cast<uint64_t>(job.block_rows)),
                 std::countr_zero(static_cast<uint64_t>(job.block_cols)),
                 static_cast<uint32_t>(columns)};
  launch(job.what == Dequantized::kOperand ? "dequantize_operand" : "dequantize",
         dequantize_tiles<C, T, kScales, n, kUndo>,
         {blocks_for(job.rows, kTileRows) * columns, kThreads}, stream, p);
}

template <class C, Scales kScales>
void launch_to(const DequantizeJob& job, const Stream& stream) {
  const auto with = [&](auto undo) {
    if (job.dtype == DType::kFloat32) {
      launch_tiles<C, float, kScales, undo.value>(job, stream);
    } else {
      launch_tiles<C, bf16, kScales, undo.value>(job, stream);
    }
  };
  if constexpr (kScales == Scales::kE4M3) {
    if (job.undo_rht) return with(std::true_type{});
  }
  with(std::false_type{});
}

template <class C>
void launch_fp8(const DequantizeJob& job, const Stream& stream) {
  if (!job.scales) return launch_to<C, Scales::kNone>(job, stream);
  if (is_fp8_block(job.spec.format)) return launch_to<C, Scales::kFloat>(job, stream);
  if (job.block_cols == 1) return launch_to<C, Scales::kUE8M0Columns>(job, stream);
  launch_to<C, Scales::kUE8M0>(job, stream);
}

}  // namespace

void dequantize_cuda(const DequantizeJob& job, const Stream& stream) {
  if (is_fp4(job.spec.format)) {
    launch_to<E2M1, Scales::kE4M3>(job, stream);
  } else if (job.spec.element == DType::kE5M2) {
    launch_fp8<E5M2>(job, stream);
  } else {
    launch_fp8<E4M3>(job, stream);
  }
}

}  // namespace moiety::quant
