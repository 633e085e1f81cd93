#include <algorithm>
#include <limits>

#include "moiety/base/launch.cuh"
#include "moiety/quant/convert/transpose_cuda.h"
#include "moiety/quant/convert/transpose_device.cuh"
#include "moiety/quant/device_table.h"
#include "moiety/quant/quantize/quantize_blocks.cuh"

namespace moiety::quant {

struct TransposeTable {
  // One launch serves the jobs of one width of codes: [0] is bytes, [1] is FP4.
  struct Batch {
    Buffer jobs, first_tile;
    int64_t count = 0, tiles = 0;
  };
  Batch batches[2];
};

namespace {

using device::Codes;
using device::kThreads;
using device::kUnit;

// The side of a tile. Codes of half the size have twice the side: runs of 128 bytes.
constexpr int side_of(bool fp4) { return fp4 ? 256 : 128; }
constexpr device::Tiling tiling_of(bool fp4) { return {side_of(fp4), side_of(fp4)}; }

template <bool kFp4>
__global__ void __launch_bounds__(kThreads, kFp4 ? 5 : 4)
    transpose_tiles(const TransposeJob* jobs, const int64_t* first_tile, int64_t count,
                    int64_t tiles) {
  constexpr int kSide = side_of(kFp4);
  constexpr device::Tiling kTiling = tiling_of(kFp4);
  using Tile = device::CodeTile<kFp4, kSide>;
  __shared__ uint4 memory[Tile::kBytes / 16];
  const Tile tile{reinterpret_cast<uint32_t*>(memory)};
  constexpr int kHalf = kFp4 ? 2 : 1;
  // A thread's units are in one column of the tile.
  constexpr int kRows = kThreads / Tile::kParts, kUnits = kSide / kRows;
  const int row = threadIdx.x / Tile::kParts, unit = threadIdx.x % Tile::kParts;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t j = device::job_of(first_tile, count, t);
    const TransposeJob job = jobs[j];
    const device::Place place = device::place_of(
        t - first_tile[j], device::tiles_of(job.rows, job.cols, kTiling).cols, kTiling);
    if (place.first && threadIdx.x < 2) {
      float* pair = threadIdx.x == 0 ? job.amax : job.tensor_scale;
      if (pair) pair[1] = pair[0];
    }
    const int64_t c = place.col + unit * kUnit;
    const uint8_t* from = job.in + (place.row + row) * job.in_pitch + c / kHalf;
    const auto exists = [&](int i) {
      return place.row + row + i * kRows < job.rows && c < job.cols;
    };
    // A row of FP4 is whole units.
    const bool vector = kFp4 || job.in_pitch % 16 == 0;
    if (!vector && job.in_pitch % 4 == 0) {
      // A warp takes its rows word by word.
      constexpr int kWarps = kThreads / 32;
      const int first = threadIdx.x / 32, lane = threadIdx.x % 32;
      const int64_t column = place.col + 4 * lane;
      uint32_t words[kSide / kWarps] = {};
#pragma unroll
      for (int i = 0; i < kSide / kWarps; ++i) {
        const int64_t r = place.row + first + i * kWarps;
        if (r >= job.rows || column >= job.cols) continue;
        words[i] = *reinterpret_cast<const uint32_t*>(job.in + r * job.in_pitch + column);
      }
      __syncthreads();  // the last tile has been written
#pragma unroll
      for (int i = 0; i < kSide / kWarps; ++i) tile.put_word(first + i * kWarps, lane, words[i]);
    } else {
      Codes codes[kUnits] = {};
      if (vector) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          if (exists(i)) {
            codes[i] = device::load_codes<Tile::kUnitBytes>(from + i * kRows * job.in_pitch);
          }
        }
      } else if constexpr (!kFp4) {
        const device::ByteRange all{job.in, job.in + job.rows * job.in_pitch};
        // Two at a time wait together.
#pragma unroll
        for (int i = 0; i < kUnits; i += 2) {
          device::Window<4> window[2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            if (exists(i + k)) window[k].load(from + (i + k) * kRows * job.in_pitch, all);
          }
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            window[k].words(codes[i + k].word);
            device::clear_past<16>(&codes[i + k], job.cols - c);
          }
        }
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kUnits; ++i) tile.put(row + i * kRows, unit, codes[i]);
    }
    __syncthreads();
    const int64_t rows = min(int64_t{kSide}, job.rows - place.row);
    tile.write(job.out + place.col * job.out_pitch + place.row / kHalf, job.out_pitch,
               min(int64_t{kSide}, job.cols - place.col), kFp4 ? (rows + 15) / 16 * 8 : rows);
  }
}

TransposeTable::Batch make_batch(std::span<const TransposeJob> all, bool fp4,
                                 const Stream& stream) {
  TransposeTable::Batch batch;
  std::vector<TransposeJob> jobs;
  std::vector<int64_t> first_tile;
  for (const TransposeJob& job : all) {
    if (job.fp4 != fp4) continue;
    jobs.push_back(job);
    first_tile.push_back(batch.tiles);
    batch.tiles += device::tiles_of(job.rows, job.cols, tiling_of(fp4)).count();
  }
  batch.count = static_cast<int64_t>(jobs.size());
  if (jobs.empty()) return batch;
  batch.jobs = upload(jobs, "table of tensors to be transposed", stream);
  batch.first_tile = upload(first_tile, "table of tensors to be transposed", stream);
  return batch;
}

}  // namespace

std::shared_ptr<const TransposeTable> make_transpose_table(std::span<const TransposeJob> jobs,
                                                           Device device) {
  const Stream stream = Stream::on(device);
  auto table = std::make_shared<TransposeTable>();
  for (const bool fp4 : {false, true}) table->batches[fp4] = make_batch(jobs, fp4, stream);
  stream.synchronize();
  return table;
}

void transpose_cuda(const TransposeTable& table, const Stream& stream) {
  for (const bool fp4 : {false, true}) {
    const TransposeTable::Batch& b = table.batches[fp4];
    const int64_t blocks = std::min<int64_t>(b.tiles, std::numeric_limits<int32_t>::max());
    launch("transpose_quantized", fp4 ? transpose_tiles<true> : transpose_tiles<false>,
           {blocks, kThreads}, stream, reinterpret_cast<const TransposeJob*>(b.jobs.data()),
           reinterpret_cast<const int64_t*>(b.first_tile.data()), b.count, b.tiles);
  }
}

}  // namespace moiety::quant
