#include <algorithm>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/gemm/grouped_block.h"

namespace moiety::gemm {

// A task is some hundred rows of the output within an expert: there are enough of them for all cores
// also where experts are small. An element's bits do not depend on them.
void grouped_gemm_cpu(const GroupedGemmArgs& args, GemmEngine engine) {
  if (args.op == GroupedOp::kWgrad) {
    const int64_t rows = args.a.data.size(args.transposed ? 0 : 1);
    const int64_t height =
        even_tile(rows, tile_height(rows * args.groups.experts, args.a.data.dtype()));
    const int64_t blocks = ceil_div(rows, height);
    parallel_tasks(args.groups.experts * blocks, [&](int64_t task) {
      Product g = group_product(args, task / blocks);
      g.row = task % blocks * height;
      g.m = std::min(height, rows - g.row);
      block_gemm(g, engine);
    });
    return;
  }
  const std::span<const RowTile> tiles =
      row_tiles(args.groups, tile_height(live_rows(args.groups), args.a.data.dtype()));
  parallel_tasks(static_cast<int64_t>(tiles.size()),
                 [&](int64_t task) { block_gemm(tile_product(args, tiles[task]), engine); });
}

}  // namespace moiety::gemm
