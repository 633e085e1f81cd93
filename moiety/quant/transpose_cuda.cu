#include <algorithm>
#include <limits>

#include "moiety/base/launch.cuh"
#include "moiety/quant/device_table.h"
#include "moiety/quant/quantize_blocks.cuh"
#include "moiety/quant/transpose_cuda.h"
#include "moiety/quant/transpose_device.cuh"

namespace moiety::quant {

struct TransposeTable {
  // One launch serves the jobs of one width of codes: [0] bytes, [1] FP4.
  struct Batch {
    Buffer jobs, first_tile;
    int64_t count = 0, tiles = 0;
  };
  Batch batches[2];
};

namespace {

using device::Codes;
using device::CodeTile;
using device::kThreads;
using device::kTile;
using device::kUnit;

// The unit of codes at p, of which `valid` (perhaps <= 0) exist; the others are 0. A row of FP4 is
// whole units.
template <bool kFp4>
__device__ Codes load_codes(const uint8_t* p, int64_t valid) {
  Codes out{};
  if (valid <= 0) return out;
  constexpr int kBytes = CodeTile<kFp4>::kUnitBytes;
  if ((kFp4 || valid >= kUnit) && reinterpret_cast<uintptr_t>(p) % kBytes == 0) {
    if constexpr (kFp4) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
      out.word[0] = v.x;
      out.word[1] = v.y;
    } else {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
      out.word[0] = v.x;
      out.word[1] = v.y;
      out.word[2] = v.z;
      out.word[3] = v.w;
    }
    return out;
  }
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (kFp4 || i < valid) out.word[i / 4] |= uint32_t{p[i]} << 8 * (i % 4);
  }
  return out;
}

template <bool kFp4>
__global__ void __launch_bounds__(kThreads)
    transpose_tiles(const TransposeJob* jobs, const int64_t* first_tile, int64_t count,
                    int64_t tiles) {
  __shared__ uint4 memory[CodeTile<kFp4>::kBytes / 16];
  const CodeTile<kFp4> tile{reinterpret_cast<uint32_t*>(memory)};
  constexpr int kHalf = kFp4 ? 2 : 1;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t j = device::job_of(first_tile, count, t);
    const TransposeJob job = jobs[j];
    const device::Place place =
        device::place_of(t - first_tile[j], device::tiles_of(job.rows, job.cols, {}).cols, {});
    if (place.first && threadIdx.x < 2) {
      float* pair = threadIdx.x == 0 ? job.amax : job.tensor_scale;
      if (pair) pair[1] = pair[0];
    }
    Codes codes[device::kUnits];
    const int64_t c = place.col + device::unit_col();
#pragma unroll
    for (int i = 0; i < device::kUnits; ++i) {
      const int64_t r = place.row + device::unit_row(i);
      codes[i] =
          load_codes<kFp4>(job.in + r * job.in_pitch + c / kHalf, r < job.rows ? job.cols - c : 0);
    }
    __syncthreads();  // the last tile is out
#pragma unroll
    for (int i = 0; i < device::kUnits; ++i) {
      tile.put(device::unit_row(i), device::unit_col() / kUnit, codes[i]);
    }
    __syncthreads();
    const int64_t rows = min(int64_t{kTile}, job.rows - place.row);
    tile.write(job.out + place.col * job.out_pitch + place.row / kHalf, job.out_pitch,
               min(int64_t{kTile}, job.cols - place.col), kFp4 ? (rows + 15) / 16 * 8 : rows);
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
    batch.tiles += device::tiles_of(job.rows, job.cols, {}).count();
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
