#include "moiety/gemm/tile_launch.cuh"

namespace moiety::gemm {
namespace {

const TileLaunch& launch_of(const TileKernel& chosen) {
  for (const auto& table : {bf16_tile_launches(), fp32_tile_launches()}) {
    for (const TileLaunch& row : table) {
      if (row.is == chosen) return row;
    }
  }
  fail(ErrorKind::kUnsupported, "gemm: {} has a kernel in no table", name(chosen.dtype));
}

}  // namespace

TileStart tile_start(const TileGemm& g, const Stream& stream) {
  const int processors = gpu_properties(stream.device().index).multiprocessors;
  const TileLaunch& row = launch_of(choose_kernel(g, processors));
  int64_t blocks = row.blocks;
  if (blocks == 0) {
    blocks = resident_blocks(row.kernel, row.threads, row.shared_bytes, stream) / processors;
  }
  const int64_t held = blocks * multiprocessors_of(g, gpu_properties(stream.device().index));
  const int64_t tiles = tile_bound(g, row.rows, row.columns);
  return {row.is.dtype == DType::kFloat32 ? "gemm fp32 tiles" : "gemm tiles",
          row.kernel,
          {std::min(tiles, held), row.threads, row.shared_bytes}};
}

}  // namespace moiety::gemm
