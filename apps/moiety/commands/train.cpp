#include "apps/moiety/commands/train.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <optional>
#include <unistd.h>

#include "apps/moiety/commands/signals.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/device_choice.h"
#include "apps/moiety/config/launch.h"
#include "apps/moiety/config/train_options.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/people.h"
#include "apps/moiety/report/run_files.h"
#include "moiety/base/log.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/comm/thread_group.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/failure_file.h"
#include "moiety/train/memory_estimate.h"
#include "moiety/train/trainer.h"

namespace moiety::app {
namespace {

using train::RunEnd, train::TrainingPlan;

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

// The plan that every process of a run makes before its ranks start; the configuration outlives it.
TrainingPlan make_plan(const Config& config, const Launch& launch) {
  const Options& o = config.options;
  const train::TrainConfig typed = train_config(o);
  check_inputs(o);
  TrainingPlan plan =
      train::make_plan(typed, rank_device(o.run.device, launch.ranks), rank_share(launch));
  plan.train = open_training_data(o, typed.model.vocab);
  plan.valid = open_validation_data(o, typed.model.vocab);
  plan.config_text = config_to_json(config);
  plan.compare = [&o](const std::string& saved, const std::string& checkpoint) {
    return compare_for_resume(parse_config_json(saved, checkpoint), o, checkpoint);
  };
  return plan;
}

// The part of rank 0's process: the run directory, and the checkpoints to continue from.
class LeadingPart {
 public:
  LeadingPart(TrainingPlan& plan, const Config& config, bool quiet)
      : files_(config, plan.steps, quiet) {
    plan.observer = &files_.reporter;
    files_.reporter.set_device(plan.device);
    plan.resume_from = train::resume_candidates(plan.config);
    announce(plan);
  }
  void log_failure(const Failure& failure) {
    files_.directory.log().add(text("error: {}", failure.text));
  }

 private:
  void say(const std::string& line) { files_.reporter.say(LogLevel::kInfo, line); }

  void announce(const TrainingPlan& plan) {
    const train::TrainConfig& c = plan.config;
    say(text("{} parameters, {} active a token; {}, {}; {} of {} x {} tokens",
             amount_text(double(model::parameter_count(c.model))),
             amount_text(double(model::active_parameter_count(c.model))),
             train::describe_layout(plan.grid), name(c.precision.recipe),
             counted(plan.steps, "step"), c.train.global_batch, c.data.seq_len));
    if (!plan.dry_run) return;
    say("memory of a rank:");
    const train::MemoryEstimate memory = train::estimate_memory(c, plan.grid, plan.device);
    for (const std::string& line : train::memory_lines(memory, plan.memory_of_rank)) {
      say("  " + line);
    }
  }

  RunFiles files_;
};

// Runs `body`. If it throws, the other ranks are told, and all of them throw the error of the first
// that failed.
template <class Body>
void as_one(const TrainingPlan& plan, comm::Communicator& world, Body&& body) {
  try {
    body();
  } catch (...) {
    Failure failure = current_failure();
    if (failure.kind == ErrorKind::kOutOfMemory) {
      failure.text +=
          "; " + train::memory_report(plan.config, plan.grid, plan.memory_of_rank, plan.device);
    }
    if (world.size() > 1) {
      world.bootstrap().abort(to_peers(failure));
      const auto first = world.bootstrap().aborted();
      // All ranks raise the guard's errors by themselves: no rank has failed before others.
      if (first && failure.kind != ErrorKind::kNumerical) failure = from_peers(*first);
    }
    throw_error(failure.kind, failure.text);
  }
}

int run_rank(const TrainingPlan& plan, comm::Communicator& world) {
  RunEnd end = RunEnd::kDone;
  train::Heartbeat heartbeat(plan.watchdog, world.rank());
  std::unique_ptr<train::Trainer> trainer;  // destroyed when the peers know of a failure
  try {
    as_one(plan, world, [&] {
      train::check_memory(plan.config, plan.grid, plan.memory_of_rank, plan.device);
      trainer = std::make_unique<train::Trainer>(plan, world, heartbeat);
      end = trainer->run();
    });
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kComm || e.kind() == ErrorKind::kInvalidArgument) {
      train::write_failure(plan.config.run.dir, "error", world.rank(), heartbeat.completed() + 1,
                           JsonLine().add("message", e.what()).add("phase", heartbeat.phase()));
    }
    throw;
  }
  return end == RunEnd::kStopped ? kExitStartAgain : kExitDone;
}

// Makes a process other than rank 0's, which has the console, write only warnings, on stderr.
void log_warnings_alone() {
  set_log_sink([](LogLevel level, std::string_view line) {
    if (level < LogLevel::kWarning) return;
    const std::string whole = std::string(line) + "\n";
    std::fwrite(whole.data(), 1, whole.size(), stderr);
  });
}

int run_threads(TrainingPlan& plan, const Config& config, bool quiet) {
  LeadingPart leading(plan, config, quiet);
  std::atomic<int> code{kExitDone};
  comm::ThreadGroupOptions group;
  group.deadline = Seconds(plan.config.guard.comm_timeout_s);
  try {
    comm::run_thread_ranks(train::rank_count(plan.grid), group, [&](comm::Communicator& world) {
      const int result = run_rank(plan, world);
      if (world.rank() == 0) code = result;
    });
  } catch (...) {
    leading.log_failure(current_failure());
    throw;
  }
  return code;
}

// Runs a process, which ends at once after a failure: MPI's own end could wait for the peers.
int run_process(TrainingPlan& plan, const Config& config, bool quiet) {
  int code = kExitDone;
  std::optional<LeadingPart> leading;
  comm::MpiGroupOptions group;
  group.deadline = Seconds(plan.config.guard.comm_timeout_s);
  try {
    comm::run_mpi_rank(group, [&](comm::Communicator& world) {
      as_one(plan, world, [&] {
        world.rank() == 0 ? void(leading.emplace(plan, config, quiet)) : log_warnings_alone();
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
  train::TrainRequests requests;
  const SignalHandlers signals(requests);
  train::Watchdog watchdog(Seconds(config.options.guard.watchdog_s), config.options.run.dir,
                           [] { ::_exit(kExitComm); });
  TrainingPlan plan = make_plan(config, launch);
  plan.requests = &requests;
  plan.watchdog = &watchdog;
  plan.dry_run = flags.dry_run;
  return launch.processes ? run_process(plan, config, flags.quiet)
                          : run_threads(plan, config, flags.quiet);
}

}  // namespace moiety::app
