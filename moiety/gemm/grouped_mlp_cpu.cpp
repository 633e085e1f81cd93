// The grouped MLP on CPUs: a task takes rows of one expert through all steps while they are in its
// cache.
#include "moiety/base/parallel.h"
#include "moiety/gemm/mlp_steps.h"

namespace moiety::gemm {
namespace {

void run_product(const GroupedGemmArgs& args, const RowTile& tile) {
  block_gemm(tile_product(args, tile));
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
    if (steps.fc1_dgrad.out.defined()) run_product(steps.fc1_dgrad, tile);
  });
}

}  // namespace moiety::gemm
