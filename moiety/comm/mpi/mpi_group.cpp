#include "moiety/comm/mpi_group.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <sched.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/comm/local/socket_functions.h"
#include "moiety/comm/local/started.h"
#include "moiety/comm/mpi/mpi_endpoint.h"
#include "moiety/comm/mpi/mpi_loader.h"
#include "moiety/comm/mpi/world.h"

namespace moiety::comm {
namespace mpi {
namespace {

constexpr int kExitCommunication = 7;  // docs/reliability.md#exit-codes

// The state of MPI, or what stands for it, in this process: started once, ended once.
struct Process {
  const Functions* functions = nullptr;
  Processes launched;
  int largest_tag = 0;
  bool has_run = false;
  std::shared_ptr<World> world;  // set from the start of run_mpi_rank to its good end
};

Process& process() {
  static Process it;
  return it;
}

// A limit on MPI's own start and end, which wait for all processes without one.
class CallLimit {
 public:
  CallLimit(const Functions& functions, const char* what, Seconds limit)
      : thread_([this, name = functions.name, what, limit] { watch(name, what, limit); }) {}
  ~CallLimit() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  void watch(const char* name, const char* what, Seconds limit) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, limit, [&] { return over_; })) return;
    log(LogLevel::kError, "{} did not {} in {:.1f} s; a process of this launch may have ended",
        name, what, limit.count());
    end_process(kExitCommunication);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

// The table of the processes that start_ranks has started, or MPI's.
const Functions& table() {
  if (local::started()) return local::socket_functions();
  const Module& module = load();
  if (!module.functions) throw_error(ErrorKind::kUnsupported, module.text);
  return *module.functions;
}

void start(Seconds limit) {
  Process& p = process();
  if (p.functions) return;
  const Functions& functions = table();
  const CallLimit call(functions, "start", limit);
  const int code = functions.start(&p.launched.rank, &p.launched.size, &p.largest_tag);
  if (code != 0) {
    char reason[512];
    functions.error_text(code, reason, sizeof(reason));
    fail(ErrorKind::kComm, "{} does not start: {}", functions.name, reason);
  }
  p.functions = &functions;
}

// A rank's message to the others at start.
struct Hello {
  ProcessIdentity process;
  cpu_set_t cores;
};

std::vector<Hello> greet(Bootstrap& bootstrap) {
  Hello mine{this_process(), {}};
  CPU_ZERO(&mine.cores);
  sched_getaffinity(0, sizeof(mine.cores), &mine.cores);
  std::vector<Hello> out;
  for (const std::string& bytes :
       bootstrap.all_gather({reinterpret_cast<const char*>(&mine), sizeof(mine)})) {
    MOIETY_CHECK(bytes.size() == sizeof(Hello),
                 "run_mpi_rank: rank {} greets with {} bytes, rank {} with {}: not one program",
                 bootstrap.rank(), sizeof(Hello), out.size(), bytes.size());
    std::memcpy(&out.emplace_back(), bytes.data(), sizeof(Hello));
  }
  return out;
}

// Divides the cores that the ranks of this host may use among them. A launcher that binds ranks to
// cores has done so already.
void share_cores(const std::vector<Hello>& hellos, int rank) {
  cpu_set_t all;
  CPU_ZERO(&all);
  int ranks = 0;
  for (const Hello& hello : hellos) {
    if (!same_host(hello.process, hellos[rank].process)) continue;
    ++ranks;
    CPU_OR(&all, &all, &hello.cores);
  }
  const int cores = CPU_COUNT(&all);
  set_thread_budget(environment_threads(std::clamp(cores / ranks, 1, core_count())));
  set_crowded(ranks > cores);
  const int64_t online = sysconf(_SC_NPROCESSORS_ONLN);
  if (rank == 0 && cores < online && !local::started()) {
    log(LogLevel::kInfo,
        "the launcher lets the ranks of this host use {} of {} cores (mpirun --bind-to none gives "
        "all)",
        cores, online);
  }
}

// Makes a board for the ranks of this host, if they can share memory. The board is never closed,
// only let go of, so it outlives the communicator of its ranks.
void put_up_board(Communicator& world, World& state, const std::vector<Hello>& hellos) {
  if (!state.options.map_memory) return;
  const auto same = [&](int r) {
    return same_host(hellos[r].process, hellos[world.rank()].process);
  };
  int first = 0;
  while (!same(first)) ++first;
  const auto host = world.split(first, world.rank(), "host");
  if (!mappable(*host)) return;
  std::vector<bool> on_board;
  for (int r = 0; r < world.size(); ++r) on_board.push_back(same(r));
  state.put_up(SymmetricBuffer::create(*host, "board", World::board_bytes()), std::move(on_board));
}

// Restores the settings of its thread that a rank changes.
class ThreadState {
 public:
  ThreadState() : budget_(thread_budget()), rank_(log_rank()) {}
  ~ThreadState() {
    set_thread_budget(budget_);
    set_crowded(false);
    set_log_rank(rank_);
  }

 private:
  int budget_, rank_;
};

void run(const std::shared_ptr<World>& state, const std::function<void(Communicator&)>& body) {
  LaneCommunicator world(MpiEndpoint::whole(state), std::make_shared<RankLanes>());
  const std::vector<Hello> hellos = greet(world.bootstrap());
  std::vector<ProcessIdentity> processes;
  for (const Hello& hello : hellos) processes.push_back(hello.process);
  state->meet(std::move(processes));
  put_up_board(world, *state, hellos);
  share_cores(hellos, world.rank());
  body(world);
  world.bootstrap().all_gather("");
}

}  // namespace

Status status() {
  const Module& module = load();
  return {module.functions != nullptr, module.text};
}

Processes processes(Seconds deadline) {
  start(deadline);
  return process().launched;
}

std::optional<std::string> dead_peer() {
  const Process& p = process();
  return p.world ? p.world->look_now() : std::nullopt;
}

void end_process(int code) {
  std::fflush(stdout);
  std::fflush(stderr);
  _exit(code);
}

}  // namespace mpi

void run_mpi_rank(const MpiGroupOptions& options,
                  const std::function<void(Communicator& world)>& body) {
  mpi::Process& p = mpi::process();
  MOIETY_CHECK(!p.has_run, "run_mpi_rank: a process is a rank once");
  MOIETY_CHECK(options.largest_message >= 1 && options.largest_message <= INT32_MAX,
               "run_mpi_rank: largest_message {}", options.largest_message);
  mpi::start(options.deadline);
  p.has_run = true;
  p.world = std::make_shared<mpi::World>(*p.functions, options, p.launched, p.largest_tag);
  const mpi::ThreadState thread_state;
  set_log_rank(p.launched.rank);
  try {
    mpi::run(p.world, body);
  } catch (const std::exception& e) {
    p.world->abort(e.what());
    throw;
  } catch (...) {
    p.world->abort("an exception without a text");
    throw;
  }
  const mpi::CallLimit limit(*p.functions, "shut down", options.deadline);
  p.world->check(p.functions->finish(), "the end of the launch");
  p.world.reset();
}

}  // namespace moiety::comm
