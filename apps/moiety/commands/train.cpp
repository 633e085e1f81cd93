#include "apps/moiety/commands/train.h"

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <unistd.h>

#include "apps/moiety/commands/signals.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/device_choice.h"
#include "apps/moiety/config/launch.h"
#include "apps/moiety/config/ranks.h"
#include "apps/moiety/config/train_options.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/people.h"
#include "apps/moiety/report/result.h"
#include "apps/moiety/report/run_files.h"
#include "moiety/base/log.h"
#include "moiety/comm/gpu_environment.h"
#include "moiety/comm/gpu_transport.h"
#include "moiety/comm/local_group.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/comm/thread_group.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/config_check.h"
#include "moiety/train/failure_file.h"
#include "moiety/train/memory_estimate.h"
#include "moiety/train/trainer.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

using train::RunEnd, train::TrainingPlan;

std::shared_ptr<const data::SampleSource> open_training_data(const Options& o, int64_t vocab,
                                                             const data::Tokenizer& tokenizer) {
  if (o.data.synthetic != "none") {
    return data::synthetic_source(o.data.synthetic, o.data.seq_len, uint32_t(vocab),
                                  uint64_t(o.run.seed));
  }
  return data::open_token_files(o.data.train, o.data.seq_len, uint32_t(vocab), tokenizer.identity(),
                                pack_of(o));
}

std::shared_ptr<const data::SampleSource> open_validation_data(const Options& o, int64_t vocab,
                                                               const data::Tokenizer& tokenizer) {
  if (o.data.valid.empty()) return nullptr;
  std::vector<data::WeightedPath> files;
  for (const std::string& path : o.data.valid) files.push_back({path});
  return data::open_token_files(files, o.data.seq_len, uint32_t(vocab), tokenizer.identity(),
                                pack_of(o));
}

// The tokenizer that data.tokenizer names or, if that is gone, the copy that the run keeps.
data::Tokenizer load_tokenizer(const Options& o) {
  std::error_code error;
  const std::string kept = kept_tokenizer_folder(o.run.dir);
  const bool is_gone = o.data.tokenizer != "bytes" && !fs::exists(o.data.tokenizer, error);
  if (!is_gone || o.run.dir.empty() || !fs::exists(kept, error)) {
    return data::Tokenizer::load(o.data.tokenizer);
  }
  log(LogLevel::kWarning, "data.tokenizer = \"{}\": is gone; the run's copy, {}, is used",
      o.data.tokenizer, kept);
  return data::Tokenizer::load(kept);
}

// Compares the configuration of a checkpoint that a run continues from, and its tokenizer, with the
// run's. Equal tokenizers may be called by other paths.
std::vector<std::string> compare_with(const std::string& saved, const std::string& checkpoint,
                                      const Options& now, const data::Sha256& identity) {
  const Options before = parse_config_json(saved, checkpoint);
  const std::string kept = kept_tokenizer(before, checkpoint);
  const data::Sha256 was = data::Tokenizer::load(kept).identity();
  if (was != identity) {
    throw CheckpointError(
        "{}: made with another tokenizer: its SHA-256 is {}, that of data.tokenizer = \"{}\" is {}",
        checkpoint, data::hex(was), now.data.tokenizer, data::hex(identity));
  }
  return compare_for_resume(before, now, checkpoint);
}

// The plan that every process of a run makes before its ranks start, together where ranks are
// processes; the configuration outlives it.
TrainingPlan make_plan(const Config& config, const Launch& launch, comm::Bootstrap* bootstrap) {
  const Options& o = config.options;
  const data::Tokenizer tokenizer = load_tokenizer(o);
  const train::TrainConfig typed = train_config(o, tokenizer);
  check_inputs(o);
  const bool hosts = launch.ranks_on_machine < launch.ranks;
  const comm::NcclStatus nccl = hosts ? comm::nccl_status() : comm::NcclStatus{true, ""};
  const DeviceChoice choice =
      rank_devices({.device = o.run.device,
                    .ranks = launch.ranks,
                    .share = o.run.share_gpus,
                    .here = launch.ranks_on_machine,
                    .apart = launch.processes && !launch.launcher.empty(),
                    .no_nccl = nccl.available ? "" : nccl.text,
                    .refusal = train::refusal_of_gpus(train::check_layout(typed)).value_or("")},
                   bootstrap);
  TrainingPlan plan = train::make_plan(typed, choice.device, rank_share(launch, choice));
  plan.gpus = choice.gpus;
  plan.train = open_training_data(o, typed.model.vocab, tokenizer);
  plan.valid = open_validation_data(o, typed.model.vocab, tokenizer);
  plan.config_text = config_to_json(config, tokenizer.files());
  plan.tokenizer.assign(tokenizer.files().begin(), tokenizer.files().end());
  plan.tokenizer_identity = data::hex(tokenizer.identity());
  plan.compare = [&o, identity = tokenizer.identity()](const std::string& saved,
                                                       const std::string& checkpoint) {
    return compare_with(saved, checkpoint, o, identity);
  };
  return plan;
}

// The part of rank 0's process: the run directory, and the checkpoints to continue from.
class LeadingPart {
 public:
  LeadingPart(TrainingPlan& plan, const Config& config, bool quiet)
      : files_(config, plan.steps, quiet) {
    files_.directory.keep_tokenizer(plan.tokenizer);
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
    for (const std::string& line : train::memory_lines(memory, plan.of_rank(0).memory_of_rank)) {
      say("  " + line);
    }
  }

  RunFiles files_;
};

// Runs `body`. If it throws, the other ranks are told, and all of them throw the error of the first
// that failed. `plan`, where there is one, explains an end of memory.
template <class Body>
void as_one(const TrainingPlan* plan, comm::Communicator& world, Body&& body) {
  try {
    body();
  } catch (...) {
    Failure failure = current_failure();
    if (failure.kind == ErrorKind::kOutOfMemory && plan) {
      failure.text +=
          "; " + train::memory_report(plan->config, plan->grid, plan->memory_of_rank, plan->device);
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

int run_rank(const TrainingPlan& plan, const Options& options, comm::Communicator& world) {
  RunEnd end = RunEnd::kDone;
  train::Heartbeat heartbeat(plan.watchdog, world.rank());
  TrainingPlan mine;
  as_one(nullptr, world, [&] {
    mine = plan.of_rank(comm::rank_on_host(world.bootstrap()));
    world.bootstrap().all_gather("");  // all know what is free when the first one takes it
  });
  if (mine.device.type == DeviceType::kCuda && !options.run.share_gpus) {
    as_one(nullptr, world, [&] { comm::check_own_gpus(world.bootstrap(), mine.device); });
  }
  std::unique_ptr<train::Trainer> trainer;  // destroyed when the peers know of a failure
  try {
    as_one(&mine, world, [&] {
      train::check_memory(mine.config, mine.grid, mine.memory_of_rank, mine.device);
      trainer = std::make_unique<train::Trainer>(mine, world, heartbeat);
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

// A training in this process: its configuration, and what its ranks share.
class Training {
 public:
  Training(const TrainFlags& flags, Launch launch)
      : flags_(flags), launch_(std::move(launch)), signals_(requests_) {}

  // Both return the exit code. `refused` is the error of the configuration, if it could not be
  // loaded; the other ranks are told.
  int run_threads(Config config);
  int run_process(Config config, std::exception_ptr refused);

 private:
  // Compares with the other processes what this one is to run with, before anything depends on it,
  // and what it means, once that is known. Returns the difference, if there is one.
  std::string agree(comm::Communicator& world);
  std::vector<RankFact> facts() const;
  void prepare(comm::Bootstrap* bootstrap = nullptr);
  void print() const { print_result(print_config(config_)); }

  const TrainFlags& flags_;
  Launch launch_;
  train::TrainRequests requests_;
  SignalHandlers signals_;
  Config config_;
  std::optional<train::Watchdog> watchdog_;
  TrainingPlan plan_;
};

std::vector<RankFact> Training::facts() const {
  std::vector<RankFact> facts = facts_of(config_);
  for (const auto& [name, given] :
       {std::pair("--dry-run", flags_.dry_run), std::pair("--print-config", flags_.print_config)}) {
    facts.push_back({name, given ? "true" : "false", given ? "command line" : "default"});
  }
  return facts;
}

std::string Training::agree(comm::Communicator& world) {
  settle_ranks(launch_, config_);
  std::string difference = first_difference(world.bootstrap(), facts());
  if (!difference.empty() || flags_.print_config) return difference;
  prepare(&world.bootstrap());
  return first_difference(world.bootstrap(), meanings_of(config_, plan_));
}

void Training::prepare(comm::Bootstrap* bootstrap) {
  watchdog_.emplace(Seconds(config_.options.guard.watchdog_s), config_.options.run.dir,
                    [] { ::_exit(kExitComm); });
  plan_ = make_plan(config_, launch_, bootstrap);
  const bool on_gpus = plan_.device.type == DeviceType::kCuda;
  if (on_gpus && launch_.ranks > 1) comm::check_gpu_environment();
  plan_.requests = &requests_;
  plan_.watchdog = &*watchdog_;
  plan_.dry_run = flags_.dry_run;
}

int Training::run_threads(Config config) {
  config_ = std::move(config);
  settle_ranks(launch_, config_);
  if (flags_.print_config) return print(), kExitDone;
  prepare();
  LeadingPart leading(plan_, config_, flags_.quiet);
  std::atomic<int> code{kExitDone};
  comm::ThreadGroupOptions group;
  group.deadline = Seconds(plan_.config.guard.comm_timeout_s);
  group.gpu_transport = plan_.config.comm.transport;
  try {
    comm::run_thread_ranks(train::rank_count(plan_.grid), group, [&](comm::Communicator& world) {
      const int result = run_rank(plan_, config_.options, world);
      if (world.rank() == 0) code = result;
    });
  } catch (...) {
    leading.log_failure(current_failure());
    throw;
  }
  return code;
}

// The process ends at once after a failure: MPI's own end could wait for the peers.
int Training::run_process(Config config, std::exception_ptr refused) {
  config_ = std::move(config);
  int code = kExitDone;
  std::optional<LeadingPart> leading;
  comm::MpiGroupOptions group;
  group.deadline = Seconds(config_.options.guard.comm_timeout_s);
  group.gpu_transport = gpu_transport(config_.options);
  try {
    comm::run_mpi_rank(group, [&](comm::Communicator& world) {
      const bool leads = world.rank() == 0;
      if (!leads) log_warnings_alone();
      std::string difference;
      as_one(nullptr, world, [&] {
        if (refused) std::rethrow_exception(refused);
        difference = agree(world);
        if (!difference.empty() || !leads) return;
        flags_.print_config ? print() : void(leading.emplace(plan_, config_, flags_.quiet));
      });
      if (!difference.empty()) throw UsageError("{}", difference);  // said by all ranks alike
      if (!flags_.print_config) code = run_rank(plan_, config_.options, world);
    });
  } catch (...) {
    const Failure failure = current_failure();
    if (leading) leading->log_failure(failure);
    leading.reset();
    if (!comm::report_failure(failure.text)) print_failure(failure);
    comm::mpi::end_process(failure.code());
  }
  return code;
}

}  // namespace

int train(const std::function<Config()>& configure, const TrainFlags& flags) {
  Config config;
  std::exception_ptr refused;
  try {
    config = configure();
  } catch (const Error&) {
    refused = std::current_exception();
  }
  if (!refused) prepare_gpus(config.options);
  Launch launch = find_launch(Seconds(config.options.guard.comm_timeout_s));
  const bool processes = launch.processes;
  if (!processes && !refused && !flags.print_config && starts_processes(config.options)) {
    return run_processes(static_cast<int>(config.options.run.ranks), flags.arguments);
  }
  Training training(flags, std::move(launch));
  if (processes) return training.run_process(std::move(config), refused);
  if (refused) std::rethrow_exception(refused);
  return training.run_threads(std::move(config));
}

}  // namespace moiety::app
