#include "apps/moiety/config/launch.h"

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "apps/moiety/config/device_choice.h"
#include "apps/moiety/exit_code.h"
#include "moiety/comm/gpu_environment.h"
#include "moiety/comm/local_group.h"
#include "moiety/comm/mpi_group.h"

namespace moiety::app {
namespace {

struct Launcher {
  const char* variable;  // holds the number of processes that it started
  bool mpi;              // whether they may find each other through MPI
};
// The last variable is set by torchrun, whose processes know nothing of MPI, and by some MPI
// launchers too.
constexpr Launcher kLaunchers[] = {{"OMPI_COMM_WORLD_SIZE", true},
                                   {"PMI_SIZE", true},
                                   {"SLURM_STEP_NUM_TASKS", true},
                                   {"WORLD_SIZE", false}};

struct Seen {
  Launcher launcher;
  std::string value;
  std::string text() const { return std::string(launcher.variable) + " = " + value; }
};

std::optional<Seen> several_processes() {
  for (const Launcher& launcher : kLaunchers) {
    const char* value = std::getenv(launcher.variable);
    if (value && std::atol(value) > 1) return Seen{launcher, value};
  }
  return std::nullopt;
}

// The ranks of this host, as launchers tell; Slurm's list of hosts, "4(x2),3", begins with the most.
std::optional<int> ranks_here() {
  for (const char* variable :
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"}) {
    if (const char* value = std::getenv(variable)) return std::max(1, std::atoi(value));
  }
  return std::nullopt;
}

}  // namespace

void prepare_gpus(const Options& options) {
  const bool several =
      options.run.ranks > 1 || comm::is_started_rank() || several_processes().has_value();
  if (several && options.run.device != "cpu") comm::prepare_gpu_environment();
}

Launch find_launch(Seconds deadline) {
  if (comm::is_started_rank()) {
    const int ranks = comm::mpi::processes(deadline).size;
    return {true, ranks, ranks, ""};
  }
  const std::optional<Seen> seen = several_processes();
  if (!seen) return {};
  if (!seen->launcher.mpi) {
    throw UsageError(
        "{}: started as one of several processes, but not by an MPI launcher: use mpirun or srun, "
        "or start one process with --ranks {}",
        seen->text(), seen->value);
  }
  const comm::mpi::Status mpi = comm::mpi::status();
  if (!mpi.available) {
    throw UsageError(
        "{}: started as one of several processes, which need MPI to find each other: {}",
        seen->text(), mpi.text);
  }
  const comm::mpi::Processes started = comm::mpi::processes(deadline);
  if (started.size == 1) {
    throw UsageError(
        "{}: started as one of several processes, but MPI reports one: the launcher belongs to "
        "another MPI than the one found here ({})",
        seen->text(), mpi.text);
  }
  return {true, started.size, std::min(ranks_here().value_or(started.size), started.size),
          seen->text()};
}

void settle_ranks(Launch& launch, Config& config) {
  int64_t& ranks = config.options.run.ranks;
  if (!launch.processes) {
    launch.ranks = launch.ranks_on_machine = static_cast<int>(ranks);
    return;
  }
  const auto source_of = [&](const char* key) -> std::string& {
    return config.source[&find_key(key, "launch") - option_keys().data()];
  };
  if (launch.launcher.empty()) {
    MOIETY_CHECK(ranks == launch.ranks, "run.ranks = {}, but {} processes were started", ranks,
                 launch.ranks);
    return;
  }
  if (config.options.run.launch == "threads") {
    throw UsageError(
        "run.launch = \"threads\" ({}), but {}: leave it out, ranks are processes here",
        source_of("run.launch"), launch.launcher);
  }
  std::string& source = source_of("run.ranks");
  if (source != "default" && ranks != launch.ranks) {
    throw UsageError("run.ranks = {} ({}), but {}: leave it out, the launcher says it", ranks,
                     source, launch.launcher);
  }
  ranks = launch.ranks;
  source = launch.launcher.substr(0, launch.launcher.find(' '));
}

bool starts_processes(const Options& options) {
  const int ranks = static_cast<int>(options.run.ranks);
  if (ranks == 1 || options.run.launch == "threads") return false;
  if (options.run.launch == "processes") return true;
  if (options.run.device == "cpu") return false;
  const GpuStatus& gpus = gpu_status();
  if (gpus.count < ranks) return false;
  // A GPU that is demanded and cannot be had is an error of the ranks.
  const DeviceChoice choice =
      choose_device({.device = "auto", .ranks = ranks}, gpus, gpu_properties(0).major);
  return choice.device.type == DeviceType::kCuda;
}

int run_processes(int ranks, const std::vector<std::string>& arguments) {
  const comm::StartOptions options{.arguments = arguments,
                                   .good_codes = {kExitDone, kExitStartAgain}};
  const std::vector<comm::RankEnd> ends = comm::start_ranks(ranks, options);
  const comm::RankEnd* failure = comm::first_failure(ends, options);
  if (!failure) {
    const auto stopped = [](const comm::RankEnd& end) { return end.code == kExitStartAgain; };
    return std::any_of(ends.begin(), ends.end(), stopped) ? kExitStartAgain : kExitDone;
  }
  constexpr int kBySignal = 128;  // a shell's code for an end by a signal
  if (failure->told) return kBySignal + failure->signal;
  if (failure->code == kExitInterrupted) return kExitInterrupted;
  print_failure({ErrorKind::kComm, comm::failure_text(*failure, ends)});
  return failure->signal != 0 ? kExitComm : failure->code;
}

}  // namespace moiety::app
