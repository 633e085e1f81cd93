#include "apps/moiety/config/launch.h"

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "apps/moiety/exit_code.h"
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

}  // namespace

Launch find_launch(Seconds deadline) {
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
  const char* here = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  return {true, started.size, here ? std::max(1, std::atoi(here)) : started.size, seen->text()};
}

void settle_ranks(Launch& launch, Config& config) {
  int64_t& ranks = config.options.run.ranks;
  if (!launch.processes) {
    launch.ranks = launch.ranks_on_machine = static_cast<int>(ranks);
    return;
  }
  const Key& key = find_key("run.ranks", "launch");
  std::string& source = config.source[&key - option_keys().data()];
  if (source != "default" && ranks != launch.ranks) {
    throw UsageError("run.ranks = {} ({}), but {}: leave it out, the launcher says it", ranks,
                     source, launch.launcher);
  }
  ranks = launch.ranks;
  source = launch.launcher.substr(0, launch.launcher.find(' '));
}

}  // namespace moiety::app
