#include "apps/moiety/config/options_check.h"

#include <algorithm>

#include "apps/moiety/exit_code.h"
#include "moiety/train/profile.h"

namespace moiety::app {
namespace {

template <class... Args>
void require(bool condition, std::string_view format, const Args&... args) {
  if (!condition) throw UsageError(format, args...);
}

bool is_quantized(const std::string& recipe) { return recipe != "fp32" && recipe != "bf16"; }

void check_precision(const Options& o, const Grid& grid) {
  const auto& p = o.precision;
  const bool switches = p.switch_step > 0;
  require(!switches || p.recipe != "fp32",
          "precision.switch_step = {}: a run of recipe fp32 cannot switch, its activations are "
          "stored in fp32",
          p.switch_step);
  require(
      p.dispatch == "auto" || p.recipe != "fp32",
      "precision.dispatch = \"{}\": recipe fp32 stores activations in fp32, and its rows travel "
      "so",
      p.dispatch);
  const auto uses = [&](std::string_view recipe) {
    return p.recipe == recipe || (switches && p.switch_recipe == recipe);
  };
  require(!uses("fp8_block") || p.weight_2d != "false",
          "precision.weight_2d = \"false\": weights of recipe fp8_block are scaled by 128 x 128");
  const int64_t kept = std::max<int64_t>(p.keep_first, 0) + std::max<int64_t>(p.keep_last, 0);
  require(kept <= o.model.layers || !(is_quantized(p.recipe) || switches),
          "precision.keep_first = {} and precision.keep_last = {}: model.layers is {}",
          p.keep_first, p.keep_last, o.model.layers);
  const int64_t tokens = o.train.micro_batch * o.data.seq_len;
  require(!uses("nvfp4") || !p.stochastic || data_ranks(grid) == 1 || tokens % 16 == 0,
          "train.micro_batch x data.seq_len = {} x {}: must be a multiple of 16 on several data "
          "ranks, for precision.stochastic of recipe nvfp4",
          o.train.micro_batch, o.data.seq_len);
}

}  // namespace

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

int64_t total_steps(const Options& o) {
  if (o.train.steps > 0) return o.train.steps;
  const int64_t tokens_a_step = o.train.global_batch * o.data.seq_len;
  if (o.train.tokens > 0) return (o.train.tokens + tokens_a_step - 1) / tokens_a_step;
  return 1000;
}

Grid check_layout(const Options& o) {
  const auto& p = o.parallel;
  const int64_t ranks = o.run.ranks, slices = p.tp * p.gtp;
  const int64_t shares = p.ep <= ranks ? p.ep * p.egtp : ranks + 1;
  const auto what_remains = [&](int64_t taken) {
    return ranks % taken == 0 ? std::to_string(ranks / taken) : text("{} / {}", ranks, taken);
  };
  const bool covered = ranks % slices == 0 && (p.dp == 0 || p.dp == ranks / slices);
  require(covered && ranks % shares == 0,
          "layout: run.ranks = {} must be dp {} x gtp {} x tp {} and edp {} x egtp {} x ep {}",
          ranks, p.dp > 0 ? std::to_string(p.dp) : what_remains(slices), p.gtp, p.tp,
          what_remains(shares), p.egtp, p.ep);
  require(o.moe.experts % p.ep == 0, "parallel.ep = {}: must divide moe.experts = {}", p.ep,
          o.moe.experts);
  require(o.model.heads % p.tp == 0 && o.model.kv_heads % p.tp == 0 && o.data.seq_len % p.tp == 0,
          "parallel.tp = {}: must divide model.heads = {}, model.kv_heads = {} and data.seq_len = "
          "{}",
          p.tp, o.model.heads, o.model.kv_heads, o.data.seq_len);
  return {.tp = int(p.tp),
          .gtp = int(p.gtp),
          .dp = int(ranks / slices),
          .ep = int(p.ep),
          .egtp = int(p.egtp),
          .edp = int(ranks / shares)};
}

void check_training(const Options& o, const Grid& grid) {
  check_precision(o, grid);
  require(o.data.tokenizer == "bytes",
          "data.tokenizer = \"{}\": only \"bytes\" is available in this version of Moiety",
          o.data.tokenizer);
  const double factor = o.moe.capacity_factor;
  require(factor >= 0 || factor == -1,
          "moe.capacity_factor = {}: 0 (automatic), -1 (worst case) or a positive number", factor);
  require(!o.run.dir.empty(), "no run directory: --run DIR");
  require(o.train.steps == 0 || o.train.tokens == 0,
          "train.steps = {} and train.tokens = {}: one of them", o.train.steps, o.train.tokens);
  const int64_t slice = o.train.micro_batch * data_ranks(grid);
  require(o.train.global_batch % slice == 0,
          "train.global_batch = {}: must be a multiple of train.micro_batch x data ranks = {} x {}",
          o.train.global_batch, o.train.micro_batch, data_ranks(grid));
  parse_profile_steps(o.profile.steps);
  const bool files = !o.data.train.empty();
  require(
      files != (o.data.synthetic != "none"),
      files ? "data.train and data.synthetic = \"{}\" are given: one of them"
            : "data.train = []: token files to train on are missing (`moiety prepare` makes them)",
      o.data.synthetic);
}

}  // namespace moiety::app
