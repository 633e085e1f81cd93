// A rank that fails among processes, and what its peers say of it. Started by
// tests/comm/mpi_fault_test.cpp:
//
//   mpirun -np 3 tests_comm_fault SCENARIO [--no-map]
//   tests_comm_fault SCENARIO [--no-map] --ranks=3
//
// A scenario goes wrong kLead seconds after its start. Every rank that ends with an error prints
// `rank R: T s: TEXT`, T since the fault, and ends with code 7.
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <string>
#include <sys/time.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/comm/barrier.h"
#include "moiety/comm/local_group.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/comm/symmetric_buffer.h"

namespace moiety::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr Seconds kLead{0.2};

Clock::time_point g_start;

void sleep_for(Seconds time) { std::this_thread::sleep_for(time); }

void die() {
  sleep_for(kLead);
  kill(getpid(), SIGKILL);
}

void all_reduce(Communicator& world, int64_t elements = 16) {
  std::vector<float> x(elements, 1.0f);
  const TensorView view(x.data(), DType::kFloat32, {elements});
  world.all_reduce(view, ReduceOp::kSum, Stream()).wait();
}

// Rank 2 is the one that fails.
void dies(Communicator& world) {
  if (world.rank() == 2) die();
  all_reduce(world);
}

void dies_in_bootstrap(Communicator& world) {
  if (world.rank() == 2) die();
  world.bootstrap().all_gather("here");
}

// The rank dies in the middle of long messages.
void dies_while_sending(Communicator& world) {
  if (world.rank() == 2) {
    signal(SIGALRM, [](int) { kill(getpid(), SIGKILL); });
    itimerval timer{};
    timer.it_value.tv_usec = static_cast<int>(kLead.count() * 1e6);
    setitimer(ITIMER_REAL, &timer, nullptr);
  }
  while (true) all_reduce(world, 4 << 20);
}

void dies_in_barrier(Communicator& world) {
  SymmetricBuffer buffer = SymmetricBuffer::create(world, "test", 4096);
  Barrier barrier(world, buffer, 0, "moe");
  if (world.rank() == 2) die();
  barrier.arrive_and_wait();
}

// No signal, no word, and a code that means that all is well.
void exits(Communicator& world) {
  if (world.rank() == 2) {
    sleep_for(kLead);
    _exit(0);
  }
  const auto pair = world.split(world.rank() == 1, 0, "pair");
  pair->barrier();
}

void stalls(Communicator& world) {
  if (world.rank() == 2) sleep_for(kLead + 1.5 * world.bootstrap().deadline());
  all_reduce(world);
}

void throws(Communicator& world) {
  if (world.rank() == 2) {
    sleep_for(kLead);
    fail(ErrorKind::kIo, "disk full");
  }
  if (world.rank() == 0) {
    all_reduce(world);
  } else {
    world.bootstrap().all_gather("here");
  }
}

// The other ranks compute and ask now and then.
void throws_to_busy_ranks(Communicator& world) {
  if (world.rank() == 2) {
    sleep_for(kLead);
    fail(ErrorKind::kIo, "disk full");
  }
  while (true) {
    if (const auto text = world.bootstrap().aborted()) throw_error(ErrorKind::kComm, *text);
  }
}

void runs_another_operation(Communicator& world) {
  sleep_for(kLead);
  std::array<float, 18> x{};
  const TensorView view(x.data(), DType::kFloat32, {18});
  if (world.rank() == 2) world.broadcast(view, 2, Stream()).wait();
  all_reduce(world);
}

void expects_other_rows(Communicator& world) {
  sleep_for(kLead);
  std::array<float, 8> send{}, recv{};
  const std::array<int64_t, 3> to{1, 1, 1};
  const std::array<int64_t, 3> from{1, world.rank() == 2 ? 3 : 1, 1};
  const int64_t rows = from[0] + from[1] + from[2];
  world
      .all_to_all(TensorView(send.data(), DType::kFloat32, {3}), to,
                  TensorView(recv.data(), DType::kFloat32, {rows}), from, Stream())
      .wait();
}

// Its peers still need it.
void ends_early(Communicator& world) {
  sleep_for(kLead);
  if (world.rank() != 2) all_reduce(world);
}

void ends_well(Communicator& world) {
  all_reduce(world);
  if (world.rank() == 2) sleep_for(kLead);
}

struct Scenario {
  void (*run)(Communicator&);
  Seconds deadline{60};
};

const std::map<std::string, Scenario> kScenarios = {
    {"dies", {dies}},
    {"dies_in_bootstrap", {dies_in_bootstrap}},
    {"dies_while_sending", {dies_while_sending}},
    {"dies_in_barrier", {dies_in_barrier}},
    {"exits", {exits}},
    {"stalls", {stalls, Seconds(2)}},
    {"throws", {throws}},
    {"throws_to_busy_ranks", {throws_to_busy_ranks}},
    {"runs_another_operation", {runs_another_operation}},
    {"expects_other_rows", {expects_other_rows}},
    {"ends_early", {ends_early, Seconds(2)}},
    {"ends_well", {ends_well}},
};

int run(int argc, char** argv) {
  if (argc < 2 || !kScenarios.contains(argv[1])) {
    std::fputs("usage: tests_comm_fault SCENARIO [--no-map]\n", stderr);
    return 2;
  }
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.back() == "--ranks=3" && !is_started_rank()) {
    start_ranks(3, {.arguments = arguments});
    return 0;
  }
  const Scenario& scenario = kScenarios.at(argv[1]);
  const bool map_memory = argc < 3 || arguments[1] != "--no-map";
  int rank = -1;
  try {
    run_mpi_rank({.deadline = scenario.deadline, .map_memory = map_memory},
                 [&](Communicator& world) {
                   rank = world.rank();
                   world.barrier();
                   g_start = Clock::now();
                   scenario.run(world);
                 });
  } catch (const Error& e) {
    const Seconds since_fault = Clock::now() - g_start - kLead;
    std::fputs(text("rank {}: {:.2f} s: {}\n", rank, since_fault.count(), e.what()).c_str(),
               stdout);
    mpi::end_process(7);
  }
  std::fputs(text("rank {}: well\n", rank).c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace moiety::comm

int main(int argc, char** argv) { return moiety::comm::run(argc, argv); }
