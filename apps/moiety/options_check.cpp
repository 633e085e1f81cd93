#include "apps/moiety/options_check.h"

#include "apps/moiety/errors.h"
#include "apps/moiety/profile.h"
#include "moiety/base/gpu.h"

namespace moiety::app {
namespace {

template <class... Args>
void require(bool condition, std::string_view format, const Args&... args) {
  if (!condition) throw UsageError(format, args...);
}

void check_device(const Options& o) {
  if (o.run.device != "cuda") return;
  const char* what = "run.device = \"cuda\"";
  require_device(what, {DeviceType::kCuda, 0});
  require(false, "{}: training on GPUs is not available in this version of Moiety", what);
}

}  // namespace

int64_t total_steps(const Options& o) {
  if (o.train.steps > 0) return o.train.steps;
  const int64_t tokens_a_step = o.train.global_batch * o.data.seq_len;
  if (o.train.tokens > 0) return (o.train.tokens + tokens_a_step - 1) / tokens_a_step;
  return 1000;
}

Grid check_layout(const Options& o) {
  const int64_t ranks = o.run.ranks, ep = o.parallel.ep;
  const int64_t dp = o.parallel.dp > 0 ? o.parallel.dp : ranks;
  require(dp == ranks && ranks % ep == 0,
          "layout: run.ranks = {} must be dp {} x gtp 1 x tp 1 and edp {} x egtp 1 x ep {}", ranks,
          dp, ranks % ep == 0 ? std::to_string(ranks / ep) : text("{} / {}", ranks, ep), ep);
  require(o.moe.experts % ep == 0, "parallel.ep = {}: must divide moe.experts = {}", ep,
          o.moe.experts);
  return {int(ranks), int(dp), int(ep), int(ranks / ep)};
}

void check_training(const Options& o, const Grid& grid) {
  check_device(o);
  require(o.data.tokenizer == "bytes",
          "data.tokenizer = \"{}\": only \"bytes\" is available in this version of Moiety",
          o.data.tokenizer);
  const double factor = o.moe.capacity_factor;
  require(factor >= 0 || factor == -1,
          "moe.capacity_factor = {}: 0 (automatic), -1 (worst case) or a positive number", factor);
  require(!o.run.dir.empty(), "no run directory: --run DIR");
  require(o.train.steps == 0 || o.train.tokens == 0,
          "train.steps = {} and train.tokens = {}: one of them", o.train.steps, o.train.tokens);
  const int64_t slice = o.train.micro_batch * grid.dp;
  require(o.train.global_batch % slice == 0,
          "train.global_batch = {}: must be a multiple of train.micro_batch x data ranks = {} x {}",
          o.train.global_batch, o.train.micro_batch, grid.dp);
  parse_profile_steps(o.profile.steps);
  const bool files = !o.data.train.empty();
  require(
      files != (o.data.synthetic != "none"),
      files ? "data.train and data.synthetic = \"{}\" are given: one of them"
            : "data.train = []: token files to train on are missing (`moiety prepare` makes them)",
      o.data.synthetic);
}

}  // namespace moiety::app
