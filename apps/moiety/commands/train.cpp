#include "apps/moiety/commands/train.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <optional>

#include "apps/moiety/commands/signals.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/device_choice.h"
#include "apps/moiety/config/launch.h"
#include "apps/moiety/config/model_options.h"
#include "apps/moiety/config/options_check.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/run_files.h"
#include "moiety/base/log.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/comm/thread_group.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/failure_file.h"
#include "moiety/train/memory_estimate.h"
#include "moiety/train/trainer.h"

namespace moiety::app {
namespace {

std::shared_ptr<const data::SampleSource> open_training_data(const Options& o, int64_t vocab) {
  if (o.data.synthetic != "none") {
    return data::synthetic_source(o.data.synthetic, o.data.seq_len, uint32_t(vocab),
                                  uint64_t(o.run.seed));
  }
  return data::open_token_files(o.data.train, o.data.seq_len, uint32_t(vocab),
                                data::Tokenizer::load(o.data.tokenizer).identity());
}

std::shared_ptr<const data::SampleSource> open_validation_data(const Options& o, int64_t vocab) {
  if (o.data.valid.empty()) return nullptr;
  std::vector<data::WeightedPath> files;
  for (const std::string& path : o.data.valid) files.push_back({path});
  return data::open_token_files(files, o.data.seq_len, uint32_t(vocab),
                                data::Tokenizer::load(o.data.tokenizer).identity());
}

void check_graph(const Options& o, Device device) {
  if (o.train.cuda_graph != "true") return;
  const char* what = "train.cuda_graph = \"true\"";
  if (device.type == DeviceType::kCpu) throw UsageError("{}, but the run is on the CPU", what);
  if (o.guard.nan == "tensor") {
    throw UsageError("{}: guard.nan = \"tensor\" looks at single operations", what);
  }
}

// What every process of a run makes before its ranks start.
TrainingPlan make_plan(const Config& config, const Launch& launch, Watchdog& watchdog) {
  const Options& o = config.options;
  const Grid grid = check_layout(o);
  check_training(o, grid);
  const model::Config model = model_config(o, data::Tokenizer::load(o.data.tokenizer).vocab());
  check_cuts(o, model, grid);
  const Device device = rank_device(o.run.device, launch.ranks);
  check_graph(o, device);
  return {.config = config,
          .device = device,
          .memory_of_rank = memory_of_rank(launch, device),
          .grid = grid,
          .model = model,
          .steps = total_steps(o),
          .train = open_training_data(o, model.vocab),
          .valid = open_validation_data(o, model.vocab),
          .resume_from = {},
          .init_from = o.run.init_from.empty() ? "" : find_checkpoint(o.run.init_from),
          .watchdog = watchdog};
}

void announce(const TrainingPlan& plan) {
  const Options& o = plan.config.options;
  plan.files->reporter.say(
      LogLevel::kInfo, "{:.2f} M parameters; {}, {}; {} steps of {} x {} tokens",
      1e-6 * double(model::parameter_count(plan.model)), describe_layout(plan.grid),
      o.precision.recipe, plan.steps, o.train.global_batch, o.data.seq_len);
  if (!plan.dry_run) return;
  plan.files->reporter.say(LogLevel::kInfo, "memory of a rank:");
  const MemoryEstimate memory = estimate_memory(o, plan.model, plan.grid, plan.device);
  for (const std::string& line : memory_lines(memory, plan.memory_of_rank)) {
    plan.files->reporter.say(LogLevel::kInfo, "  {}", line);
  }
}

// The part of rank 0's process: the run directory, and what there is to continue from.
class LeadingPart {
 public:
  LeadingPart(TrainingPlan& plan, bool quiet) : files_(plan.config.options, plan.steps, quiet) {
    const std::string checkpoints = files_.directory.checkpoints().string();
    if (std::filesystem::is_directory(checkpoints)) checkpoint::recover(checkpoints);
    plan.files = &files_;
    files_.reporter.set_device(plan.device);
    plan.resume_from = resume_candidates(plan.config.options, checkpoints);
    announce(plan);
  }
  void log_failure(const Failure& failure) {
    files_.directory.log().add(text("error: {}", failure.text));
  }

 private:
  RunFiles files_;
};

// Runs `body`; what it throws is told to the other ranks, and all of them throw what the first of
// them failed with.
template <class Body>
void as_one(const TrainingPlan& plan, comm::Communicator& world, Body&& body) {
  try {
    body();
  } catch (...) {
    Failure failure = current_failure();
    if (failure.kind == ErrorKind::kOutOfMemory) {
      failure.text += "; " + memory_report(plan.config.options, plan.model, plan.grid,
                                           plan.memory_of_rank, plan.device);
    }
    if (world.size() > 1) {
      world.bootstrap().abort(to_peers(failure));
      const auto first = world.bootstrap().aborted();
      // What the guard says all ranks say by themselves: no rank has failed before others.
      if (first && failure.kind != ErrorKind::kNumerical) failure = from_peers(*first);
    }
    throw_error(failure.kind, failure.text);
  }
}

int run_rank(const TrainingPlan& plan, comm::Communicator& world) {
  int code = kExitDone;
  Heartbeat heartbeat(plan.watchdog, world.rank());
  std::unique_ptr<Trainer> trainer;  // taken apart when the peers have heard of a failure
  try {
    as_one(plan, world, [&] {
      check_memory(plan.config.options, plan.model, plan.grid, plan.memory_of_rank, plan.device);
      trainer = std::make_unique<Trainer>(plan, world, heartbeat);
      code = trainer->run();
    });
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kComm || e.kind() == ErrorKind::kInvalidArgument) {
      write_failure(plan.config.options.run.dir, "error", world.rank(), heartbeat.completed() + 1,
                    JsonLine().add("message", e.what()).add("phase", heartbeat.phase()));
    }
    throw;
  }
  return code;
}

// The console is that of rank 0; the other processes warn on stderr.
void log_warnings_alone() {
  set_log_sink([](LogLevel level, std::string_view line) {
    if (level < LogLevel::kWarning) return;
    const std::string whole = std::string(line) + "\n";
    std::fwrite(whole.data(), 1, whole.size(), stderr);
  });
}

int run_threads(TrainingPlan& plan, bool quiet) {
  LeadingPart leading(plan, quiet);
  std::atomic<int> code{kExitDone};
  comm::ThreadGroupOptions group;
  group.deadline = Seconds(plan.config.options.guard.comm_timeout_s);
  try {
    comm::run_thread_ranks(rank_count(plan.grid), group, [&](comm::Communicator& world) {
      const int result = run_rank(plan, world);
      if (world.rank() == 0) code = result;
    });
  } catch (...) {
    leading.log_failure(current_failure());
    throw;
  }
  return code;
}

// After a failure a process ends at once: what MPI would do at its end could wait for the peers.
int run_process(TrainingPlan& plan, bool quiet) {
  int code = kExitDone;
  std::optional<LeadingPart> leading;
  comm::MpiGroupOptions group;
  group.deadline = Seconds(plan.config.options.guard.comm_timeout_s);
  try {
    comm::run_mpi_rank(group, [&](comm::Communicator& world) {
      as_one(plan, world, [&] {
        world.rank() == 0 ? void(leading.emplace(plan, quiet)) : log_warnings_alone();
      });
      code = run_rank(plan, world);
    });
  } catch (...) {
    const Failure failure = current_failure();
    if (leading) leading->log_failure(failure);
    leading.reset();
    print_failure(failure);
    comm::mpi::end_process(failure.code());
  }
  return code;
}

}  // namespace

int train(const Config& given, const TrainFlags& flags) {
  Config config = given;
  const Launch launch = find_launch(config);
  const SignalHandlers signals;
  Watchdog watchdog(Seconds(config.options.guard.watchdog_s), config.options.run.dir);
  TrainingPlan plan = make_plan(config, launch, watchdog);
  plan.dry_run = flags.dry_run;
  return launch.processes ? run_process(plan, flags.quiet) : run_threads(plan, flags.quiet);
}

}  // namespace moiety::app
