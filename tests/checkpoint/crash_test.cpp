// Failing disks and killed writers leave the old checkpoint or the new one, wherever they strike.
#include <csignal>
#include <functional>

#include <gtest/gtest.h>

#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/retention.h"
#include "tests/checkpoint/faulty_files.h"
#include "tests/checkpoint/process_ranks.h"
#include "tests/checkpoint/state_testing.h"

namespace moiety::checkpoint {
namespace {

enum class Mode { kWaiting, kBeside };  // save() or start()

// Three pieces of a file and a few more calls are enough.
SaveOptions crash_options(Seconds deadline = Seconds(30)) {
  SaveOptions options;
  options.keep.last = 2;
  options.deadline = deadline;
  return options;
}

// Saves `version` as step 5 of tiny_state.
void save_step(Mode mode, const std::string& c, int version, comm::Bootstrap& bootstrap,
               FileSystem& files, const SaveOptions& options = crash_options()) {
  const int ranks = bootstrap.size();
  RankState state(tiny_state(), Cut::kFlat, bootstrap.rank(), ranks);
  state.fill(version);
  Saver saver(c, bootstrap, options, files);
  if (mode == Mode::kWaiting) {
    saver.save(state.view(), run_state(5, ranks), Stream());
    return;
  }
  saver.start(state.view(), run_state(5, ranks), Stream());
  state.fill(3);
  saver.wait();
}

// The version of the newest checkpoint that a new start finds, -1 for none. No leftovers stay.
int recovered_version(const std::string& c, comm::Bootstrap& bootstrap) {
  recover(c);
  for (const std::string& name : list(posix(), c)) {
    EXPECT_TRUE(name == "latest" || step_of(name)) << name;
  }
  const auto newest = find_newest_complete(c);
  return newest ? version_of(*newest, bootstrap) : -1;
}

using Prepare = std::function<void(const std::string& c)>;

// Runs a save with the n-th call going wrong for all n, each from the same start, and looks at what
// a new start then finds.
void crash_everywhere(Fault fault, Mode mode, const Prepare& prepare, int old_version) {
  const TemporaryDirectory start;
  std::filesystem::create_directory(start / "c");
  prepare(start / "c");
  int calls = 0;
  bool finished = false;
  for (int n = 0; !finished; ++n) {
    const TemporaryDirectory directory;
    const std::string c = directory / "c";
    std::filesystem::copy(start / "c", c, std::filesystem::copy_options::recursive);
    on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
      set_thread_budget(1);
      FaultyFiles files(fault, n);
      const std::string error = error_of([&] { save_step(mode, c, 1, bootstrap, files); });
      calls = files.calls();
      finished = calls <= n;
      if (fault == Fault::kPowerLoss && !finished) files.lose();

      // A first start may be killed as well.
      if (fault != Fault::kFail && n % 3 == 0) {
        FaultyFiles again(fault, n / 3 % 7);
        error_of([&] { recover(c, again); });
        if (fault == Fault::kPowerLoss) again.lose();
      }
      const int found = recovered_version(c, bootstrap);
      EXPECT_TRUE(found == 1 || (found == old_version && error != kNoError))
          << "call " << n << ": " << found << " " << error;
    });
  }
  EXPECT_GT(calls, 40);
}

void save_on_one(const std::string& c, int64_t step, int version) {
  save_state(tiny_state(), c, Cut::kRows, 1, step, version, crash_options());
}

class Crash : public ::testing::TestWithParam<std::tuple<Fault, Mode>> {
 protected:
  void SetUp() override { set_log_level(LogLevel::kOff); }
  void TearDown() override { set_log_level(LogLevel::kInfo); }
  void everywhere(const Prepare& prepare, int old_version) {
    const auto [fault, mode] = GetParam();
    crash_everywhere(fault, mode, prepare, old_version);
  }
};

TEST_P(Crash, TheFirstSave) {
  everywhere([](const std::string&) {}, -1);
}

TEST_P(Crash, ANewStepWithPruning) {
  everywhere(
      [](const std::string& c) {
        save_on_one(c, 3, 3);
        save_on_one(c, 4, 0);
      },
      0);
}

TEST_P(Crash, TheSameStepAgain) {
  everywhere([](const std::string& c) { save_on_one(c, 5, 0); }, 0);
}

std::string case_name(const ::testing::TestParamInfo<std::tuple<Fault, Mode>>& info) {
  const auto [fault, mode] = info.param;
  const char* what = fault == Fault::kFail        ? "Fail"
                     : fault == Fault::kKill      ? "Kill"
                     : fault == Fault::kPowerLoss ? "PowerLoss"
                                                  : "Full";
  return std::string(what) + (mode == Mode::kBeside ? "Beside" : "Waiting");
}

INSTANTIATE_TEST_SUITE_P(Faults, Crash,
                         ::testing::Combine(::testing::Values(Fault::kFail, Fault::kKill,
                                                              Fault::kPowerLoss, Fault::kFull),
                                            ::testing::Values(Mode::kWaiting, Mode::kBeside)),
                         case_name);

class CrashOfRanks : public ::testing::TestWithParam<Mode> {
 protected:
  void SetUp() override { set_log_level(LogLevel::kOff); }
  void TearDown() override { set_log_level(LogLevel::kInfo); }
};

TEST_P(CrashOfRanks, AllKilledTogether) {
  bool finished = false;
  for (int n = 0; !finished; ++n) {
    const TemporaryDirectory directory;
    const std::string c = directory / "c";
    save_state(tiny_state(), c, Cut::kFlat, 2, 5, 0);
    FaultyFiles files(Fault::kKill, n);
    on_ranks(2, [&](int, comm::Bootstrap& bootstrap) {
      error_of([&] { save_step(GetParam(), c, 1, bootstrap, files); });
    });
    finished = files.calls() <= n;
    on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
      const int found = recovered_version(c, bootstrap);
      EXPECT_TRUE(found == 1 || (found == 0 && !finished)) << n << ": " << found;
    });
  }
}

// One of two processes is killed at its n-th call; the other one ends by itself.
TEST_P(CrashOfRanks, OneProcessKilled) {
  for (const int victim : {0, 1}) {
    int killed = 0;
    for (bool finished = false; !finished; ++killed) {
      const TemporaryDirectory directory;
      const std::string c = directory / "c";
      save_state(tiny_state(), c, Cut::kFlat, 2, 5, 0);
      const auto status = run_process_ranks(
          2, Seconds(10),
          [&](comm::Bootstrap& bootstrap) {
            FaultyFiles files(Fault::kSigkill, bootstrap.rank() == victim ? killed : -1);
            save_step(GetParam(), c, 1, bootstrap, files, crash_options(Seconds(0.05)));
          },
          false);
      finished = status[victim] == 0 || killed > 200;  // 1: the other one was late
      EXPECT_GE(status[1 - victim], 0);
      on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
        const int found = recovered_version(c, bootstrap);
        EXPECT_TRUE(found == 1 || found == 0) << killed << ": " << found;
      });
    }
    EXPECT_GT(killed, victim == 0 ? 40 : 12);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, CrashOfRanks, ::testing::Values(Mode::kWaiting, Mode::kBeside),
                         [](const auto& info) {
                           return info.param == Mode::kBeside ? "Beside" : "Waiting";
                         });

}  // namespace
}  // namespace moiety::checkpoint
