// Grouped operations as blocks of work for one thread. Internal to moiety/gemm.
#pragma once

#include <span>

#include "moiety/base/trace.h"
#include "moiety/gemm/gemm_block.h"
#include "moiety/gemm/grouped_gemm.h"

namespace moiety::gemm {

// Rows [begin, begin + rows) of the buffers, which belong to `group`.
struct RowTile {
  int64_t group, begin, rows;
};

// Adds the number of experts, their rows and the rows' work to a span of the profile.
void trace_rows(TraceSpan& span, const Groups& groups, double flops_per_row);

// `rows` as even parts of about `height` rows, at most half more; all but the last are whole grains.
inline constexpr int64_t kTileGrain = 32;
int64_t even_tile(int64_t rows, int64_t height);
// The live rows of each group as such tiles. The result is kept for this thread until its next call.
std::span<const RowTile> row_tiles(const Groups& groups, int64_t height);

// The height of the tiles of a fast path, which keeps a block and the weights it meets in the
// cache. Tiles are twice as high where there are enough of them for all threads, since each packs
// the weights of its expert for itself; not for oneDNN, whose bits depend on them.
inline constexpr int64_t kTileRows = 256;
int64_t tile_height(int64_t rows, DType dtype);
// The rows of all groups.
int64_t live_rows(const Groups& groups);

// `x` as an operand of block products.
ProductOperand block_operand(const GroupedTensor& x);
// Results go to `out`, which also holds the old values.
void set_output(Epilogue& epilogue, void* out, DType dtype, int64_t stride);
// The product of all groups, but for the matrices of the experts: b of kForward and kDgrad, out of
// kWgrad.
Product product_of(const GroupedGemmArgs& args);
// The whole product of group e as its size is now, whose rows are those of the buffers.
Product group_product(const GroupedGemmArgs& args, int64_t e);
// The part of the product, kForward or kDgrad, that gives the rows of a tile.
Product tile_product(const GroupedGemmArgs& args, const RowTile& tile);

void grouped_gemm_reference(const GroupedGemmArgs& args);
void grouped_gemm_cpu(const GroupedGemmArgs& args, GemmEngine engine);
void grouped_bias_grad_reference(const GroupedBiasGradArgs& args);
void grouped_scale_grad_reference(const GroupedScaleGradArgs& args);

// Throws Error(kInvalidArgument) unless x is [capacity, columns] or, with source_R, [any, columns],
// with contiguous columns.
void check_rows(const char* operation, const char* argument, const GroupedTensor& x, DType dtype,
                int64_t capacity, int64_t columns);
void check_scalar(const char* operation, const char* argument, const GroupScalar& scalar,
                  int64_t experts);
void check_sm_limit(const char* operation, int sm_limit);

}  // namespace moiety::gemm
