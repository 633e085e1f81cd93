// The kernels of tile_gemm.h as they are launched: one table a source file.
#pragma once

#include <span>

#include "moiety/base/launch.cuh"
#include "moiety/gemm/tile_gemm.h"

namespace moiety::gemm {

struct TileLaunch {
  TileKernel is;
  void (*kernel)(TileGemm);
  int rows, columns, threads;  // of a tile, and of a block
  int64_t shared_bytes = 0;
  int blocks = 0;  // that a multiprocessor is given; 0: as many as it holds
};
std::span<const TileLaunch> bf16_tile_launches();
std::span<const TileLaunch> fp32_tile_launches();

// The launch of a product on the stream's GPU.
struct TileStart {
  const char* name;
  void (*kernel)(TileGemm);
  LaunchShape shape;
};
TileStart tile_start(const TileGemm& g, const Stream& stream);

}  // namespace moiety::gemm
