#include <algorithm>
#include <utility>

#include "moiety/gemm/sm90/launch.cuh"
#include "moiety/gemm/sm90/tensor_map.cuh"

namespace moiety::gemm::sm90 {
namespace {

const KernelLaunch& launch_of(const Kernel& chosen) {
  for (const auto& table : {forward_launches(), forward_gathered_launches(), dgrad_launches(),
                            dgrad_gathered_launches(), wgrad_launches(), wgrad_gathered_launches(),
                            wgrad_turns_launches(), pairs_launches(), exchanged_launches()}) {
    for (const KernelLaunch& row : table) {
      if (row.is == chosen) return row;
    }
  }
  fail(ErrorKind::kUnsupported, "grouped_gemm: tiles of {} columns are in no table of sm90",
       chosen.columns);
}

// The groups' matrices, `rows` by g.n or g.k elements, b or out.
MapMatrices matrices_of(const TileGemm& g, int64_t rows, int64_t columns) {
  const bool out = g.ragged == Ragged::kReduction;
  MapMatrices m{.first = out ? g.epilogue.out : g.b.data,
                .dtype = out ? g.epilogue.out_dtype : g.dtype,
                .rows = rows,
                .columns = columns,
                .row_stride = out ? g.epilogue.out_stride : g.b.stride,
                .groups = g.groups.groups};
  if (g.indexed) {
    m.first = *std::min_element(g.pointers, g.pointers + g.groups.groups);
  } else {
    m.stride = std::max<int64_t>(byte_size(m.dtype, g.group_stride), 16);
  }
  return m;
}

constexpr int kBox = 64;  // rows, where 64 columns of an operand are copied at a time

// `matrix_rows`: of a box of the matrix, where it has 64 columns. `transposed`: the result is the
// transpose of what g says, with 64 of its columns in a box. `exchanged`: rows come in boxes of as many
// as such a tile may have, and leave in others.
Maps maps_of(const TileGemm& g, int columns_at_once, int matrix_rows = kBox,
             bool transposed = false, bool exchanged = false) {
  const auto rows_of = [&](const ProductOperand& x, int64_t width, int box_rows) {
    return x.source ? CUtensorMap{} : ragged_map(x.data, g.dtype, width, x.stride, box_rows);
  };
  Maps maps{};
  MapMatrices matrices;
  const bool alone = (g.a.source || g.b.source) && !transposed;  // Layout::kAlone
  const int stored = alone ? 16 : kBox;                          // rows
  if (g.op == GemmOp::kNT) {
    maps.a = rows_of(g.a, g.m, kBox);
    maps.b = rows_of(g.b, g.n, kBox);
    const bool halves = transposed && g.epilogue.out_dtype == DType::kFloat32;
    matrices = transposed ? matrices_of(g, g.n, g.m) : matrices_of(g, g.m, g.n);
    maps.out = matrix_map(matrices, halves ? kBox / 2 : stored);
  } else {
    const bool forward = g.op == GemmOp::kTN;
    const Epilogue& e = g.epilogue;
    matrices = matrices_of(g, forward ? g.n : g.k, forward ? g.k : g.n);
    maps.a = rows_of(g.a, g.k, exchanged ? kExchangedRows : kTileRows);
    maps.b = matrix_map(matrices, forward ? columns_at_once : matrix_rows);
    maps.out =
        ragged_map(e.out, e.out_dtype, g.n, e.out_stride, exchanged ? kExchangedBox : stored);
  }
  maps.matrices = {static_cast<const char*>(matrices.first), matrices.stride};
  return maps;
}

// Of a kernel whose tiles take a block each, or `together` blocks.
LaunchShape shape_of(const TileGemm& g, int64_t tiles, int together, int threads,
                     int64_t shared_bytes, const Stream& stream) {
  const int64_t processors = multiprocessors_of(g, gpu_properties(stream.device().index));
  return {together * std::min(tiles, processors / together), threads, shared_bytes};
}

}  // namespace

Start start(TileGemm& g, const Kernel& kernel, const Stream& stream) {
  const KernelLaunch& row = launch_of(kernel);
  if (kernel.transposed) {
    std::swap(g.a, g.b);
    std::swap(g.m, g.n);
  }
  const int rows = kernel.transposed ? kTileRows : tile_rows(g.op, kernel.gathered);
  const int64_t tiles = tile_bound(g, rows, row.is.columns);
  const int together = row.is.pairs ? kPair : 1;
  LaunchShape shape = shape_of(g, tiles, together, row.threads, row.shared_bytes, stream);
  Maps maps =
      maps_of(g, row.is.columns / together, kBox / together, kernel.transposed, kernel.exchanged);
  if (kernel.exchanged) {
    if (const auto pairs = pairs_in_step(g, shape.blocks / kPair)) {
      maps.in_step = true;
      shape.blocks = kPair * *pairs;
    }
  }
  return {row.kernel, shape, maps};
}

namespace {

// Rows of one half of H or dH, or of A, in boxes of 8 rows.
CUtensorMap activation_map(const void* rows, int64_t ffn, int64_t stride, int64_t first,
                           int64_t box_bytes) {
  if (!rows) return {};
  return ragged_map(static_cast<const uint16_t*>(rows) + first, DType::kBFloat16, ffn, stride, 8,
                    box_bytes);
}

FusedMaps fused_maps(const TileGemm& g, const ActivationBlock& x, const FusedKernel& kernel) {
  FusedMaps maps{};
  maps.products = maps_of(g, kernel.columns / 2, kernel.pairs ? kBox / 2 : kBox);
  const bool gated = x.activation.gated();
  const int64_t box = g.op == GemmOp::kTN ? kNarrowBytes : kBoxBytes;  // FusedLayout::kBoxRow
  for (int half = 0; half < (gated ? 2 : 1); ++half) {
    maps.h[half] = activation_map(x.h, x.ffn, x.h_stride, half * x.ffn, box);
    maps.dh[half] = activation_map(x.dh, x.ffn, x.dh_stride, half * x.ffn, box);
  }
  maps.a = activation_map(x.a, x.ffn, x.a_stride, 0, box);
  if (g.op == GemmOp::kTN && gated) maps.pairs = static_cast<int32_t>(x.ffn);
  return maps;
}

}  // namespace

FusedStart start_fused(const TileGemm& g, const FusedActivation& activation, const Stream& stream) {
  const bool forward = g.op == GemmOp::kTN, gathers = g.a.source;
  const FusedKernel kernel = choose_fused(g, activation.block.activation.gated());
  const FusedLaunch row =
      forward   ? gathers ? fused_forward_gathered_launch(kernel) : fused_forward_launch(kernel)
        : gathers ? fused_backward_gathered_launch(kernel)
                : fused_backward_launch(kernel);
  const int64_t tiles = tile_bound(g, kTileRows, kernel.columns);
  const int together = kernel.pairs ? kPair : 1;
  return {row.kernel, shape_of(g, tiles, together, row.threads, row.shared_bytes, stream),
          fused_maps(g, activation.block, kernel)};
}

}  // namespace moiety::gemm::sm90
