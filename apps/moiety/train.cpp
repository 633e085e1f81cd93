#include "apps/moiety/train.h"

#include <atomic>

#include "apps/moiety/checkpoints.h"
#include "apps/moiety/console.h"
#include "apps/moiety/errors.h"
#include "apps/moiety/model_options.h"
#include "apps/moiety/options_check.h"
#include "apps/moiety/run_directory.h"
#include "apps/moiety/signals.h"
#include "apps/moiety/tokenizer.h"
#include "apps/moiety/trainer.h"
#include "moiety/base/log.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/comm/thread/thread_group.h"

namespace moiety::app {
namespace {

// Log lines go to the console and to log.txt during its lifetime.
class LogToRun {
 public:
  LogToRun(Console& console, RunDirectory& directory) {
    set_log_sink([&](LogLevel level, std::string_view line) {
      console.line(level, line);
      directory.log().add(line);
    });
  }
  ~LogToRun() { set_log_sink({}); }
};

std::shared_ptr<const SampleSource> open_training_data(const Options& o, int64_t vocab) {
  if (o.data.synthetic != "none") {
    return synthetic_source(o.data.synthetic, o.data.seq_len, uint32_t(vocab),
                            uint64_t(o.run.seed));
  }
  return open_token_files(o.data.train, o.data.seq_len, uint32_t(vocab),
                          Tokenizer::load(o.data.tokenizer).identity());
}

std::shared_ptr<const SampleSource> open_validation_data(const Options& o, int64_t vocab) {
  if (o.data.valid.empty()) return nullptr;
  std::vector<WeightedPath> files;
  for (const std::string& path : o.data.valid) files.push_back({path});
  return open_token_files(files, o.data.seq_len, uint32_t(vocab),
                          Tokenizer::load(o.data.tokenizer).identity());
}

void announce(const TrainingPlan& plan) {
  const Options& o = plan.config.options;
  log(LogLevel::kInfo,
      "{:.2f} M parameters; {} rank{} (dp {}, ep {}), {}; {} steps of {} x {} tokens",
      1e-6 * double(model::parameter_count(plan.model)), plan.grid.ranks,
      plan.grid.ranks == 1 ? "" : "s", plan.grid.dp, plan.grid.ep, o.precision.recipe, plan.steps,
      o.train.global_batch, o.data.seq_len);
}

int run_ranks(const TrainingPlan& plan) {
  std::atomic<int> code{kExitDone};
  comm::ThreadGroupOptions group;
  group.deadline = Seconds(plan.config.options.guard.comm_timeout_s);
  comm::run_thread_ranks(plan.grid.ranks, group, [&](comm::Communicator& world) {
    Trainer trainer(plan, world);
    const int result = trainer.run();
    if (world.rank() == 0) code = result;
  });
  return code;
}

}  // namespace

int train(const Config& config, const TrainFlags& flags) {
  const Options& o = config.options;
  const Grid grid = check_layout(o);
  check_training(o, grid);
  const model::Config model = model_config(o, Tokenizer::load(o.data.tokenizer).vocab());
  const auto training_data = open_training_data(o, model.vocab);
  const auto validation_data = open_validation_data(o, model.vocab);

  const SignalHandlers signals;
  RunDirectory directory(o.run.dir);
  Console console(Console::standard_error(flags.quiet ? "off" : o.log.progress, o.log.color));
  const LogToRun log_to_run(console, directory);
  try {
    const std::string checkpoints = directory.checkpoints().string();
    if (std::filesystem::is_directory(checkpoints)) checkpoint::recover(checkpoints);
    const int64_t steps = total_steps(o);
    Reporter reporter(o, steps, directory, console);
    const TrainingPlan plan{
        .config = config,
        .grid = grid,
        .model = model,
        .steps = steps,
        .train = training_data,
        .valid = validation_data,
        .resume_from = resume_candidates(o, checkpoints),
        .init_from = o.run.init_from.empty() ? "" : find_checkpoint(o.run.init_from),
        .directory = directory,
        .reporter = reporter,
        .dry_run = flags.dry_run};
    announce(plan);
    return run_ranks(plan);
  } catch (const std::exception& e) {
    directory.log().add(text("error: {}", e.what()));
    throw;
  }
}

}  // namespace moiety::app
