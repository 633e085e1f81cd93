#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/format.h"
#include "moiety/comm/local_group.h"
#include "moiety/comm/mpi_group.h"
#include "tests/support/mpi/world.h"

namespace moiety::comm::testing {
namespace {

constexpr Seconds kPatience{60};
Communicator* g_world = nullptr;
bool g_over_nccl = false;

// The output of ranks other than 0: their failures.
class Failures final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& test) override {
    name_ = text("{}.{}", test.test_suite_name(), test.name());
  }
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::puts(text("[rank {}] {} {}:{}\n{}", world().rank(), name_,
                   result.file_name() ? result.file_name() : "", result.line_number(),
                   result.message())
                  .c_str());
  }

  std::string name_;
};

// The largest result of all ranks, so that one rank's failure is everyone's exit code.
int run_all(Communicator& comm) {
  g_world = &comm;
  if (comm.rank() != 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new Failures);
  }
  int result = RUN_ALL_TESTS();
  for (const std::string& other : comm.bootstrap().all_gather(std::to_string(result))) {
    result = std::max(result, std::stoi(other));
  }
  return result;
}

}  // namespace

Communicator& world() { return *g_world; }
bool over_nccl() { return g_over_nccl; }

void MpiBackend::run(int ranks, Seconds /*deadline*/,
                     const std::function<void(Communicator&)>& body) {
  if (ranks > world().size()) return;
  const auto part = world().split(world().rank() < ranks ? 0 : -1, 0, "world");
  if (!part) return;
  try {
    body(*part);
  } catch (const std::exception& e) {
    world().bootstrap().abort(e.what());
    throw;
  }
}

// The exit code of the ranks, which this process starts with its own arguments.
int start_all(int ranks, int argc, char** argv) {
  const StartOptions options{.arguments = {argv + 1, argv + argc}};
  const std::vector<RankEnd> ends = start_ranks(ranks, options);
  const RankEnd* failure = first_failure(ends, options);
  if (!failure) return 0;
  std::fprintf(stderr, "%s\n", failure_text(*failure, ends).c_str());
  return 1;
}

// --no-map keeps symmetric memory off, --pieces sends long tensors in small messages, --nccl takes
// NCCL between GPUs; --ranks=N starts N processes without a launcher.
int run(int argc, char** argv) {
  constexpr std::string_view kRanks = "--ranks=";
  for (int i = 1; i < argc && !is_started_rank(); ++i) {
    if (!std::string_view(argv[i]).starts_with(kRanks)) continue;
    return start_all(std::atoi(argv[i] + kRanks.size()), argc, argv);
  }
  ::testing::InitGoogleTest(&argc, argv);
  MpiGroupOptions options{.deadline = kPatience};
  for (int i = 1; i < argc; ++i) {
    if (argv[i] == std::string("--no-map")) options.map_memory = false;
    if (argv[i] == std::string("--pieces")) options.largest_message = 500;
    if (argv[i] == std::string("--nccl")) g_over_nccl = true;
  }
  if (g_over_nccl) options.gpu_transport = GpuTransport::kNccl;
  int code = 1;
  try {
    run_mpi_rank(options, [&](Communicator& world) { code = run_all(world); });
  } catch (const std::exception& e) {
    if (!report_failure(e.what())) std::fprintf(stderr, "%s\n", e.what());
    mpi::end_process(1);
  }
  return code;
}

}  // namespace moiety::comm::testing

int main(int argc, char** argv) { return moiety::comm::testing::run(argc, argv); }
