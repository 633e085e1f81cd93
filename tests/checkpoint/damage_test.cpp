// Damaged checkpoints are refused by name; failing disks and killed writers leave the old
// checkpoint or the new one.
#include <atomic>

#include <gtest/gtest.h>

#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/retention.h"
#include "tests/checkpoint/faulty_files.h"
#include "tests/checkpoint/state_testing.h"

namespace moiety::checkpoint {
namespace {

class Damage : public ::testing::Test {
 protected:
  void SetUp() override { set_log_level(LogLevel::kOff); }
  void TearDown() override { set_log_level(LogLevel::kInfo); }
};

// A load of the state on the calling thread's one rank, as cheap as it can be: thousands are tried.
class OneRank {
 public:
  OneRank() : state_(tiny_state(), Cut::kRows, 0, 1) {}
  // Runs body(bootstrap) with a group of one.
  static void run(const std::function<void(comm::Bootstrap&)>& body) {
    on_ranks(1, [&](int, comm::Bootstrap& bootstrap) { body(bootstrap); });
  }
  // The version of the state that a checkpoint holds; throws if it holds none of [0, 4).
  int version(const std::string& path, comm::Bootstrap& bootstrap) {
    state_.poison();
    load(path, state_.view(), {}, bootstrap);
    for (int v = 0; v < 4; ++v) {
      if (state_.differences(v) == 0) return v;
    }
    throw std::runtime_error("a mixture");
  }

 private:
  RankState state_;
};

TEST_F(Damage, AnyFlippedBitIsFound) {
  const TemporaryDirectory directory;
  const std::string path = save_state(tiny_state(), directory / "c", Cut::kFlat, 2, 5, 1).path;
  OneRank::run([&](comm::Bootstrap& bootstrap) {
    OneRank one;
    int tried = 0;
    for (const std::string& name : list(posix(), path)) {
      const std::string file = path + "/" + name;
      const std::string good = read_file(file);
      for (size_t i = 0; i < good.size(); ++i) {
        std::string bad = good;
        bad[i] = char(bad[i] ^ (1 << (i * 5 % 8)));
        write_file(file, bad);
        try {
          one.version(path, bootstrap);
          ADD_FAILURE() << name << " byte " << i;
        } catch (const CheckpointError& e) {
          EXPECT_NE(std::string(e.what()).find(path), std::string::npos) << e.what();
        }
        ++tried;
      }
      write_file(file, good);
    }
    EXPECT_GT(tried, 2000);
    EXPECT_EQ(one.version(path, bootstrap), 1);
  });
}

TEST_F(Damage, CutGrownAndMissingFilesAreFound) {
  const TemporaryDirectory directory;
  save_state(tiny_state(), directory / "c", Cut::kRows, 2, 4, 1);
  const std::string path = save_state(tiny_state(), directory / "c", Cut::kRows, 2, 5, 2).path;
  OneRank::run([&](comm::Bootstrap& bootstrap) {
    OneRank one;
    for (const std::string& name : list(posix(), path)) {
      const std::string file = path + "/" + name;
      const std::string good = read_file(file);
      for (const int change : {-2, -1, 1}) {
        if (change == -2) {
          std::filesystem::remove(file);
        } else if (change == -1) {
          write_file(file, good.substr(0, good.size() - 1));
        } else {
          write_file(file, good + "x");
        }
        EXPECT_THROW(one.version(path, bootstrap), CheckpointError) << name << " " << change;
        // The newest complete one is the one before.
        const CheckpointList found = list_checkpoints(directory / "c");
        EXPECT_EQ(found.complete, std::vector<std::string>{directory / "c/step-00000004"});
        ASSERT_EQ(found.damaged.size(), 1u);
        EXPECT_NE(found.damaged[0].find(path), std::string::npos) << found.damaged[0];
        EXPECT_EQ(find_newest_complete(directory / "c"), directory / "c/step-00000004");
        write_file(file, good);
      }
    }
    EXPECT_EQ(find_newest_complete(directory / "c"), path);
  });
}

TEST_F(Damage, ACheckpointUnderAnotherStepsNameIsNotComplete) {
  const TemporaryDirectory directory;
  const std::string path = save_state(tiny_state(), directory / "c", Cut::kRows, 1, 5, 1).path;
  std::filesystem::rename(path, directory / "c/step-00000006");
  EXPECT_EQ(find_newest_complete(directory / "c"), std::nullopt);
  EXPECT_EQ(find_newest_complete(directory / "none"), std::nullopt);
}

TEST_F(Damage, OneRanksFailureIsEverybodys) {
  const TemporaryDirectory directory;
  save_state(tiny_state(), directory / "c", Cut::kRows, 3, 4, 1);
  // On rank 1 the disk is full at some call; calls vary with threads' timing by none: one rank's
  // own.
  int failed = 0;
  for (int n = 0;; ++n) {
    std::atomic<int> reached = 0;
    std::vector<std::string> errors(3);
    on_ranks(3, [&](int rank, comm::Bootstrap& bootstrap) {
      FaultyFiles files(Fault::kFail, rank == 1 ? n : -1);
      RankState state(tiny_state(), Cut::kRows, rank, 3);
      state.fill(2);
      Saver saver(directory / "c", bootstrap, {}, files);
      errors[size_t(rank)] = error_of([&] { saver.save(state.view(), run_state(5, 3), Stream()); });
      if (rank == 1) reached = files.calls();
    });
    EXPECT_EQ(errors[0], errors[1]);
    EXPECT_EQ(errors[0], errors[2]);
    if (reached <= n) break;
    ++failed;
    EXPECT_EQ(errors[0].find("rank 1: "), 0u) << errors[0];
    EXPECT_NE(errors[0].find("No space left"), std::string::npos) << errors[0];
    EXPECT_EQ(list(posix(), directory / "c"),
              (std::vector<std::string>{"latest", "step-00000004"}));
  }
  EXPECT_GT(failed, 15);
  EXPECT_EQ(load_state(tiny_state(), directory / "c/step-00000004", Cut::kFlat, 2, 1), 0);
  EXPECT_EQ(load_state(tiny_state(), directory / "c/step-00000005", Cut::kFlat, 2, 2), 0);
}

// A disk that says nothing and stores something else.
class LyingFiles : public FaultyFiles {
 public:
  LyingFiles() : FaultyFiles(Fault::kFail, -1) {}
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    std::string changed(static_cast<const char*>(data), bytes);
    changed.back() = char(changed.back() ^ 1);
    return FaultyFiles::pwrite(fd, changed.data(), bytes, offset);
  }
};

TEST_F(Damage, WhatIsWrittenIsReadBack) {
  const TemporaryDirectory directory;
  LyingFiles files;
  const std::string error =
      error_of([&] { save_state(tiny_state(), directory / "c", Cut::kRows, 1, 5, 1, {}, files); });
  EXPECT_NE(error.find("rank-00000-of-00001.safetensors reads back with crc32c"), std::string::npos)
      << error;
  EXPECT_TRUE(std::filesystem::is_empty(directory / "c"));
}

TEST_F(Damage, ARankThatDiesLeavesTheOldOnes) {
  const TemporaryDirectory directory;
  save_state(tiny_state(), directory / "c", Cut::kRows, 2, 4, 1);
  EXPECT_THROW(on_ranks(2,
                        [&](int rank, comm::Bootstrap& bootstrap) {
                          if (rank == 1) throw std::runtime_error("rank 1 dies");
                          RankState state(tiny_state(), Cut::kRows, rank, 2);
                          Saver saver(directory / "c", bootstrap);
                          saver.save(state.view(), run_state(5, 2), Stream());
                        }),
               std::exception);
  recover(directory / "c");
  EXPECT_EQ(list(posix(), directory / "c"), (std::vector<std::string>{"latest", "step-00000004"}));
}

TEST_F(Damage, RanksMustAgreeOnTheStepAndOwnEveryElementOnce) {
  const TemporaryDirectory directory;
  const auto error_with = [&](const std::function<void(int, StateView&, RunState&)>& change) {
    std::string error;
    on_ranks(2, [&](int rank, comm::Bootstrap& bootstrap) {
      RankState state(tiny_state(), Cut::kRows, rank, 2);
      StateView view = state.view();
      RunState run = run_state(5, 2);
      change(rank, view, run);
      Saver saver(directory / "c", bootstrap);
      const std::string mine = error_of([&] { saver.save(view, run, Stream()); });
      if (rank == 0) error = mine;
    });
    EXPECT_TRUE(std::filesystem::is_empty(directory / "c") ||
                !std::filesystem::exists(directory / "c"))
        << error;
    return error;
  };
  std::filesystem::create_directory(directory / "c");
  EXPECT_NE(error_with([](int rank, StateView&, RunState& run) {
              run.step += rank;
            }).find("rank 1: save: this rank is at step 6, rank 0 at 5"),
            std::string::npos);
  EXPECT_NE(error_with([](int, StateView&, RunState& run) {
              run.layout.ranks = 3;
            }).find("a layout of 3 ranks on 2"),
            std::string::npos);
  EXPECT_NE(error_with([](int rank, StateView& view, RunState&) {
              if (rank == 1) view.erase(view.begin());
            }).find("weight/matrix of shape [3,4]: [1:3,0:4] is not covered"),
            std::string::npos);
  EXPECT_NE(error_with([](int rank, StateView& view, RunState&) {
              if (rank == 1) view[0].box.start[0] = 0;
            }).find("[0:1,0:4] is covered twice"),
            std::string::npos);
  EXPECT_NE(error_with([](int rank, StateView& view, RunState&) {
              if (rank == 1) view[0].dtype = DType::kInt32;
            }).find("weight/matrix is float32 [3,4] here and int32 [3,4] there"),
            std::string::npos);
  EXPECT_NE(error_with([](int rank, StateView& view, RunState&) {
              if (rank == 1) view[0].box.size[0] = 9;
            }).find("a box outside of the shape"),
            std::string::npos);
  EXPECT_NE(error_with([](int, StateView&, RunState& run) {
              run.config = "{\"a\":1,\"a\":2}";
            }).find("duplicate key"),
            std::string::npos);
}

// Runs a save with the n-th call going wrong for all n, each from the same start, and looks at what
// a new start then finds.
void crash_everywhere(Fault fault, const std::function<void(const std::string&)>& prepare,
                      int64_t step, int new_version, const SaveOptions& options,
                      const std::vector<int>& legal) {
  int calls = 0;
  bool finished = false;
  set_thread_budget(1);
  for (int n = 0; !finished; ++n) {
    const TemporaryDirectory directory;
    const std::string c = directory / "c";
    OneRank::run([&](comm::Bootstrap& bootstrap) {
      prepare(c);
      RankState state(tiny_state(), Cut::kRows, 0, 1);
      state.fill(new_version);
      FaultyFiles files(fault, n);
      const std::string error = error_of([&] {
        Saver(c, bootstrap, options, files).save(state.view(), run_state(step, 1), Stream());
      });
      calls = files.calls();
      finished = calls <= n;
      if (fault == Fault::kPowerLoss && !finished) files.lose();

      // A first start may be killed as well.
      if (fault != Fault::kFail && n % 3 == 0) {
        FaultyFiles again(fault, n / 3 % 7);
        error_of([&] { recover(c, again); });
        if (fault == Fault::kPowerLoss) again.lose();
      }
      recover(c);
      const auto newest = find_newest_complete(c);
      const int found = newest ? OneRank().version(*newest, bootstrap) : -1;
      EXPECT_NE(std::find(legal.begin(), legal.end(), found), legal.end()) << n << ": " << found;
      if (error.empty()) {
        EXPECT_EQ(found, new_version) << n;
      } else {
        EXPECT_NE(error.find("c"), std::string::npos);
      }
      for (const std::string& name : list(posix(), c)) {
        EXPECT_TRUE(name == "latest" || step_of(name)) << n << ": " << name;
      }
    });
  }
  EXPECT_GT(calls, 40);
}

std::string fault_name(Fault fault) {
  if (fault == Fault::kFail) return "Fail";
  return fault == Fault::kKill ? "Kill" : "PowerLoss";
}

class Crash : public ::testing::TestWithParam<Fault> {
 protected:
  void SetUp() override { set_log_level(LogLevel::kOff); }
  void TearDown() override { set_log_level(LogLevel::kInfo); }
};

// Three pieces of a file and a few more calls are enough.
SaveOptions crash_options() {
  SaveOptions options;
  options.keep_last = 2;
  return options;
}

void save_on_one(const std::string& c, int64_t step, int version) {
  save_state(tiny_state(), c, Cut::kRows, 1, step, version, crash_options());
}

TEST_P(Crash, TheFirstSave) {
  crash_everywhere(GetParam(), [](const std::string&) {}, 5, 1, crash_options(), {-1, 1});
}

TEST_P(Crash, ANewStepWithPruning) {
  crash_everywhere(GetParam(),
                   [](const std::string& c) {
                     save_on_one(c, 3, 3);
                     save_on_one(c, 4, 0);
                   },
                   5, 1, crash_options(), {0, 1});
}

TEST_P(Crash, TheSameStepAgain) {
  crash_everywhere(GetParam(), [](const std::string& c) { save_on_one(c, 5, 0); }, 5, 1,
                   crash_options(), {0, 1});
}

INSTANTIATE_TEST_SUITE_P(Faults, Crash,
                         ::testing::Values(Fault::kFail, Fault::kKill, Fault::kPowerLoss),
                         [](const auto& info) { return fault_name(info.param); });

TEST_F(Damage, TwoRanksKilledTogether) {
  bool finished = false;
  for (int n = 0; !finished; n += 3) {
    const TemporaryDirectory directory;
    const std::string c = directory / "c";
    save_state(tiny_state(), c, Cut::kFlat, 2, 5, 0);
    FaultyFiles files(Fault::kKill, n);
    error_of([&] { save_state(tiny_state(), c, Cut::kFlat, 2, 5, 1, {}, files); });
    finished = files.calls() <= n;
    recover(c);
    const auto newest = find_newest_complete(c);
    ASSERT_TRUE(newest.has_value());
    OneRank::run([&](comm::Bootstrap& bootstrap) {
      const int found = OneRank().version(*newest, bootstrap);
      EXPECT_TRUE(found == 1 || (found == 0 && !finished)) << found;
    });
  }
}

TEST_F(Damage, RecoverRemovesOnlyLeftovers) {
  const TemporaryDirectory directory;
  const std::string c = directory / "c";
  save_state(tiny_state(), c, Cut::kRows, 1, 4, 1);
  save_state(tiny_state(), c, Cut::kRows, 1, 5, 2);
  std::filesystem::copy(c + "/step-00000004", c + "/.tmp-step-00000009-x");
  std::filesystem::copy(c + "/step-00000004", c + "/.trash-x");
  std::filesystem::copy(c + "/step-00000004", c + "/.old-x");
  std::filesystem::rename(c + "/step-00000005", c + "/.old-y");
  write_file(c + "/notes.txt", "mine");
  recover(c);
  EXPECT_EQ(list(posix(), c),
            (std::vector<std::string>{"latest", "notes.txt", "step-00000004", "step-00000005"}));
  EXPECT_EQ(load_state(tiny_state(), c + "/step-00000005", Cut::kRows, 1, 2), 0);
  recover(directory / "none");
}

TEST(Retention, Names) {
  EXPECT_EQ(step_name(1000), "step-00001000");
  EXPECT_EQ(step_name(123456789012), "step-123456789012");
  EXPECT_EQ(step_of("step-00001000"), 1000);
  EXPECT_EQ(step_of("step-123456789012"), 123456789012);
  for (const char* name : {"step-1000", "step-0000100x", "step-", "step-000000001",
                           "xstep-00001000", ".old-step-00001000", "step--0001000"}) {
    EXPECT_EQ(step_of(name), std::nullopt) << name;
  }
}

TEST_F(Damage, PruningKeepsWhatItShould) {
  const struct {
    int keep_last, keep_every;
    int64_t keep_step;
    std::vector<int64_t> left;
  } kCases[] = {
      {0, 0, 6, {1, 2, 3, 4, 5, 6}}, {1, 0, 6, {6, 5}},    {3, 0, 6, {6, 5, 4, 3}},
      {1, 2, 6, {6, 5, 4, 2}},       {1, 0, 1, {6, 5, 1}},
  };
  for (const auto& k : kCases) {
    const TemporaryDirectory directory;
    SaveOptions all;
    all.keep_last = 0;
    for (int64_t step = 1; step <= 6; ++step) {
      save_state(tiny_state(), directory / "c", Cut::kRows, 1, step, 1, all);
    }
    // Damaged ones are neither counted nor removed.
    std::filesystem::remove(directory / "c/step-00000005/COMMIT");
    prune(directory / "c", k.keep_last, k.keep_every, k.keep_step);
    std::vector<int64_t> left;
    for (const std::string& name : list(posix(), directory / "c")) {
      if (const auto step = step_of(name)) left.push_back(*step);
    }
    std::vector<int64_t> expected = k.left;
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(left, expected) << k.keep_last << " " << k.keep_every;
  }
}

}  // namespace
}  // namespace moiety::checkpoint
