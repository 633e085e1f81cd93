// Damaged checkpoints are refused by name, and what is removed is what should be.
#include <filesystem>
#include <sys/stat.h>

#include <gtest/gtest.h>

#include "moiety/base/log.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/retention.h"
#include "tests/checkpoint/faulty_files.h"
#include "tests/checkpoint/state_testing.h"
#include "tests/support/error_of.h"

namespace moiety::checkpoint {
namespace {

class Damage : public ::testing::Test {
 protected:
  void SetUp() override { set_log_level(LogLevel::kOff); }
  void TearDown() override { set_log_level(LogLevel::kInfo); }
};

TEST_F(Damage, AnyFlippedBitIsFound) {
  const TemporaryDirectory directory;
  const std::string path = save_state(tiny_state(), directory / "c", Cut::kFlat, 2, 5, 1).path;
  on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
    int tried = 0;
    for (const std::string& name : list(posix(), path)) {
      const std::string file = path + "/" + name;
      const std::string good = read_file(file);
      for (size_t i = 0; i < good.size(); ++i) {
        std::string bad = good;
        bad[i] = char(bad[i] ^ (1 << (i * 5 % 8)));
        write_file(file, bad);
        try {
          version_of(path, bootstrap);
          ADD_FAILURE() << name << " byte " << i;
        } catch (const CheckpointError& e) {
          EXPECT_NE(std::string(e.what()).find(path), std::string::npos) << e.what();
        }
        ++tried;
      }
      write_file(file, good);
    }
    EXPECT_GT(tried, 2000);
    EXPECT_EQ(version_of(path, bootstrap), 1);
  });
}

TEST_F(Damage, CutGrownAndMissingFilesAreFound) {
  const TemporaryDirectory directory;
  save_state(tiny_state(), directory / "c", Cut::kRows, 2, 4, 1);
  const std::string path = save_state(tiny_state(), directory / "c", Cut::kRows, 2, 5, 2).path;
  on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
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
        EXPECT_THROW(version_of(path, bootstrap), CheckpointError) << name << " " << change;
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

// One that could not be read may be good: an older one is no answer then.
TEST_F(Damage, AnUnreadableCheckpointIsNotPassedOver) {
  const TemporaryDirectory directory;
  for (const int64_t step : {4, 5})
    save_state(tiny_state(), directory / "c", Cut::kRows, 1, step, 1);
  FaultyFiles sound(Fault::kFail, -1);
  EXPECT_EQ(find_newest_complete(directory / "c", sound), directory / "c/step-00000005");
  for (int n = 0; n < sound.calls(); ++n) {
    FaultyFiles faulty(Fault::kFail, n);
    std::optional<std::string> newest;
    try {
      newest = find_newest_complete(directory / "c", faulty);
    } catch (const IoError&) {
      continue;
    }
    EXPECT_EQ(newest, directory / "c/step-00000005") << "call " << n;  // it was one of close
  }
}

TEST_F(Damage, AFifoIsNotWaitedFor) {
  const TemporaryDirectory directory;
  for (const char* name : {"COMMIT", "manifest.json"}) {
    const std::string path = save_state(tiny_state(), directory / name, Cut::kRows, 1, 5, 1).path;
    std::filesystem::remove(path + "/" + name);
    ASSERT_EQ(::mkfifo((path + "/" + name).c_str(), 0600), 0);
    EXPECT_EQ(error_of([&] { read_manifest(path); }, ErrorKind::kCheckpoint),
              path + "/" + name + " is not a regular file");
  }
}

TEST_F(Damage, ACheckpointUnderAnotherStepsNameIsNotComplete) {
  const TemporaryDirectory directory;
  const std::string path = save_state(tiny_state(), directory / "c", Cut::kRows, 1, 5, 1).path;
  std::filesystem::rename(path, directory / "c/step-00000006");
  EXPECT_EQ(find_newest_complete(directory / "c"), std::nullopt);
  EXPECT_EQ(find_newest_complete(directory / "none"), std::nullopt);
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

TEST_F(Damage, CountsThatNoTrainingReachesAreRefused) {
  const TemporaryDirectory directory;
  const std::string path = save_state(tiny_state(), directory / "c", Cut::kRows, 1, 5, 1).path;
  Manifest manifest = read_manifest(path);
  for (int64_t RunState::*count : {&RunState::step, &RunState::tokens, &RunState::adam_t}) {
    Manifest bad = manifest;
    bad.run.*count = INT64_MAX;
    EXPECT_NE(error_of([&] { parse_manifest(encode_manifest(bad)); }).find("9223372036854775807"),
              std::string::npos);
  }
  manifest.run.adam_t = 6;
  EXPECT_NE(error_of([&] {
              parse_manifest(encode_manifest(manifest));
            }).find("adam_t is 6 after 5 steps"),
            std::string::npos);
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
    all.keep.last = 0;
    for (int64_t step = 1; step <= 6; ++step) {
      save_state(tiny_state(), directory / "c", Cut::kRows, 1, step, 1, all);
    }
    // Damaged ones are neither counted nor removed.
    std::filesystem::remove(directory / "c/step-00000005/COMMIT");
    prune(directory / "c", {.last = k.keep_last, .every = k.keep_every}, k.keep_step);
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
