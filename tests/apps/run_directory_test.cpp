#include "apps/moiety/report/run_directory.h"

#include <sys/stat.h>

#include <gtest/gtest.h>

#include "apps/moiety/exit_code.h"
#include "tests/data/data_helpers.h"

namespace moiety::app {
namespace {

TEST(RunDirectory, SecondTrainerIsRefused) {
  const TemporaryDirectory dir;
  {
    const RunDirectory first(dir / "run");
    try {
      const RunDirectory second(dir / "run");
      FAIL();
    } catch (const UsageError& e) {
      EXPECT_NE(std::string(e.what()).find(std::to_string(getpid())), std::string::npos);
    }
  }
  const RunDirectory third(dir / "run");  // the lock went with its holder
}

TEST(RunDirectory, ConfigIsWrittenAgainOnlyWhenItChanges) {
  const TemporaryDirectory dir;
  RunDirectory run(dir / "run");
  Config config;
  run.write_config(config);
  run.write_config(config);
  EXPECT_FALSE(std::filesystem::exists(dir / "run/config.2.toml"));
  config.options.optim.lr = 1;
  run.write_config(config);
  run.write_config(config);
  EXPECT_TRUE(std::filesystem::exists(dir / "run/config.2.toml"));
  EXPECT_FALSE(std::filesystem::exists(dir / "run/config.3.toml"));
  const std::vector<std::string> file{dir / "run/config.2.toml"};
  EXPECT_EQ(load_config(file, {}).options.optim.lr, 1);
}

TEST(RunDirectory, LinesAreAppended) {
  const TemporaryDirectory dir;
  for (const char* line : {"a", "b"}) {
    RunDirectory run(dir / "run");
    run.metrics().add(line);
  }
  EXPECT_EQ(read_all(dir / "run/metrics.jsonl"), "a\nb\n");
}

TEST(RunDirectory, UnusableDirectoryIsADiskError) {
  const TemporaryDirectory dir;
  dir.write("file", "");
  EXPECT_THROW(RunDirectory(dir / "file/run"), IoError);
}

TEST(RunDirectory, FullDiskDoesNotThrow) {
  LineFile full("/dev/full");
  testing::internal::CaptureStderr();
  full.add("a");
  full.add("b");
  const std::string warnings = testing::internal::GetCapturedStderr();
  EXPECT_NE(warnings.find("/dev/full: a record could not be written"), std::string::npos);
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 1);
}

TEST(RunDirectory, ALineThatWasCutOffIsRemoved) {
  const TemporaryDirectory dir;
  for (const auto& [before, after] :
       {std::pair<std::string, std::string>{"{\"a\":1}\n{\"b\":", "{\"a\":1}\n"},
        {"{\"a\":1}\n", "{\"a\":1}\n"},
        {std::string(10000, 'x'), ""},
        {"y\n" + std::string(10000, 'x'), "y\n"},
        {"", ""}}) {
    dir.write("run/metrics.jsonl", before);
    const RunDirectory run(dir / "run");
    EXPECT_EQ(read_all(dir / "run/metrics.jsonl"), after);
  }
}

TEST(RunDirectory, IsRemovedIfNoRunBeganInIt) {
  const TemporaryDirectory dir;
  {
    RunDirectory run(dir / "a/b");
    run.log().add("a start that fails");
    std::filesystem::create_directories(run.checkpoints());
  }
  EXPECT_FALSE(std::filesystem::exists(dir / "a"));
  { RunDirectory(dir / "a/b").metrics().add("{}"); }
  EXPECT_TRUE(std::filesystem::exists(dir / "a/b/metrics.jsonl"));
  std::filesystem::create_directories(dir / "c");
  { const RunDirectory run(dir / "c"); }
  EXPECT_TRUE(std::filesystem::exists(dir / "c/log.txt")) << "it was there before";
}

TEST(RunDirectory, AFifoInPlaceOfALogIsNotWaitedFor) {
  const TemporaryDirectory dir;
  std::filesystem::create_directories(dir / "run");
  ASSERT_EQ(::mkfifo((dir / "run/log.txt").c_str(), 0600), 0);
  EXPECT_THROW(RunDirectory(dir / "run"), IoError);
}

}  // namespace
}  // namespace moiety::app
