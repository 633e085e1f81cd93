// The kernel of the formats with one-dimensional blocks. Row codes come straight from registers,
// col codes from a copy of the tile in shared memory; X is read once.
#pragma once

#include "moiety/quant/quantize/quantize_columns.cuh"

namespace moiety::quant::device {

// The place of a unit's codes and scales, which then moves to other units below or beside it.
template <Format F>
class RowOutput {
 public:
  // Begins at the unit at (r, c), where c is a multiple of 16; the next ones are `down` rows and
  // `right` columns apart.
  __device__ RowOutput(const QuantizeJob& job, int64_t r, int64_t c, int down, int right)
      : cols_(job.cols - c), right_(right) {
    constexpr int kHalves = is_fp4(F) ? 2 : 1;
    const int64_t pitch = job.row.pitch;
    codes_ = job.row.data + r * pitch + c / kHalves;
    code_step_ = down * pitch + right / kHalves;
    vector_ = is_fp4(F) || pitch % kUnit == 0;
    if constexpr (kScaleBytes > 0) {
      const int64_t scale = r * job.row.scale_pitch + c / block_shape(F).cols;
      scale_ = static_cast<uint8_t*>(job.row.scales) + scale * kScaleBytes;
      scale_step_ = (down * job.row.scale_pitch + right / block_shape(F).cols) * kScaleBytes;
    }
    const BlockPosition position = job.position(Direction::kRow);
    block_ = position.block(r, c / kUnit);
    block_step_ = uint64_t(down * position.blocks_per_row + right / kUnit);
  }
  // The number of the unit, for its random bits.
  __device__ uint64_t block() const { return block_; }
  // Stores the unit's codes. Codes past the end are 0, and are stored in the padding of FP4.
  // `exists` says that the row does. For FP8 all lanes of a warp call it.
  __device__ void store(Codes codes, bool exists) const {
    if (is_fp4(F) && cols_ < kUnit) clear_past<8>(&codes, cols_);
    store_code_run<is_fp4(F) ? 8 : 16>(codes_, codes, exists ? cols_ : kNoRun, vector_);
  }
  // Stores the scale of the block; one of the block's lanes calls it.
  __device__ void store_scale(const BlockFactor<F>& factor) const { factor.store(scale_, 0); }
  __device__ void next() {
    codes_ += code_step_;
    if constexpr (kScaleBytes > 0) scale_ += scale_step_;
    block_ += block_step_;
    cols_ -= right_;
  }

 private:
  // The bytes of a scale; 0 for tiles, whose scales are stored elsewhere.
  static constexpr int kScaleBytes =
      is_tile(F) || F == Format::kFp8Tensor ? 0 : (is_fp8_block(F) ? 4 : 1);
  uint8_t *codes_, *scale_;
  int64_t code_step_, scale_step_;
  uint64_t block_, block_step_;
  int64_t cols_;  // number of columns from the unit on
  int right_;
  bool vector_;
};

// The row direction of a thread's units unit(0), unit(1), ...; all lanes call it. Returns the bits
// of the largest amax.
template <Format F, class C, bool kStochastic, int kUnroll, class Units>
__device__ uint32_t cast_rows(const QuantizeJob& job, TensorFactors<F> tensor, const Place& place,
                              Units&& unit) {
  constexpr int kLanes = block_shape(F).cols / kUnit;
  const Extent extent = Extent::of(job, place);
  const auto random = device_random<kStochastic>(job, Direction::kRow);
  RowOutput<F> out(job, place.row + unit_row(0), place.col + unit_col(), kUnitStep, 0);
  uint32_t largest = 0;
#pragma unroll kUnroll
  for (int i = 0; i < kUnits; ++i) {
    const auto x = unit(i);
    const uint32_t amax = lane_max<kLanes - 1>(amax_bits(x));
    largest = max(largest, amax);
    const bool row = unit_row(i) < extent.rows, exists = row && unit_col() < extent.cols;
    if (is_fp4(F) ? exists : __any_sync(kWarp, exists) != 0) {
      const auto factor = BlockFactor<F>::of(job, tensor, amax);
      out.store(encode_unit<F, C, kStochastic>(x, factor.encode, amax,
                                               random_bits<kStochastic>(random, out.block())),
                row);
      if (exists && threadIdx.x % kLanes == 0) out.store_scale(factor);
    }
    out.next();
  }
  return largest;
}

template <Format F, class T, bool kStochastic>
__global__ void __launch_bounds__(kThreads, kResident<T, kStochastic>)
    cast_row_blocks(const __grid_constant__ Source source) {
  __shared__ QuantizeJob job;
  __shared__ TensorFactors<F> factors[2];
  if (source.skipped()) return;
  Place place{};
  share_job(source, &job);
  for (int i = 0; second_pass_tile(source, i, &job, &place); ++i) {
    Unit<T> x[kUnits];
    load_units(job, place, x);
    begin_cast<F>(job, place, i == 0 || source.kind != Source::Kind::kSingle, factors);
    with_codec_of<F>(job.spec, [&](auto codec) {
      report_amax<F>(job, cast_rows<F, decltype(codec), kStochastic, kUnits>(
                              job, factors[0], place, [&](int i) { return x[i]; }));
    });
  }
}

// The way in which cast_row_col_blocks runs, as measured on an H200: the number of tiles in shared
// memory, `stages` (with two, the next one comes while one is cast); the number of blocks that a
// multiprocessor holds; the tiles of a single job that a block casts in turn; the units of rows at
// a time (more code than this does not fit into the instruction cache).
struct ColumnPlan {
  int stages, blocks, run, units;
};
template <Format F, class T, bool kStochastic>
constexpr ColumnPlan kColumnPlan = sizeof(T) == 4 ? ColumnPlan{1, 2, 1, kUnits}
                                   : kStochastic  ? ColumnPlan{2, 2, 2, 2}
                                   : is_fp4(F)    ? ColumnPlan{1, 4, 1, 1}
                                                  : ColumnPlan{1, 3, 1, kUnits};

// With kCoded X are codes.
template <Format F, class T, bool kStochastic, bool kCoded>
__global__ void __launch_bounds__(kThreads, kColumnPlan<F, T, kStochastic>.blocks)
    cast_row_col_blocks(const __grid_constant__ Source source) {
  extern __shared__ uint4 memory[];
  constexpr ColumnPlan kPlan = kColumnPlan<F, T, kStochastic>;
  __shared__ QuantizeJob jobs[2];
  __shared__ TensorFactors<F> factors[2];
  if (source.skipped()) return;
  const auto stage = [&](int i) {
    return StagedTile<T>{reinterpret_cast<uint8_t*>(memory) +
                         i % kPlan.stages * StagedTile<T>::kBytes};
  };
  Place next{};
  const auto fill = [&](int i) {
    if constexpr (kCoded) {
      stage(i).fill_coded(source, jobs[next.slot], next);
    } else {
      stage(i).fill(jobs[next.slot], next);
    }
  };
  share_job(source, jobs);
  bool more = second_pass_tile<2>(source, 0, jobs, &next);
  if (more) fill(0);
  int slot = -1;  // slot of the last tile
  for (int i = 0; more; ++i) {
    const Place place = next;
    const QuantizeJob& job = jobs[place.slot];
    const StagedTile<T> tile = stage(i);
    wait_for_copies();
    __syncthreads();
    more = second_pass_tile<2>(source, i + 1, jobs, &next);
    if (kPlan.stages > 1 && more) fill(i + 1);
    begin_cast<F>(job, place, place.slot != slot, factors);
    slot = place.slot;
    with_codec_of<F>(job.spec, [&](auto codec) {
      using C = decltype(codec);
      uint32_t largest = 0;
      if (job.want_row) {
        largest = cast_rows<F, C, kStochastic, kPlan.units>(job, factors[0], place,
                                                            [&](int i) { return tile.unit(i); });
      }
      if (job.want_col) {
        largest = max(largest, cast_columns<F, C, kStochastic>(job, factors[1], place, tile));
      }
      report_amax<F>(job, largest);
    });
    if (kPlan.stages == 1) {
      __syncthreads();
      if (more) fill(i + 1);
    }
  }
}

}  // namespace moiety::quant::device
