// The arguments and the work of `moiety plan`.
#include <array>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/plan.h"
#include "apps/moiety/commands/plan_timeline.h"
#include "apps/moiety/config/train_options.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/people.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/replace_file.h"
#include "moiety/model/step_trace.h"
#include "moiety/train/hardware.h"
#include "moiety/train/precision.h"

namespace moiety::app {
namespace {

using train::data_ranks, train::Hardware, train::TrainConfig;

constexpr const char* kPlanAbout =
    "What a layout would do to a training step, from shapes alone: no device is touched and "
    "nothing\n"
    "runs. --gtp plans generalized tensor parallelism with the planner that training would use:\n"
    "gathers, reduces, slots, and what of the transfers computing has to wait for. Times are\n"
    "estimates by the rates of --hardware.\n\n"
    "Configuration and layout as for moiety train: --config files, then --section.key=value;\n"
    "the degrees are parallel.tp, gtp, ep and egtp, and dp is what remains.";

// Shares of the peaks that are reached, until they are measured.
constexpr double kGemmShare = 0.80, kMemoryShare = 0.90, kLinkShare = 0.82;

constexpr int64_t kMostLayers = 1 << 16;

struct PlanArguments {
  std::vector<std::string> files;
  std::string ranks, hardware = "h200", out;
  bool gtp = false;
  double begin_ms = 0, end_ms = 0;
};

void add_options(CLI::App& app, PlanArguments& a) {
  app.add_option("--config", a.files, "TOML file; several are read in order")
      ->take_all()
      ->expected(1);
  app.add_option("--ranks", a.ranks, "ranks: run.ranks");
  app.add_flag("--gtp", a.gtp, "the plan of gathers and reduces");
  Rule names;
  for (const Hardware& h : train::kHardware) names.choices.emplace_back(h.name);
  add_word(app, "--hardware", a.hardware, names, range_text(names));
  app.add_option("--out", a.out, "an SVG picture of the step; - is stdout, in place of the report");
  add_number(app, "--from", a.begin_ms, between(0, 1e9), "begin of the picture, ms of the step");
  add_number(app, "--to", a.end_ms, between(0, 1e9), "its end; 0 is the step's");
}

bool linked(const Hardware& h, const gtp::Grid& grid) {
  return grid.tp * grid.gtp <= h.domain && grid.ep * grid.egtp <= h.domain;
}

gtp::Policy policy_of(const Hardware& h, train::Recipe recipe, const gtp::Grid& grid) {
  if (recipe == train::Recipe::kFp32) {
    throw UsageError(
        "precision.recipe = \"fp32\": plan has rates of bf16 and of quantized formats");
  }
  gtp::Policy policy = gtp::Policy::for_memory(h.memory);
  policy.flops_per_ns = 1e3 * kGemmShare * h.rate(recipe);
  policy.memory_bytes_per_ns = 1e3 * kMemoryShare * h.bandwidth;
  policy.bytes_per_ns = kLinkShare * (linked(h, grid) ? h.link : h.network);
  return policy;
}

model::StepShape shape_of(const TrainConfig& o, const Hardware& h, const gtp::Grid& grid) {
  const int64_t slice = o.train.micro_batch * data_ranks(grid);
  if (o.train.global_batch % slice != 0) {
    throw UsageError(
        "train.global_batch = {}: must be a multiple of train.micro_batch x data ranks = {} x {}",
        o.train.global_batch, o.train.micro_batch, data_ranks(grid));
  }
  // Every layer of every micro-batch is planned.
  const int64_t micro_batches = o.train.global_batch / slice, most = kMostLayers / o.model.layers;
  if (micro_batches > most) {
    throw UsageError(
        "train.global_batch = {}: makes {} micro-batches; of {} layers at most {} are planned, and "
        "fewer show the same",
        o.train.global_batch, micro_batches, o.model.layers, most);
  }
  return {.grid = grid,
          .sequences = o.train.micro_batch,
          .seq_len = o.data.seq_len,
          .micro_batches = int(micro_batches),
          .storage = storage_dtype(o),
          .wire = gradient_wire(o),
          .mapped = linked(h, grid)};
}

std::string describe(const TrainConfig& o, const Hardware& h, const model::StepShape& s) {
  const gtp::Grid& g = s.grid;
  return text("tp {} x gtp {} x dp {}, ep {} x egtp {} x edp {}; {} of {}; {} on {}", g.tp, g.gtp,
              g.dp, g.ep, g.egtp, g.edp, counted(s.micro_batches, "micro-batch"),
              counted(s.sequences * s.seq_len, "token"), name(o.precision.recipe), h.name);
}

void plan_gtp(const TrainConfig& o, const PlanArguments& a) {
  const Hardware& hardware = *std::find_if(train::kHardware.begin(), train::kHardware.end(),
                                           [&](const Hardware& h) { return h.name == a.hardware; });
  const gtp::Grid grid = check_layout(o);
  const gtp::Policy policy = policy_of(hardware, o.precision.recipe, grid);
  const model::StepShape shape = shape_of(o, hardware, grid);
  const model::StepTrace trace =
      model::step_trace(o.model, precision_of_recipe(o, o.precision.recipe), shape, policy);
  PlannedStep step{trace.events, trace.bundles, gtp::plan(trace.events, trace.bundles, policy), {}};
  step.schedule = gtp::simulate(step.plan, step.trace, step.bundles, policy);
  const bool by_rows = std::any_of(trace.bundles.begin(), trace.bundles.end(),
                                   [](const gtp::BundleSpec& b) { return b.rows.tokens > 0; });
  const std::string about = describe(o, hardware, shape) + (by_rows ? "; embedding by rows" : "");
  if (a.out != "-") print_result(text("layout     {}\n{}", about, plan_report(step)));
  if (a.out.empty()) return;
  TimelineOptions options{.title = "A step's plan", .note = about, .begin_ns = 1e6 * a.begin_ms};
  if (a.end_ms > 0) options.end_ns = 1e6 * a.end_ms;
  const std::string svg = draw_timeline(step, options);
  if (a.out == "-") {
    print_result(svg);
  } else {
    replace_file(a.out, svg);
  }
}

}  // namespace

int plan_command(const std::vector<std::string>& given) {
  std::vector<std::string> arguments = given;
  std::vector<std::string> overrides = take_overrides(arguments);
  PlanArguments a;
  CLI::App app(kPlanAbout, "moiety plan");
  add_options(app, a);
  if (!parse_command_line(app, arguments)) return kExitDone;
  if (!a.gtp) throw UsageError("--gtp is missing: it is what this version of Moiety can plan");
  if (a.end_ms > 0 && a.end_ms <= a.begin_ms) {
    throw UsageError("--from {} and --to {}: the end must be behind the beginning", a.begin_ms,
                     a.end_ms);
  }
  if (!a.ranks.empty()) overrides.insert(overrides.begin(), "--run.ranks=" + a.ranks);
  const Config config = load_config(a.files, overrides);
  try {
    plan_gtp(train_config(config.options), a);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kInvalidArgument) throw;
    throw UsageError("{}", e.what());  // the layout does not fit the model, or the memory
  }
  return kExitDone;
}

}  // namespace moiety::app
