// Kernel of the formats with one-dimensional blocks: row codes straight from registers, col codes
// from a copy of the tile in shared memory, X read once.
#pragma once

#include "moiety/quant/quantize_columns.cuh"
#include "moiety/quant/quantize_launch.cuh"

namespace moiety::quant::device {

// Where the codes and scales of a unit go, and then those of others below or beside it.
template <Format F>
class RowOutput {
 public:
  // From the unit at (r, c), c a multiple of 16; the next ones are `down` rows and `right` columns
  // apart.
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
  // Number of the unit, for its random bits.
  __device__ uint64_t block() const { return block_; }
  // Codes past the end are 0, and in the padding of FP4 they are stored.
  // `exists`: the row does. Of FP8 all lanes of a warp call it.
  __device__ void store(Codes codes, bool exists) const {
    if (is_fp4(F) && cols_ < kUnit) clear_past<8>(&codes, cols_);
    store_code_run<is_fp4(F) ? 8 : 16>(codes_, codes, exists ? cols_ : kNoRun, vector_);
  }
  // Of the block, by one of its lanes.
  __device__ void store_scale(const BlockFactor<F>& factor) const { factor.store(scale_, 0); }
  __device__ void next() {
    codes_ += code_step_;
    if constexpr (kScaleBytes > 0) scale_ += scale_step_;
    block_ += block_step_;
    cols_ -= right_;
  }

 private:
  // Of tiles scales are stored elsewhere.
  static constexpr int kScaleBytes =
      is_tile(F) || F == Format::kFp8Tensor ? 0 : (is_fp8_block(F) ? 4 : 1);
  uint8_t *codes_, *scale_;
  int64_t code_step_, scale_step_;
  uint64_t block_, block_step_;
  int64_t cols_;  // from the unit on
  int right_;
  bool vector_;
};

// Row direction of a thread's units unit(0), unit(1), ...; all lanes call it. Returns the bits of
// the largest amax.
template <Format F, class C, bool kStochastic, class Units>
__device__ uint32_t cast_rows(const QuantizeJob& job, TensorFactors<F> tensor, const Place& place,
                              Units&& unit) {
  constexpr int kLanes = block_shape(F).cols / kUnit;
  const Extent extent = Extent::of(job, place);
  const auto random = device_random<kStochastic>(job, Direction::kRow);
  RowOutput<F> out(job, place.row + unit_row(0), place.col + unit_col(), kUnitStep, 0);
  uint32_t largest = 0;
#pragma unroll
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

template <Format F, class T, bool kStochastic, bool kCol>
__global__ void __launch_bounds__(kThreads, kResident<T, kStochastic>)
    cast_blocks(const __grid_constant__ Source source) {
  extern __shared__ uint4 memory[];
  __shared__ QuantizeJob job;
  __shared__ TensorFactors<F> factors[2];
  if (source.skipped()) return;
  const ColumnTile<F, T> tile{reinterpret_cast<uint8_t*>(memory)};
  Place place;
  share_job(source, &job);
  for (int i = 0; second_pass_tile(source, i, &job, &place); ++i) {
    Unit<T> x[kUnits];
    load_units(job, place, x);
    cudaGridDependencySynchronize();
    if (place.first && threadIdx.x == 0) write_scalars<F>(job);
    if (i == 0 || source.kind != Source::Kind::kSingle) share_factors<F>(job, factors);
    const uint32_t signs = F == Format::kNvfp4 && job.spec.rht_col ? job.spec.rht_signs : 0;
    if constexpr (kCol) {
      __syncthreads();  // the last tile's columns are out
      tile.put(x, signs);
      __syncthreads();
    }
    uint32_t largest = 0;
    with_codec_of<F>(job.spec, [&](auto codec) {
      using C = decltype(codec);
      if constexpr (kCol) {
        // Rows come from shared memory too: that many registers would leave few warps.
        if (job.want_row) {
          largest = cast_rows<F, C, kStochastic>(job, factors[0], place,
                                                 [&](int i) { return tile.unit(i, signs); });
        }
        if (job.want_col) {
          largest = max(largest, cast_columns<F, C, kStochastic>(job, factors[1], place, tile));
        }
      } else {
        largest = cast_rows<F, C, kStochastic>(job, factors[0], place, [&](int i) { return x[i]; });
      }
    });
    report_amax<F>(job, largest);
    if (kCol && job.want_col) {
      __syncthreads();
      write_columns(job, place, tile);
    }
  }
}

template <Format F, class T, bool kStochastic>
void launch_blocks(const CastKind& kind, const Source& source, int64_t blocks,
                   const Stream& stream) {
  const auto kernel =
      kind.col ? cast_blocks<F, T, kStochastic, true> : cast_blocks<F, T, kStochastic, false>;
  const int64_t shared = kind.col ? ColumnTile<F, T>::kBytes : 0;
  launch("quantize", kernel, {blocks, kThreads, shared, source.early}, stream, source);
}

}  // namespace moiety::quant::device
