// Kernel of the formats whose col codes are the row codes transposed: tiles of elements that share
// a scale, and one scale for the whole tensor. Also the kernels that only measure.
#pragma once

#include "moiety/quant/quantize_blocks.cuh"
#include "moiety/quant/transpose_device.cuh"

namespace moiety::quant::device {

// Bits of the amax of the unit's tile of elements; `warps` is shared memory of 8 x 4 words. All
// threads call it.
template <Format F>
__device__ uint32_t tile_amax(uint32_t mine, uint32_t* warps) {
  constexpr int kRows = block_shape(F).rows;
  if constexpr (kRows == 16) {
    return lane_max<8 + 16>(mine);
  } else {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    mine = kRows == 32 ? lane_max<1 + 8 + 16>(mine) : lane_max<31>(mine);
    if (lane < 8 && lane % 2 == 0) warps[warp * 4 + lane / 2] = mine;
    __syncthreads();
    if constexpr (kRows == 32) {
      return max(warps[warp * 4 + lane % 8 / 2], warps[(warp ^ 1) * 4 + lane % 8 / 2]);
    }
    uint32_t all = 0;
    for (int w = 0; w < kThreads / 32; ++w) all = max(all, warps[w * 4]);
    return all;
  }
}

// By one thread of each tile of elements.
template <Format F>
__device__ void store_tile_scale(const QuantizeJob& job, const Place& place,
                                 const BlockFactor<F>& factor) {
  constexpr int kRows = block_shape(F).rows;
  if constexpr (kRows > 0) {
    const int64_t r = place.row + threadIdx.x / 32 * 16, c = place.col + unit_col();
    const bool mine = threadIdx.x % 32 < 8 && (r - place.row) % kRows == 0 &&
                      (c - place.col) % kRows == 0 && r < job.rows && c < job.cols;
    if (mine) factor.store(job.row.scales, r / kRows * job.row.scale_pitch + c / kRows);
  }
}

template <Format F, class C, bool kStochastic, class T>
__device__ Codes cast_tile_unit(const QuantizeJob& job, float factor, const Unit<T>& x, int64_t r,
                                int64_t c) {
  RandomStream stream{};
  uint64_t block = 0;
  if constexpr (kStochastic) {
    stream = job.random_stream(Direction::kRow);
    block = job.position(Direction::kRow).block(r, c / kUnit);
  }
  Codes codes = encode_unit<C, kStochastic>(x, factor, stream, block);
  clear_past<is_fp4(F) ? 8 : 16>(&codes, r < job.rows ? job.cols - c : 0);
  if (job.row.data && r < job.rows && c < job.cols) store_row_codes<F>(job, codes, r, c);
  return codes;
}

template <Format F, class T, bool kStochastic, bool kCol>
__global__ void __launch_bounds__(kThreads) cast_tiles(const __grid_constant__ Source source) {
  __shared__ QuantizeJob shared_job;
  __shared__ uint32_t warps[kThreads / 32 * 4];
  __shared__ uint4 codes_memory[kCol ? CodeTile<is_fp4(F)>::kBytes / 16 : 1];
  if (source.skip && *source.skip != 0) return;
  const CodeTile<is_fp4(F)> tile{reinterpret_cast<uint32_t*>(codes_memory)};
  Place place;
  for (int64_t t = blockIdx.x; find_tile(source, t, &shared_job, &place); t += gridDim.x) {
    const QuantizeJob& job = source.kind == Source::Kind::kSingle ? source.job : shared_job;
    if (place.first && threadIdx.x == 0) write_scalars<F>(job);
    Unit<T> x[kUnits];
    load_units(job, place, x);
    uint32_t amax = 0;
    if (F != Format::kFp8Tensor || job.delayed_scale || job.flags) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) amax = max(amax, amax_bits(x[i]));
    }
    const uint32_t met = amax;
    if constexpr (F != Format::kFp8Tensor) amax = tile_amax<F>(amax, warps);
    const auto tensor = TensorFactors<F>::of(job, job.want_row ? 0 : 1);
    const auto factor = BlockFactor<F>::of(job, tensor, amax);
    store_tile_scale<F>(job, place, factor);
    if constexpr (kCol) __syncthreads();  // the last tile's columns are out
    with_codec_of<F>(job.spec, [&](auto codec) {
      using C = decltype(codec);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const Codes codes = cast_tile_unit<F, C, kStochastic>(
            job, factor.encode, x[i], place.row + unit_row(i), place.col + unit_col());
        if constexpr (kCol) tile.put(unit_row(i), unit_col() / kUnit, codes);
      }
    });
    report_amax<F>(job, met);
    if constexpr (kCol) {
      __syncthreads();
      if (!job.col.data) continue;
      constexpr int kHalf = is_fp4(F) ? 2 : 1;
      const int64_t rows = min(int64_t(kTile), job.padded_rows - place.row);
      tile.write(job.col.data + place.col * job.col.pitch + place.row / kHalf, job.col.pitch,
                 min(int64_t(kTile), job.cols - place.col),
                 is_fp4(F) ? (rows + 15) / 16 * 8 : rows);
    } else if constexpr (F != Format::kFp8Tensor) {
      __syncthreads();  // `warps` is used again
    }
  }
}

// Adds to the amax slots of the job. kRotated: the amax of the rotated columns, amax[1].
template <class T, bool kRotated>
__global__ void __launch_bounds__(kThreads) measure_tiles(const __grid_constant__ Source source) {
  extern __shared__ uint4 memory[];
  __shared__ QuantizeJob shared_job;
  if (source.skip && *source.skip != 0) return;
  const ColumnTile<Format::kNvfp4, T> tile{reinterpret_cast<uint8_t*>(memory)};
  Place place;
  for (int64_t t = blockIdx.x; find_tile(source, t, &shared_job, &place); t += gridDim.x) {
    const QuantizeJob& job = source.kind == Source::Kind::kSingle ? source.job : shared_job;
    Unit<T> x[kUnits];
    load_units(job, place, x);
    uint32_t amax = 0;
    if constexpr (kRotated) {
      __syncthreads();
      tile.put(x);
      __syncthreads();
      const ColumnPart part = ColumnPart::mine();
      for (int b = 0; b < 2; ++b) {
        float v[2][kUnit];
        tile.get(part.row + 16 * b, part.col, v);
        for (int j = 0; j < 2; ++j) {
          rotate(v[j], job.spec.rht_signs);
          amax = max(amax, amax_bits(v[j]));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) amax = max(amax, amax_bits(x[i]));
    }
    amax = lane_max<31>(amax);
    if (threadIdx.x % 32 != 0 || amax == 0) continue;
    for (int i = 0; i < 2; ++i) {
      const bool wanted = i == 0 ? job.want_row : job.want_col;
      if (!wanted || kRotated != (i == 1 && job.spec.rht_col)) continue;
      raise(job.amax[i], amax);
    }
  }
}

}  // namespace moiety::quant::device
