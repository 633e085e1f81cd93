// The kernels of this folder as they are launched: parameters, and one table a source file.
#pragma once

#include <cuda.h>
#include <span>

#include "moiety/base/launch.cuh"
#include "moiety/gemm/sm90/fused.h"
#include "moiety/gemm/sm90/grouped_sm90.h"

namespace moiety::gemm::sm90 {

// The matrices of groups, as places in their map (tensor_map.cuh).
struct MatrixPlaces {
  const char* first = nullptr;  // the lowest address
  int64_t stride = 0;           // bytes from one to the next, where they have one
};

struct Maps {
  CUtensorMap a, b, out;
  MatrixPlaces matrices;
  bool in_step = false;  // whether blocks wait for each other between tiles: in_step.cuh
};

struct KernelLaunch {
  Kernel is;
  void (*kernel)(Maps, TileGemm);
  int threads;
  int64_t shared_bytes;
};
std::span<const KernelLaunch> forward_launches();
std::span<const KernelLaunch> forward_gathered_launches();
std::span<const KernelLaunch> dgrad_launches();
std::span<const KernelLaunch> dgrad_gathered_launches();
std::span<const KernelLaunch> wgrad_launches();
std::span<const KernelLaunch> wgrad_gathered_launches();
std::span<const KernelLaunch> wgrad_turns_launches();
std::span<const KernelLaunch> pairs_launches();
std::span<const KernelLaunch> exchanged_launches();

// Those of fused.h.
struct FusedMaps {
  Maps products;
  CUtensorMap h[2], dh[2], a;  // rows of both halves of H and of dH, and of A; boxes of 8 rows
  int32_t pairs;  // F, if half of a tile's columns is F after the other; 0 if they are neighbours
};
struct FusedLaunch {
  void (*kernel)(FusedMaps, TileGemm, FusedActivation);
  int threads;
  int64_t shared_bytes;
};
FusedLaunch fused_forward_launch(const FusedKernel& kernel);
FusedLaunch fused_forward_gathered_launch(const FusedKernel& kernel);
FusedLaunch fused_backward_launch(const FusedKernel& kernel);
FusedLaunch fused_backward_gathered_launch(const FusedKernel& kernel);

// The launch of a product that is not refused, on the stream's GPU, by choose_kernel's or another
// kernel that takes it. The product becomes what the kernel is told.
struct Start {
  void (*kernel)(Maps, TileGemm);
  LaunchShape shape;
  Maps maps;
};
Start start(TileGemm& g, const Kernel& kernel, const Stream& stream);

struct FusedStart {
  void (*kernel)(FusedMaps, TileGemm, FusedActivation);
  LaunchShape shape;
  FusedMaps maps;
};
FusedStart start_fused(const TileGemm& g, const FusedActivation& activation, const Stream& stream);

}  // namespace moiety::gemm::sm90
