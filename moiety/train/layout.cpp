#include "moiety/train/layout.h"

#include <utility>

#include "moiety/base/error.h"

namespace moiety::train {

std::string describe_layout(const Grid& grid) {
  const int ranks = rank_count(grid);
  std::string degrees;
  for (const auto& [name, degree] :
       {std::pair("dp", grid.dp), std::pair("gtp", grid.gtp), std::pair("tp", grid.tp),
        std::pair("edp", grid.edp), std::pair("egtp", grid.egtp), std::pair("ep", grid.ep)}) {
    if (degree == 1) continue;
    degrees += text("{}{} {}", degrees.empty() ? " (" : ", ", name, degree);
  }
  return text("{} rank{}{}{}", ranks, ranks == 1 ? "" : "s", degrees, degrees.empty() ? "" : ")");
}

int64_t micro_steps(const TrainConfig& config, const Grid& grid) {
  return config.train.global_batch / (config.train.micro_batch * data_ranks(grid));
}

Grid check_layout(const TrainConfig& c) {
  const auto& p = c.parallel;
  const int64_t ranks = c.run.ranks, slices = p.tp * p.gtp;
  const int64_t shares = p.ep <= ranks ? p.ep * p.egtp : ranks + 1;
  if (p.dp != 0 && p.dp * slices != ranks) {
    throw UsageError("layout: run.ranks = {}, but parallel.dp x gtp x tp = {} x {} x {} = {}",
                     ranks, p.dp, p.gtp, p.tp, p.dp * slices);
  }
  if (ranks % slices != 0) {
    throw UsageError("layout: run.ranks = {}: must be a multiple of parallel.gtp x tp = {} x {}",
                     ranks, p.gtp, p.tp);
  }
  if (ranks % shares != 0) {
    throw UsageError("layout: run.ranks = {}: must be a multiple of parallel.ep x egtp = {} x {}",
                     ranks, p.ep, p.egtp);
  }
  if (c.model.router.experts % p.ep != 0) {
    throw UsageError("parallel.ep = {}: must divide moe.experts = {}", p.ep,
                     c.model.router.experts);
  }
  if (c.model.heads % p.tp != 0 || c.model.kv_heads % p.tp != 0 || c.data.seq_len % p.tp != 0) {
    throw UsageError(
        "parallel.tp = {}: must divide model.heads = {}, model.kv_heads = {} and data.seq_len = {}",
        p.tp, c.model.heads, c.model.kv_heads, c.data.seq_len);
  }
  return {.tp = int(p.tp),
          .gtp = int(p.gtp),
          .dp = int(ranks / slices),
          .ep = int(p.ep),
          .egtp = int(p.egtp),
          .edp = int(ranks / shares)};
}

checkpoint::RankLayout rank_layout(const Grid& grid) {
  return {.ranks = rank_count(grid),
          .tp = grid.tp,
          .gtp = grid.gtp,
          .dp = grid.dp,
          .ep = grid.ep,
          .egtp = grid.egtp};
}

}  // namespace moiety::train
