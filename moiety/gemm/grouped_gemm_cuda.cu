#include "moiety/base/launch.cuh"
#include "moiety/gemm/grouped_block.h"
#include "moiety/gemm/grouped_gemm_cuda.h"
#include "moiety/gemm/sm90/launch.cuh"
#include "moiety/gemm/tile_launch.cuh"

namespace moiety::gemm {

TileGemm tile_gemm_of(const GroupedGemmArgs& args, int64_t first) {
  TileGemm g{product_of(args)};
  g.groups.first = first;
  void* data = nullptr;
  int64_t stride;
  if (const TensorView& packed = args.w.packed(); packed.defined()) {
    data = packed.raw();
    stride = packed.stride(1);
    g.group_stride = packed.stride(0);
  } else {
    g.indexed = true;
    g.groups.groups = 0;
    stride = args.w[first].stride(0);
    for (int64_t e = first; e < args.w.experts() && e < first + TileGemm::kPointers; ++e) {
      const TensorView w = args.w[e];
      if (w.stride(0) != stride) break;
      g.pointers[g.groups.groups++] = w.raw();
    }
  }
  if (g.ragged == Ragged::kReduction) {
    set_output(g.epilogue, data, args.w.dtype(), stride);
  } else {
    g.b = {data, stride};
  }
  return g;
}

void grouped_gemm_cuda(const GroupedGemmArgs& args, TileKernels kernels, const Stream& stream) {
  const GpuProperties& gpu = gpu_properties(stream.device().index);
  for (int64_t e = 0; e < args.groups.experts;) {
    TileGemm g = tile_gemm_of(args, e);
    if (kernels == TileKernels::kFastest && !sm90::refusal(g, gpu)) {
      const sm90::Start start =
          sm90::start(g, sm90::choose_kernel(g, multiprocessors_of(g, gpu)), stream);
      launch("grouped gemm sm90", start.kernel, start.shape, stream, start.maps, g);
    } else {
      const TileStart start = tile_start(g, stream);
      launch(start.name, start.kernel, start.shape, stream, g);
    }
    e += g.groups.groups;
  }
}

bool grouped_activation_cuda(const GroupedGemmArgs& args, const ActivationBlock& activation,
                             std::byte* segments, const Stream& stream) {
  const GpuProperties& gpu = gpu_properties(stream.device().index);
  const sm90::FusedActivation fused{
      activation, activation.dprob ? reinterpret_cast<float*>(segments) : nullptr};
  for (int64_t e = 0; e < args.groups.experts;) {  // before anything is launched
    const TileGemm g = tile_gemm_of(args, e);
    if (sm90::refusal(g, gpu) || sm90::fused_refusal(g, fused)) return false;
    e += g.groups.groups;
  }
  for (int64_t e = 0; e < args.groups.experts;) {
    const TileGemm g = tile_gemm_of(args, e);
    const sm90::FusedStart start = sm90::start_fused(g, fused, stream);
    launch("grouped activation sm90", start.kernel, start.shape, stream, start.maps, g, fused);
    e += g.groups.groups;
  }
  if (fused.segments) {
    sum_segments_cuda(args.groups, fused.segments, sm90::segment_count(activation.ffn),
                      static_cast<float*>(activation.dprob), stream);
  }
  return true;
}

}  // namespace moiety::gemm
