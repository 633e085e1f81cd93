// The kernel of the formats whose col codes are the row codes transposed: tiles of elements that
// share a scale, and one scale for the whole tensor. The kernels that only measure are here too.
#pragma once

#include "moiety/quant/convert/transpose_device.cuh"
#include "moiety/quant/quantize/quantize_blocks.cuh"

namespace moiety::quant::device {

// The bits of the amax of the unit's tile of elements; `warps` is shared memory of 8 x 4 words. All
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

// Stores the scale of a tile of elements; one thread of the tile calls it.
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

// With kCoded X are codes.
template <Format F, class T, bool kStochastic, bool kCol, bool kCoded>
__global__ void __launch_bounds__(kThreads, kResident<T, kStochastic>)
    cast_tiles(const __grid_constant__ Source source) {
  __shared__ QuantizeJob job;
  __shared__ TensorFactors<F> factors[2];
  __shared__ uint32_t warps[kThreads / 32 * 4];
  __shared__ uint4 codes_memory[kCol ? CodeTile<is_fp4(F)>::kBytes / 16 : 1];
  if (source.skipped()) return;
  const CodeTile<is_fp4(F)> tile{reinterpret_cast<uint32_t*>(codes_memory)};
  Place place;
  share_job(source, &job);
  for (int i = 0; second_pass_tile(source, i, &job, &place); ++i) {
    Unit<T> x[kUnits];
    take_units<kCoded>(source, job, place, x);
    begin_cast<F>(job, place, i == 0 || source.kind != Source::Kind::kSingle, factors);
    uint32_t amax = 0;
    if (F != Format::kFp8Tensor || job.delayed_scale || job.flags) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) amax = max(amax, amax_bits(x[i]));
    }
    const uint32_t met = amax;
    if constexpr (F != Format::kFp8Tensor) amax = tile_amax<F>(amax, warps);
    const auto factor = BlockFactor<F>::of(job, factors[job.want_row ? 0 : 1], amax);
    store_tile_scale<F>(job, place, factor);
    if constexpr (kCol) __syncthreads();  // the last tile's columns have been stored
    with_codec_of<F>(job.spec, [&](auto codec) {
      using C = decltype(codec);
      const Extent extent = Extent::of(job, place);
      RowOutput<F> out(job, place.row + unit_row(0), place.col + unit_col(), kUnitStep, 0);
      const auto random = device_random<kStochastic>(job, Direction::kRow);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        Codes codes = encode_unit<F, C, kStochastic>(x[i], factor.encode, amax,
                                                     random_bits<kStochastic>(random, out.block()));
        const bool exists = unit_row(i) < extent.rows;
        if (job.row.data) out.store(codes, exists);
        if constexpr (kCol) {
          const int valid = exists ? extent.cols - unit_col() : 0;
          if (valid < kUnit) clear_past<is_fp4(F) ? 8 : 16>(&codes, valid);
          tile.put(unit_row(i), unit_col() / kUnit, codes);
        }
        out.next();
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

// The largest value over all threads, in every thread of the first warp; `warps` is shared memory
// of one word per warp. All threads call it.
__device__ inline uint32_t first_warp_max(uint32_t v, uint32_t* warps) {
  v = lane_max<31>(v);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  return threadIdx.x < 32 ? lane_max<kThreads / 32 - 1>(warps[threadIdx.x % (kThreads / 32)]) : v;
}

// Raises the amax slots of the job. With kRotated amax[1] is that of the rotated columns.
template <class T, bool kRotated, bool kCoded>
__global__ void __launch_bounds__(kThreads, kResident<T, false>)
    measure_tiles(const __grid_constant__ Source source) {
  __shared__ QuantizeJob job;
  __shared__ uint32_t warps[2][kThreads / 32];
  cudaTriggerProgrammaticLaunchCompletion();
  if (source.skipped()) return;
  uint32_t amax = 0, rotated = 0;
  const auto report = [&] {
    cudaGridDependencySynchronize();
    __syncthreads();  // `warps` is used again
    amax = first_warp_max(amax, warps[0]);
    if constexpr (kRotated) {
      // Quartering and rounding keep the order, so they may come after the maximum.
      const float y = bf16(0.25f * __uint_as_float(first_warp_max(rotated, warps[1])));
      rotated = __float_as_uint(y);
    }
    if (threadIdx.x == 0) {
      if (job.want_row) raise(job.amax[0], amax);
      if (job.want_col && kRotated) raise(job.amax[1], rotated);
      if (job.want_col && !kRotated && !job.spec.rht_col) raise(job.amax[1], amax);
    }
    amax = rotated = 0;
  };
  share_job(source, &job);
  TileWalk walk(source);
  for (Place place; walk.next(&job, &place);) {
    if constexpr (kRotated) {
      const int64_t r = place.row + threadIdx.x / 32 * kUnit,
                    c = place.col + threadIdx.x % 32 * kQuad;
      ColumnQuad<T> x;
      if constexpr (kCoded) {
        x = load_coded_columns(source, job, first_coded_row(source, job), r, c);
      } else {
        x = load_columns<T>(job, r, c);
      }
      const auto magnitude = x.magnitude();
      x.flip(uniform(job.spec.rht_signs));
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        amax = max(amax, magnitude.bits(j));
        rotated = __float_as_uint(raise_transformed(x, j, __uint_as_float(rotated)));
      }
    } else {
      Unit<T> x[kUnits];
      take_units<kCoded>(source, job, place, x);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) amax = max(amax, amax_bits(x[i]));
    }
    if (source.kind != Source::Kind::kSingle) report();
  }
  if (source.kind == Source::Kind::kSingle) report();
}

}  // namespace moiety::quant::device
