#include <algorithm>
#include <cstdio>
#include <string>

#include <gtest/gtest.h>

#include "moiety/base/format.h"
#include "moiety/comm/mpi_group.h"
#include "tests/support/mpi/world.h"

namespace moiety::comm::testing {
namespace {

constexpr Seconds kPatience{60};
Communicator* g_world = nullptr;

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

}  // namespace moiety::comm::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  moiety::comm::MpiGroupOptions options{.deadline = moiety::comm::testing::kPatience};
  // --no-map keeps symmetric memory off, --pieces sends long tensors in small messages.
  for (int i = 1; i < argc; ++i) {
    if (argv[i] == std::string("--no-map")) options.map_memory = false;
    if (argv[i] == std::string("--pieces")) options.largest_message = 500;
  }
  int code = 1;
  try {
    moiety::comm::run_mpi_rank(options, [&](moiety::comm::Communicator& world) {
      code = moiety::comm::testing::run_all(world);
    });
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    moiety::comm::mpi::end_process(1);
  }
  return code;
}
