// Saves that run beside training: the same files as those that training waits for, errors that
// reach all ranks, and nothing that hangs.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <sys/resource.h>
#include <thread>

#include <gtest/gtest.h>

#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/checkpoint/shared_directory.h"
#include "tests/checkpoint/faulty_files.h"
#include "tests/checkpoint/process_ranks.h"
#include "tests/checkpoint/state_testing.h"

namespace moiety::checkpoint {
namespace {

using Names = std::vector<std::string>;

class Background : public ::testing::Test {
 protected:
  void SetUp() override { set_log_level(LogLevel::kOff); }
  void TearDown() override {
    set_log_level(LogLevel::kInfo);
    set_log_sink({});
  }
};

// A disk on which files come to the disk only once it is released.
class SlowFiles : public FaultyFiles {
 public:
  SlowFiles() : FaultyFiles(Fault::kFail, -1) {}
  int fdatasync(int fd) override {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return released_; });
    return FaultyFiles::fdatasync(fd);
  }
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }
  void wait_until_stuck() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  bool released_ = false;
};

SaveReport poll_until_told(Saver& saver) {
  const Deadline limit(Seconds(20));
  for (;;) {
    if (auto report = saver.poll()) return *report;
    if (limit.expired()) throw std::runtime_error("poll: nothing was told");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Starts a save of `version` and overwrites the state at once, as the next step does.
void start_and_train_on(Saver& saver, RankState& state, int64_t step, int version, int ranks) {
  state.fill(version);
  saver.start(state.view(), run_state(step, ranks), Stream());
  state.fill(version + 100);
}

// A rank file without the checkpoint's id.
std::string content(const std::string& path, const std::string& id) {
  std::string bytes = read_file(path);
  for (size_t at; (at = bytes.find(id)) != bytes.npos;)
    bytes.replace(at, id.size(), id.size(), '.');
  return bytes;
}

TEST_F(Background, FilesAreThoseOfASaveThatTrainingWaitsFor) {
  for (const int ranks : {1, 3}) {
    const TemporaryDirectory directory;
    const SaveResult waited =
        save_small(directory / "waited", Cut::kFlat, ranks, 5, 1, small_pieces());
    SaveResult beside;
    on_ranks(ranks, [&](int rank, comm::Bootstrap& bootstrap) {
      RankState state(small_state(), Cut::kFlat, rank, ranks);
      Saver saver(directory / "beside", bootstrap, small_pieces());
      start_and_train_on(saver, state, 5, 1, ranks);
      const auto result = saver.wait();
      ASSERT_TRUE(result.has_value());
      EXPECT_EQ(result->bytes, waited.bytes);
      if (rank == 0) beside = *result;
    });
    EXPECT_EQ(beside.path, directory / "beside/step-00000005");
    EXPECT_EQ(beside.step, 5);
    EXPECT_EQ(list(posix(), beside.path), list(posix(), waited.path));
    const Manifest a = read_manifest(beside.path), b = read_manifest(waited.path);
    EXPECT_EQ(a.id, beside.id);
    EXPECT_EQ(a.tensors, b.tensors);
    EXPECT_EQ(a.run, b.run);
    for (const FileEntry& file : a.files) {
      EXPECT_EQ(content(beside.path + "/" + file.name, a.id),
                content(waited.path + "/" + file.name, b.id));
    }
  }
}

TEST_F(Background, TrainingGoesOnWhileTheDiskIsSlow) {
  const TemporaryDirectory directory;
  on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
    SlowFiles files;
    RankState state(small_state(), Cut::kRows, 0, 1);
    Saver saver(directory / "c", bootstrap, {}, files);
    EXPECT_EQ(saver.poll(), std::nullopt);
    EXPECT_EQ(saver.wait(), std::nullopt);
    start_and_train_on(saver, state, 5, 1, 1);
    files.wait_until_stuck();
    EXPECT_EQ(saver.poll(), std::nullopt);
    EXPECT_EQ(find_newest_complete(directory / "c"), std::nullopt);
    files.release();
    const SaveReport report = poll_until_told(saver);
    EXPECT_EQ(report.error, "");
    EXPECT_EQ(report.result.path, directory / "c/step-00000005");
    EXPECT_GT(report.result.bytes, 1000u);
    EXPECT_GE(report.result.seconds, report.result.blocked_seconds);
    EXPECT_EQ(saver.poll(), std::nullopt);          // told once
    EXPECT_EQ(saver.wait()->id, report.result.id);  // but known
  });
  EXPECT_EQ(load_small(directory / "c/step-00000005", Cut::kFlat, 2, 1), 0);
}

TEST_F(Background, ASecondSaveWaitsForTheFirst) {
  const TemporaryDirectory directory;
  set_log_level(LogLevel::kInfo);
  std::mutex mutex;
  std::string lines;
  set_log_sink([&](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    lines += std::string(line) + "\n";
  });
  on_ranks(2, [&](int rank, comm::Bootstrap& bootstrap) {
    SlowFiles files;
    RankState state(small_state(), Cut::kRows, rank, 2);
    Saver saver(directory / "c", bootstrap, {}, files);
    start_and_train_on(saver, state, 5, 1, 2);
    files.wait_until_stuck();
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      files.release();
    });
    start_and_train_on(saver, state, 6, 2, 2);
    later.join();
    const auto first = saver.poll();
    ASSERT_TRUE(first.has_value());
    EXPECT_EQ(first->result.step, 5);
    EXPECT_EQ(first->error, "");
    EXPECT_EQ(saver.wait()->step, 6);
    EXPECT_EQ(saver.poll(), std::nullopt);
  });
  EXPECT_NE(lines.find("the save of step 6 waits for that of step 5"), std::string::npos) << lines;
  EXPECT_EQ(load_small(directory / "c/step-00000005", Cut::kRows, 1, 1), 0);
  EXPECT_EQ(load_small(directory / "c/step-00000006", Cut::kRows, 1, 2), 0);
}

// Saves step 5 over an older step 4 on three ranks, with a fault on one of them, and returns the
// error that all have; "" if there was none.
std::string save_with_fault(const std::string& c, int faulty_rank, Fault fault, int n, int& calls) {
  Names errors(3);
  std::atomic<int> reached = 0;
  on_ranks(3, [&](int rank, comm::Bootstrap& bootstrap) {
    FaultyFiles files(fault, rank == faulty_rank ? n : -1);
    RankState state(tiny_state(), Cut::kRows, rank, 3);
    {
      Saver saver(c, bootstrap, {}, files);
      errors[rank] = error_of([&] {
        start_and_train_on(saver, state, 5, 2, 3);
        saver.wait();
      });
    }
    if (rank == faulty_rank) reached = files.calls();
  });
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_EQ(errors[0], errors[2]);
  calls = reached;
  return errors[0];
}

TEST_F(Background, OneRanksFailureIsEverybodysAndLeavesNothing) {
  for (const int faulty : {0, 2}) {
    const TemporaryDirectory directory;
    const std::string c = directory / "c";
    save_state(tiny_state(), c, Cut::kRows, 3, 4, 1);
    int failed = 0, calls = 1;
    for (int n = 0; n <= calls; ++n) {
      const std::string error = save_with_fault(c, faulty, Fault::kFail, n, calls);
      recover(c);
      const bool old_only = !std::filesystem::exists(c + "/step-00000005");
      if (error != kNoError) {
        ++failed;
        EXPECT_NE(error.find("No space left"), std::string::npos) << n << ": " << error;
        EXPECT_TRUE(faulty == 0 || error.find("rank 2: ") == 0) << error;
      } else {
        EXPECT_FALSE(old_only) << n;
      }
      on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
        set_thread_budget(1);
        EXPECT_EQ(version_of(c + "/step-00000004", bootstrap), 1) << n;
        EXPECT_TRUE(old_only || version_of(c + "/step-00000005", bootstrap) == 2) << n;
      });
      remove(posix(), c + "/step-00000005");
    }
    EXPECT_GT(failed, faulty == 0 ? 15 : 8);
  }
}

TEST_F(Background, AFullDiskOnOneRankIsKnownAtOnce) {
  const TemporaryDirectory directory;
  const std::string c = directory / "c";
  save_state(tiny_state(), c, Cut::kRows, 3, 4, 1);
  int failed = 0, calls = 1;
  for (int n = 0; n <= calls; ++n) {
    const Deadline watch(Seconds(10));
    const std::string error = save_with_fault(c, 1, Fault::kFull, n, calls);
    EXPECT_LT(watch.elapsed().count(), 2) << n;
    if (error == kNoError) break;
    ++failed;
    EXPECT_NE(error.find("rank 1: "), std::string::npos) << error;
    EXPECT_EQ(list(posix(), c), (Names{"latest", "step-00000004"})) << n;
  }
  EXPECT_GT(failed, 4);
}

TEST_F(Background, ARankThatNeverAnswersIsNamedAtTheDeadline) {
  const TemporaryDirectory directory;
  const std::string c = directory / "c";
  save_state(tiny_state(), c, Cut::kRows, 2, 4, 1);
  SlowFiles slow;
  Names told(2);
  on_ranks(2, [&](int rank, comm::Bootstrap& bootstrap) {
    SaveOptions options;
    options.deadline = Seconds(0.2);
    RankState state(tiny_state(), Cut::kRows, rank, 2);
    Saver saver(c, bootstrap, options, rank == 1 ? slow : posix());
    start_and_train_on(saver, state, 5, 2, 2);
    if (rank == 0) {
      told[0] = poll_until_told(saver).error;
      slow.release();
    }
    told[rank] += error_of([&] { saver.wait(); });
  });
  EXPECT_EQ(
      told[0].find("save: after 0.2 s 1 of 2 ranks have not written their files, first rank 1"), 0u)
      << told[0];
  EXPECT_EQ(told[0], told[1] + told[1]);
  EXPECT_EQ(list(posix(), c), (Names{"latest", "step-00000004"}));
}

TEST_F(Background, TheEndOfARunDoesNotHang) {
  const TemporaryDirectory directory;
  const std::string c = directory / "c";
  save_state(tiny_state(), c, Cut::kRows, 2, 4, 1);
  SlowFiles slow;
  const Deadline watch(Seconds(30));
  on_ranks(2, [&](int rank, comm::Bootstrap& bootstrap) {
    RankState state(tiny_state(), Cut::kRows, rank, 2);
    auto saver = std::make_unique<Saver>(c, bootstrap, SaveOptions(), rank == 1 ? slow : posix());
    start_and_train_on(*saver, state, 5, 2, 2);
    if (rank == 0) {
      saver.reset();  // rank 1's file is not there: this rank gives up
      slow.release();
    }
  });
  EXPECT_GT(watch.elapsed().count(), 1.9);
  EXPECT_LT(watch.elapsed().count(), 8);
  recover(c);
  EXPECT_EQ(list(posix(), c), (Names{"latest", "step-00000004"}));
}

TEST_F(Background, WrongArgumentsAreErrorsOfTheStart) {
  const TemporaryDirectory directory;
  on_ranks(2, [&](int rank, comm::Bootstrap& bootstrap) {
    RankState state(tiny_state(), Cut::kRows, rank, 2);
    Saver saver(directory / "c", bootstrap);
    StateView view = state.view();
    if (rank == 1) view[0].tensor = "";
    EXPECT_EQ(error_of([&] { saver.start(view, run_state(5, 2), Stream()); }),
              "rank 1: save: weight/: an empty name");
    RunState run = run_state(5, 2);
    run.state = "[]";
    EXPECT_NE(
        error_of([&] { saver.start(state.view(), run, Stream()); }).find("expected an object"),
        std::string::npos);
    EXPECT_EQ(saver.poll(), std::nullopt);
    EXPECT_EQ(saver.wait(), std::nullopt);
  });
  EXPECT_TRUE(std::filesystem::is_empty(directory / "c"));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they map terabytes
TEST_F(Background, WithoutMemoryForACopyTrainingWaits) {
  const TemporaryDirectory directory;
  constexpr int64_t kElements = 16 << 20;
  const State state{{"big", "weight", DType::kFloat32, {kElements}}};
  const auto status = run_process_ranks(1, Seconds(20), [&](comm::Bootstrap& bootstrap) {
    RankState mine(state, Cut::kRows, 0, 1);
    mine.fill(1);
    Saver saver(directory / "c", bootstrap);
    // The limit is the present address space and half of the copy.
    int64_t pages = 0;
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    MOIETY_CHECK(file && std::fscanf(file, "%ld", &pages) == 1, "statm");
    std::fclose(file);
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = static_cast<rlim_t>(pages) * 4096 + 2 * kElements;
    MOIETY_CHECK(setrlimit(RLIMIT_AS, &limit) == 0, "setrlimit");
    saver.reserve(mine.view());
    saver.start(mine.view(), run_state(5, 1), Stream());
    const auto report = saver.poll();  // it has ended
    MOIETY_CHECK(report && report->error.empty(), "{}", report ? report->error : "under way");
    MOIETY_CHECK(report->result.bytes > 4 * kElements, "{} bytes", report->result.bytes);
  });
  EXPECT_EQ(status, std::vector<int>{0});
  EXPECT_EQ(read_manifest(directory / "c/step-00000005").run, run_state(5, 1));
}
#endif

TEST_F(Background, RanksMayBeProcesses) {
  const TemporaryDirectory directory;
  const std::string c = directory / "c";
  const auto saved = run_process_ranks(3, Seconds(20), [&](comm::Bootstrap& bootstrap) {
    RankState state(small_state(), Cut::kBlocks, bootstrap.rank(), 3);
    Saver saver(c, bootstrap, small_pieces());
    for (const int64_t step : {5, 6}) {
      start_and_train_on(saver, state, step, int(step), 3);
    }
    saver.wait();
  });
  EXPECT_EQ(saved, (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(load_small(c + "/step-00000005", Cut::kColumns, 2, 5), 0);
  const auto loaded = run_process_ranks(2, Seconds(20), [&](comm::Bootstrap& bootstrap) {
    RankState state(small_state(), Cut::kColumns, bootstrap.rank(), 2);
    load(c + "/step-00000006", state.view(), {}, bootstrap);
    MOIETY_CHECK(state.differences(6) == 0, "{} differences", state.differences(6));
  });
  EXPECT_EQ(loaded, (std::vector<int>{0, 0}));
}

TEST_F(Background, SharedDirectory) {
  const TemporaryDirectory directory;
  write_file(directory / ".probe-0123", "of a start that was killed");
  on_ranks(3, [&](int rank, comm::Bootstrap& bootstrap) {
    check_shared_directory(directory.path(), bootstrap);
    const TemporaryDirectory other;
    const std::string error = error_of(
        [&] { check_shared_directory(rank == 1 ? other.path() : directory.path(), bootstrap); });
    EXPECT_EQ(error.find("rank 1: "), 0u) << error;
    EXPECT_NE(error.find("must be one file system for all ranks"), std::string::npos) << error;
  });
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

}  // namespace
}  // namespace moiety::checkpoint
