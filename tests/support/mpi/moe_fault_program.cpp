// A rank that fails in expert parallelism among processes, and what its peers say of it. Started by
// tests/moe/ep_mpi_fault_test.cpp:
//
//   mpirun -np 3 tests_moe_fault SCENARIO mapped|collectives
//   tests_moe_fault SCENARIO mapped|collectives --ranks=3
//
// A scenario goes wrong kLead seconds after its start. Every rank that ends with an error prints
// `rank R: T s: TEXT`, T since the fault, and ends with code 7.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/error.h"
#include "moiety/comm/local_group.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/dispatch.h"

namespace moiety::moe {
namespace {

using Clock = std::chrono::steady_clock;
constexpr Seconds kLead{0.2}, kDeadline{2};
constexpr int64_t kTokens = 12, kModel = 20;

// One rank's group and batch, with its plan: every token goes to every rank.
class Rank {
 public:
  Rank(comm::Communicator& world, EpTransport transport)
      : me_(world.rank()),
        limits_{.tokens = kTokens, .model = kModel, .topk = world.size()},
        capacity_(kTokens * world.size()),
        group_(EpGroup::create(world, ExpertMap(world.size(), world.size()), limits_,
                               {.name = "moe", .deadline = kDeadline, .transport = transport})),
        idx_(DType::kInt32, {kTokens, world.size()}),
        x_(DType::kBFloat16, {kTokens, kModel}),
        rows_(DType::kBFloat16, {capacity_, kModel}) {
    for (int64_t i = 0; i < idx_.view().numel(); ++i) {
      idx_.data<int32_t>()[i] = static_cast<int32_t>(i % world.size());
    }
    const PrepareArgs args{.idx_TK = idx_, .capacity = capacity_};
    memory_ = Buffer(plan_bytes(group_.map(), limits_, args));
    prepare_plan();
  }

  int me() const { return me_; }
  void prepare_plan(int64_t alignment = 1) {
    plan_ = prepare(group_, {.idx_TK = idx_, .alignment = alignment, .capacity = capacity_},
                    memory_.view(DType::kUInt8, {memory_.bytes()}), {});
  }
  void dispatch_rows() { dispatch(group_, plan_, {.x_TD = x_, .rows_CD = rows_}, {}); }
  void combine_rows() { combine(group_, plan_, {.y_CD = rows_, .out_TD = x_}, {}); }

 private:
  int me_;
  EpLimits limits_;
  int64_t capacity_;
  EpGroup group_;
  Tensor idx_, x_, rows_;
  Buffer memory_;
  EpPlan plan_;
};

// Rank 2 is the one that fails.
void dies(Rank& rank) {
  if (rank.me() == 2) {
    std::this_thread::sleep_for(kLead);
    kill(getpid(), SIGKILL);
  }
  rank.dispatch_rows();
}

void dies_between(Rank& rank) {
  for (int i = 0; i < 1000000; ++i) {
    rank.dispatch_rows();
    if (rank.me() == 2 && i == 20) {
      std::this_thread::sleep_for(kLead);
      kill(getpid(), SIGKILL);
    }
    rank.combine_rows();
  }
}

void stalls(Rank& rank) {
  if (rank.me() == 2) std::this_thread::sleep_for(kLead + 1.5 * kDeadline);
  rank.dispatch_rows();
}

void throws(Rank& rank) {
  if (rank.me() == 2) {
    std::this_thread::sleep_for(kLead);
    fail(ErrorKind::kIo, "disk full");
  }
  rank.dispatch_rows();
}

void runs_another_operation(Rank& rank) {
  std::this_thread::sleep_for(kLead);
  rank.me() == 2 ? rank.combine_rows() : rank.dispatch_rows();
}

void prepares_otherwise(Rank& rank) {
  std::this_thread::sleep_for(kLead);
  rank.prepare_plan(rank.me() == 2 ? 4 : 1);
}

const std::map<std::string, void (*)(Rank&)> kScenarios = {
    {"dies", dies},
    {"dies_between", dies_between},
    {"stalls", stalls},
    {"throws", throws},
    {"runs_another_operation", runs_another_operation},
    {"prepares_otherwise", prepares_otherwise},
};

int run(int argc, char** argv) {
  if (argc < 3 || !kScenarios.contains(argv[1])) {
    std::fputs("usage: tests_moe_fault SCENARIO mapped|collectives\n", stderr);
    return 2;
  }
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.back() == "--ranks=3" && !comm::is_started_rank()) {
    comm::start_ranks(3, {.arguments = arguments});
    return 0;
  }
  const bool mapped = arguments[1] == "mapped";
  Clock::time_point start;
  int me = -1;
  try {
    comm::run_mpi_rank({.deadline = kDeadline}, [&](comm::Communicator& world) {
      me = world.rank();
      Rank rank(world, mapped ? EpTransport::kMapped : EpTransport::kCollectives);
      world.barrier();
      start = Clock::now();
      kScenarios.at(argv[1])(rank);
    });
  } catch (const Error& e) {
    const Seconds since_fault = Clock::now() - start - kLead;
    std::fputs(text("rank {}: {:.2f} s: {}\n", me, since_fault.count(), e.what()).c_str(), stdout);
    comm::mpi::end_process(7);
  }
  std::fputs(text("rank {}: well\n", me).c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace moiety::moe

int main(int argc, char** argv) { return moiety::moe::run(argc, argv); }
