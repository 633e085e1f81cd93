// The grouped MLP on CPUs: a task takes rows of one expert through all steps while they are in its
// cache. The sums of a token's rows go in chunks of columns that stay in vector registers, each element
// by the reference's chain.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/formats/bf16.h"
#include "moiety/gemm/mlp_steps.h"

namespace moiety::gemm {
namespace {

void run_product(const GroupedGemmArgs& args, const RowTile& tile) {
  block_gemm(tile_product(args, tile));
}

void run_input_gradient(const GroupedGemmArgs& args, int64_t interleave, const RowTile& tile) {
  block_gemm(over_plain_columns(tile_product(args, tile), interleave));
}

ActivationBlock rows_of_tile(const ActivationBlock& block, const RowTile& tile) {
  ActivationBlock out = block;
  out.begin = tile.begin;
  out.rows = tile.rows;
  return out;
}

template <class Run>
void for_tiles(const Groups& groups, Run&& run) {
  const std::span<const RowTile> tiles = row_tiles(groups, kTileRows);
  parallel_tasks(static_cast<int64_t>(tiles.size()), [&](int64_t i) { run(tiles[i]); });
}

constexpr int64_t kChunk = 128;

// Adds `count` rows, from the first on, to nothing.
template <class T>
MOIETY_INLINE void sum(const T* const* rows, int64_t count, int64_t columns, T* out) {
  for (int64_t c = 0; c < columns; c += kChunk) {
    const int64_t n = std::min(kChunk, columns - c);
    alignas(64) float acc[kChunk] = {};
    if (count > 0) {
      for (int64_t i = 0; i < n; ++i) acc[i] = static_cast<float>(rows[0][c + i]);
    }
    for (int64_t k = 1; k < count; ++k) {
      const T* row = rows[k] + c;
      for (int64_t i = 0; i < n; ++i) acc[i] += static_cast<float>(row[i]);
    }
    for (int64_t i = 0; i < n; ++i) out[c + i] = static_cast<T>(acc[i]);
  }
}

MOIETY_SIMD_CLONES void sum_f32(const float* const* rows, int64_t count, int64_t columns,
                                float* out) {
  sum<float>(rows, count, columns, out);
}
MOIETY_SIMD_CLONES void sum_bf16(const bf16* const* rows, int64_t count, int64_t columns,
                                 bf16* out) {
  sum<bf16>(rows, count, columns, out);
}

template <class T, class Sum>
void run(const TensorView& rows_RD, const TensorView& row_TK, const TensorView& out_TD, Sum&& sum) {
  const int64_t top_k = row_TK.size(1), columns = out_TD.size(1);
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(top_k * columns, 1));
  parallel_for(out_TD.size(0), grain, [&](int64_t begin, int64_t end) {
    std::vector<const T*> live(static_cast<size_t>(top_k));
    for (int64_t t = begin; t < end; ++t) {
      int64_t count = 0;
      for (int64_t k = 0; k < top_k; ++k) {
        const int32_t row = row_TK.data<int32_t>()[t * row_TK.stride(0) + k];
        if (row < 0 || row >= rows_RD.size(0)) continue;
        live[static_cast<size_t>(count++)] = rows_RD.data<T>() + row * rows_RD.stride(0);
      }
      sum(live.data(), count, columns, out_TD.data<T>() + t * out_TD.stride(0));
    }
  });
}

}  // namespace

void grouped_mlp_forward_cpu(const MlpForwardSteps& steps) {
  for_tiles(steps.fc1.groups, [&](const RowTile& tile) {
    run_product(steps.fc1, tile);
    activation_forward_cpu(rows_of_tile(steps.activation, tile));
    run_product(steps.fc2, tile);
  });
}

void grouped_mlp_backward_cpu(const MlpBackwardSteps& steps) {
  for_tiles(steps.fc2_dgrad.groups, [&](const RowTile& tile) {
    run_product(steps.fc2_dgrad, tile);
    activation_backward_cpu(rows_of_tile(steps.activation, tile));
    if (steps.fc1_dgrad.out.defined()) run_input_gradient(steps.fc1_dgrad, steps.interleave, tile);
  });
}

void grouped_mlp_input_cpu(const GroupedGemmArgs& fc1_dgrad, int64_t interleave) {
  for_tiles(fc1_dgrad.groups,
            [&](const RowTile& tile) { run_input_gradient(fc1_dgrad, interleave, tile); });
}

Product over_plain_columns(const Product& block, int64_t interleave) {
  constexpr int64_t kInterleave = 32;
  if (interleave == 0 || interleave % kInterleave != 0) return block;
  thread_local std::vector<std::byte> columns;
  thread_local std::vector<int32_t> rows;
  const int64_t ffn = block.k / 2, bytes = byte_size(block.dtype, interleave);
  columns.resize(static_cast<size_t>(byte_size(block.dtype, block.m * block.k)));
  rows.resize(static_cast<size_t>(block.k));
  for (int64_t c = 0; c < block.k; c += interleave) {
    const auto from =
        hidden_column(static_cast<int>(c / ffn), c % ffn, ffn, interleave);  // of H, and row of w1
    std::iota(rows.begin() + c, rows.begin() + c + interleave, static_cast<int32_t>(from));
    for (int64_t r = 0; r < block.m; ++r) {
      const auto* row = static_cast<const std::byte*>(block.a.data) +
                        byte_size(block.dtype, (block.row + r) * block.a.stride + from);
      std::memcpy(columns.data() + byte_size(block.dtype, r * block.k + c), row,
                  static_cast<size_t>(bytes));
    }
  }
  Product out = block;
  out.a = {.data = columns.data(), .stride = block.k, .first = -block.row};
  out.b.source = rows.data();
  out.b.sources = block.k;
  return out;
}

void sum_rows_cpu(const TensorView& rows_RD, const TensorView& row_TK, const TensorView& out_TD) {
  if (rows_RD.dtype() == DType::kBFloat16) return run<bf16>(rows_RD, row_TK, out_TD, sum_bf16);
  run<float>(rows_RD, row_TK, out_TD, sum_f32);
}

}  // namespace moiety::gemm
