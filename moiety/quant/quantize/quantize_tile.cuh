// Parts that the kernels over tiles of 128 x 128 share: the choice of the tile, the loads from it,
// and the factors of its scales.
#pragma once

#include "moiety/quant/quantize/quantize_scales.cuh"
#include "moiety/quant/quantize/quantize_source.cuh"

namespace moiety::quant::device {

// The number of blocks of a kernel over tiles that a multiprocessor holds: as many as registers
// allow.
template <class T, bool kStochastic>
constexpr int kResident = sizeof(T) == 4 ? 2 : (kStochastic ? 3 : 4);

// Copies the job of kSingle to the place where find_tile puts the jobs of the other kinds. All
// threads call it before the tiles.
__device__ inline void share_job(const Source& s, QuantizeJob* shared) {
  if (s.kind != Source::Kind::kSingle) return;
  const auto* from = reinterpret_cast<const uint32_t*>(&s.job);
  auto* to = reinterpret_cast<uint32_t*>(shared);
  for (int i = threadIdx.x; i < int(sizeof(QuantizeJob) / 4); i += kThreads) to[i] = from[i];
  __syncthreads();
}

__device__ inline int64_t tile_columns(const QuantizeJob& job) {
  return max((job.cols + kTile - 1) / kTile, int64_t{1});
}

// The i-th tile of a block in the second pass over X. For kSingle it counts from the end, which is
// still in the L2.
template <int kSlots = 1>
__device__ bool second_pass_tile(const Source& s, int i, QuantizeJob* shared, Place* place) {
  int64_t tile = block_tile(s, i);
  if (s.kind != Source::Kind::kSingle) return find_tile<kSlots>(s, tile, shared, place);
  if (tile >= s.tiles) return false;
  tile = s.tiles - 1 - tile;
  const int64_t columns = tile_columns(s.job), row = quotient(tile, columns);
  *place = {row * kTile, (tile - row * columns) * kTile, tile == 0};
  return true;
}

// The tiles of a block in the first pass, where there is little else to do. For kSingle they are
// every gridDim.x-th, found by adding.
class TileWalk {
 public:
  __device__ explicit TileWalk(const Source& s) : source_(s) {
    if (s.kind != Source::Kind::kSingle) return;
    const int64_t columns = tile_columns(s.job), blocks = gridDim.x, block = blockIdx.x;
    columns_ = int(columns);
    left_ = int(quotient(s.tiles - 1 - block, blocks)) + 1;
    row_ = int(quotient(block, columns));
    column_ = int(block - row_ * columns);
    row_step_ = int(quotient(blocks, columns));
    column_step_ = int(blocks - row_step_ * columns);
  }
  __device__ bool next(QuantizeJob* shared, Place* place) {
    if (source_.kind != Source::Kind::kSingle) {
      return find_tile(source_, block_tile(source_, found_++), shared, place);
    }
    if (left_-- <= 0) return false;
    *place = {int64_t{row_} * kTile, int64_t{column_} * kTile, (row_ | column_) == 0};
    row_ += row_step_;
    column_ += column_step_;
    if (column_ >= columns_) {
      column_ -= columns_;
      ++row_;
    }
    return true;
  }

 private:
  const Source& source_;
  int found_ = 0;                        // other kinds: number of tiles so far
  int left_ = 0, row_ = 0, column_ = 0;  // kSingle: tiles left, and the next one, in tiles
  int columns_ = 1, row_step_ = 0, column_step_ = 0;
};

// The rows and columns of a tile that exist, from its first element; not more than the tile has,
// and perhaps less than 0.
struct Extent {
  int rows, cols;
  __device__ static Extent of(const QuantizeJob& job, const Place& place) {
    return {int(min(job.rows - place.row, int64_t{kTile})),
            int(min(job.cols - place.col, int64_t{kTile}))};
  }
  __device__ bool whole() const { return rows == kTile && cols == kTile; }
};

constexpr int kUnits = 4;     // units of a thread
constexpr int kUnitStep = 4;  // rows from one unit to the next
// The place of a thread's i-th unit in the tile: eight lanes have a row, so that a warp holds 16
// rows.
__device__ inline int unit_row(int i) {
  return threadIdx.x / 32 * 16 + kUnitStep * i + threadIdx.x % 32 / 8;
}
__device__ inline int unit_col() { return threadIdx.x % 8 * kUnit; }

template <class T>
__device__ ByteRange bytes_of(const QuantizeJob& job) {
  const auto* x = static_cast<const uint8_t*>(job.x);
  return {x, x + ((job.rows - 1) * job.stride + job.cols) * int64_t(sizeof(T))};
}

// Loads the thread's units of a tile; elements outside of X are +0.
template <class T>
__device__ void load_units(const QuantizeJob& job, const Place& place, Unit<T> (&x)[kUnits]) {
  const T* base = static_cast<const T*>(job.x);
  const auto address = reinterpret_cast<uintptr_t>(base) | uintptr_t(job.stride) * sizeof(T);
  const Extent extent = Extent::of(job, place);
  const T* p = base + (place.row + unit_row(0)) * job.stride + place.col + unit_col();
  const int64_t step = kUnitStep * job.stride;
  const auto load = [&](auto bytes) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      x[i] = unit_row(i) < extent.rows ? load_unit<bytes.value>(p + i * step) : Unit<T>{};
    }
  };
  if (extent.cols == kTile && address % 16 == 0) {
    return load(std::integral_constant<int, 16>{});
  }
  if (extent.cols == kTile && address % 8 == 0) return load(std::integral_constant<int, 8>{});
  const ByteRange all = bytes_of<T>(job);
  // Two at a time wait together.
#pragma unroll
  for (int i = 0; i < kUnits; i += 2) {
    RaggedUnit<T> pair[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int valid = unit_row(i + k) < extent.rows ? extent.cols - unit_col() : 0;
      pair[k].load(p + (i + k) * step, valid, all);
    }
    x[i] = pair[0].unit();
    x[i + 1] = pair[1].unit();
  }
}

// Two threads compute the factors of the wanted directions for all. It has barriers where the
// format has factors.
template <Format F>
__device__ void share_factors(const QuantizeJob& job, TensorFactors<F> (&factors)[2]) {
  if constexpr (is_tensor_scaled(F)) {
    __syncthreads();  // all threads are done with the last tile's factors
    const int direction = threadIdx.x;
    if (direction < 2 && (direction == 0 ? job.want_row : job.want_col)) {
      factors[direction] = TensorFactors<F>::of(job, direction);
    }
    __syncthreads();
  }
}

// Prepares a tile's cast after the loads of its elements were begun: waits for the measurements of
// the kernels before this one, has the job's scalars written by one thread, and sets `factors` to
// those of the job.
template <Format F>
__device__ void begin_cast(const QuantizeJob& job, const Place& place, bool new_job,
                           TensorFactors<F> (&factors)[2]) {
  cudaGridDependencySynchronize();
  if (place.first && threadIdx.x == 0) write_scalars<F>(job);
  if (new_job) share_factors<F>(job, factors);
}

}  // namespace moiety::quant::device
