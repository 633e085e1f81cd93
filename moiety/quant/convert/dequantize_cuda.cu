// Dequantization on GPUs. A thread takes as many codes of a row as make 16 bytes of output, so that
// a warp's stores are one run of 512 bytes. It takes two such runs in each of two rows, so that
// loads wait together.
#include <bit>

#include "moiety/base/launch.cuh"
#include "moiety/formats/ue8m0.h"
#include "moiety/quant/convert/dequantize_device.cuh"
#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/hadamard.h"

namespace moiety::quant {
namespace {

using device::Rows;

constexpr int kThreads = 256;
constexpr int kRunsOfThread = 4;  // two runs in each of two rows
constexpr int kTileRows = kThreads / 32 * 2;

// The scale that a code is multiplied with: its place and its kind.
enum class Scales { kNone, kFloat, kE4M3, kUE8M0, kUE8M0Columns };

struct Params {
  DequantizeJob job;
  int row_shift, col_shift;  // shifts from an element to its block of scales
  uint32_t tile_columns;
  device::ByteRange all_codes, all_scales;
};

// Codes c to c + n - 1 of row r and their scales.
template <class C, Scales kScales, Rows kRows, int n>
struct Run {
  static constexpr bool kFp4 = C::kMaxCode == E2M1::kMaxCode;
  static constexpr bool kByColumn = kScales == Scales::kUE8M0Columns;
  static constexpr int kBytes = kFp4 ? n / 2 : n;
  // Rows of FP4 are whole blocks.
  device::ByteRun<kBytes, kFp4 ? Rows::kVectors : kRows> codes;
  device::ByteRun<kByColumn ? n : 4, kRows> column_scales;
  uint32_t stored_scale;
  float tensor_scale;

  __device__ void load(const Params& p, int64_t r, int64_t c) {
    const DequantizeJob& job = p.job;
    codes.load(job.codes + r * job.pitch + (kFp4 ? c / 2 : c), p.all_codes);
    const int64_t i = (r >> p.row_shift) * job.row_stride + (c >> p.col_shift) * job.col_stride;
    const auto* bytes = static_cast<const uint8_t*>(job.scales);
    if constexpr (kByColumn) {
      column_scales.load(bytes + i, p.all_scales);
    } else if constexpr (kScales == Scales::kFloat) {
      stored_scale = static_cast<const uint32_t*>(job.scales)[i];
    } else if constexpr (kScales != Scales::kNone) {
      stored_scale = bytes[i];
    }
    if (job.tensor_scale) tensor_scale = job.tensor_scale[r * job.tensor_stride];
  }
  __device__ float scale() const {
    if constexpr (kScales == Scales::kFloat) return __uint_as_float(stored_scale);
    if constexpr (kScales == Scales::kE4M3) return device::decode_pair<E4M3>(stored_scale).x;
    return UE8M0::decode(uint8_t(stored_scale));
  }
  __device__ void values(const Params& p, float (&v)[n]) const {
    uint32_t word[decltype(codes)::kWords];
    codes.words(word);
    device::decode<C>(word, v);
    uint32_t scale_word[decltype(column_scales)::kWords];
    if constexpr (kByColumn) column_scales.words(scale_word);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if constexpr (kByColumn) {
        v[i] *= UE8M0::decode(uint8_t(scale_word[i / 4] >> 8 * (i % 4)));
      } else if constexpr (kScales != Scales::kNone) {
        v[i] *= scale();
      }
      if (p.job.tensor_scale) v[i] *= tensor_scale;
    }
  }
  // Packs the values as elements of T.
  template <class T>
  __device__ void pack(const Params& p, uint32_t (&out)[4]) const {
    if constexpr (kFp4 && sizeof(T) == 2) {
      if (!p.job.tensor_scale) return device::scaled_e2m1(codes.window.raw[0], scale(), out);
    }
    float v[n];
    values(p, v);
    device::pack_values<T>(v, 0, out);
  }
};

// With kUndo n is 16, the values of a rotated block; otherwise n values are 16 bytes.
template <class C, class T, Scales kScales, Rows kRows, int n, bool kUndo>
__global__ void __launch_bounds__(kThreads) dequantize_tiles(const __grid_constant__ Params p) {
  using CodeRun = Run<C, kScales, kRows, n>;
  constexpr int kPiece = 16 / int(sizeof(T));
  const DequantizeJob& job = p.job;
  const uint32_t tile_row = blockIdx.x / p.tile_columns;
  const uint32_t tile_column = blockIdx.x - tile_row * p.tile_columns;
  const int64_t c0 = (int64_t{tile_column} * 64 + threadIdx.x % 32) * n;
  const int64_t r0 = int64_t{tile_row} * kTileRows + threadIdx.x / 32;
  const auto row = [&](int i) { return r0 + i / 2 * (kThreads / 32); };
  const auto column = [&](int i) { return c0 + i % 2 * (32 * n); };
  CodeRun runs[kRunsOfThread];
#pragma unroll
  for (int i = 0; i < kRunsOfThread; ++i) {
    if (row(i) < job.rows && column(i) < job.out_cols) runs[i].load(p, row(i), column(i));
  }
  // `whole` is the same for all threads of a warp.
  const bool whole = int64_t{tile_column + 1} * 64 * n <= job.out_cols;
#pragma unroll
  for (int i = 0; i < kRunsOfThread; ++i) {
    if (row(i) >= job.rows) return;
    const int64_t valid = job.out_cols - column(i);
    alignas(16) uint32_t piece[4];
    auto* to =
        reinterpret_cast<uint8_t*>(static_cast<T*>(job.out) + row(i) * job.out_stride + column(i));
    if constexpr (kUndo) {
      float v[n];
      runs[i].values(p, v);
      undo_rht(v, job.spec.rht_signs);
#pragma unroll
      for (int k = 0; k < n; k += kPiece) {
        device::pack_values<T>(v, k, piece);
        device::store_run_of_lane<kRows>(to + k * sizeof(T), piece,
                                         (valid - k) * int64_t{sizeof(T)});
      }
      continue;
    }
    runs[i].template pack<T>(p, piece);
    if constexpr (kRows == Rows::kBytes) {
      device::store_run<32>(to, piece, valid * int64_t{sizeof(T)});
    } else if (kRows == Rows::kWords && whole) {
      device::store_half_vectors(to, piece);
    } else {
      device::store_run_of_lane<kRows>(to, piece, valid * int64_t{sizeof(T)});
    }
  }
}

// Whether codes, scales of columns and values lie at these alignments, in bytes, in every row.
bool is_aligned(const DequantizeJob& job, uintptr_t code_bytes, uintptr_t out_bytes) {
  const auto address = [](const void* base, int64_t pitch) {
    return std::bit_cast<uintptr_t>(base) | static_cast<uintptr_t>(pitch);
  };
  const int64_t value = job.dtype == DType::kFloat32 ? 4 : 2;
  uintptr_t codes = is_fp4(job.spec.format) ? 0 : address(job.codes, job.pitch);
  if (job.block_cols == 1) codes |= address(job.scales, job.row_stride);
  return codes % code_bytes == 0 && address(job.out, job.out_stride * value) % out_bytes == 0;
}

using Kernel = void (*)(Params);

template <class C, Scales kScales, bool kUndo>
Kernel kernel_to(DType dtype, Rows rows) {
  const auto of = [](auto element, auto access) -> Kernel {
    using T = decltype(element);
    return dequantize_tiles < C, T, kScales, access.value, kUndo ? 16 : 16 / int(sizeof(T)),
           kUndo > ;
  };
  constexpr std::integral_constant<Rows, Rows::kVectors> vectors;
  constexpr std::integral_constant<Rows, Rows::kWords> words;
  constexpr std::integral_constant<Rows, Rows::kBytes> bytes;
  if (dtype == DType::kFloat32) {
    return rows == Rows::kVectors ? of(float{}, vectors) : of(float{}, bytes);
  }
  if (rows == Rows::kVectors) return of(bf16{}, vectors);
  return rows == Rows::kWords ? of(bf16{}, words) : of(bf16{}, bytes);
}

template <class C>
Kernel fp8_kernel(const DequantizeJob& job, Rows rows) {
  if (!job.scales) return kernel_to<C, Scales::kNone, false>(job.dtype, rows);
  if (is_fp8_block(job.spec.format)) return kernel_to<C, Scales::kFloat, false>(job.dtype, rows);
  if (job.block_cols == 1) return kernel_to<C, Scales::kUE8M0Columns, false>(job.dtype, rows);
  return kernel_to<C, Scales::kUE8M0, false>(job.dtype, rows);
}

Rows rows_of(const DequantizeJob& job) {
  const bool wide = job.dtype == DType::kFloat32;
  if (is_aligned(job, wide ? 4 : 8, 16)) return Rows::kVectors;
  return !wide && is_aligned(job, 4, 8) ? Rows::kWords : Rows::kBytes;
}

Kernel kernel_of(const DequantizeJob& job) {
  const Rows rows = rows_of(job);
  if (is_fp4(job.spec.format)) {
    return job.undo_rht ? kernel_to<E2M1, Scales::kE4M3, true>(job.dtype, rows)
                        : kernel_to<E2M1, Scales::kE4M3, false>(job.dtype, rows);
  }
  if (job.spec.element == DType::kE5M2) return fp8_kernel<E5M2>(job, rows);
  return fp8_kernel<E4M3>(job, rows);
}

}  // namespace

void dequantize_cuda(const DequantizeJob& job, const Stream& stream) {
  const int64_t run = job.undo_rht ? 16 : job.dtype == DType::kFloat32 ? 4 : 8;
  const int64_t columns = blocks_for(job.out_cols, 64 * run);
  const auto* scales = static_cast<const uint8_t*>(job.scales);
  const Params p{job,
                 std::countr_zero(static_cast<uint64_t>(job.block_rows)),
                 std::countr_zero(static_cast<uint64_t>(job.block_cols)),
                 static_cast<uint32_t>(columns),
                 {job.codes, job.codes + job.rows * job.pitch},
                 {scales, scales + blocks_for(job.rows, job.block_rows) * job.row_stride}};
  launch(job.what == Dequantized::kOperand ? "dequantize_operand" : "dequantize", kernel_of(job),
         {blocks_for(job.rows, kTileRows) * columns, kThreads}, stream, p);
}

}  // namespace moiety::quant
