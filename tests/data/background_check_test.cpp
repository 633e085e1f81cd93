#include "moiety/data/background_check.h"

#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "tests/data/data_helpers.h"
#include "tests/support/error_of.h"

namespace moiety::data {
namespace {

constexpr double kLong = 60;
constexpr uint64_t kPieceTokens = kPieceBytes / 2;

std::string error_after(BackgroundCheck& check) {
  return kind_and_error_of([&] { check.settle(kLong); });
}

TEST(BackgroundCheck, ChecksThePiecesThatAreReadAndNoOthers) {
  const TemporaryDirectory dir;
  const std::string path = write_hole(dir / "a.tok", 3 * kPieceTokens + 5);
  flip_bit(path, 4096 + 2 * kPieceBytes + 1000);
  BackgroundCheck check({TokenFile::open(path)});
  check.touch(0, 0, 10);
  check.touch(0, 3 * kPieceTokens, 5);
  check.touch(0, kPieceTokens - 1, 2);
  EXPECT_EQ(check.settle(kLong), 0u);
  check.touch(0, 2 * kPieceTokens - 1, 2);  // its last token is in the damaged piece
  const std::string error = error_after(check);
  EXPECT_EQ(error.substr(0, error.find(" have")),
            "data: " + path + ": the tokens are damaged: bytes [33558528, 50335744)");
  EXPECT_EQ(kind_and_error_of([&] { check.touch(0, 0, 10); }), error);
}

TEST(BackgroundCheck, WithoutChecksumsOfPiecesAFirstReadChecksTheWhole) {
  const TemporaryDirectory dir;
  const std::string good = write_hole(dir / "good.tok", 2 * kPieceTokens + 5, false);
  const std::string bad = write_hole(dir / "bad.tok", 2 * kPieceTokens + 5, false);
  flip_bit(bad, 4096 + 2 * kPieceBytes);
  BackgroundCheck check({TokenFile::open(good), TokenFile::open(bad)});
  check.touch(0, 0, 10);
  EXPECT_EQ(check.settle(kLong), 0u);
  check.touch(1, 0, 10);
  EXPECT_EQ(error_after(check).rfind("data: " + bad + ": the tokens are damaged: crc32c", 0), 0u);
}

TEST(BackgroundCheck, AFileThatBecomesShorterIsAnError) {
  const TemporaryDirectory dir;
  const std::string path = write_hole(dir / "a.tok", 2 * kPieceTokens);
  BackgroundCheck check({TokenFile::open(path)});
  std::filesystem::resize_file(path, 5000);
  check.touch(0, 0, 10);
  EXPECT_EQ(error_after(check).substr(0, path.size() + 20), "data: " + path + ": the file had");
}

TEST(BackgroundCheck, EndsWithPiecesLeft) {
  const TemporaryDirectory dir;
  const std::string path = write_hole(dir / "a.tok", 40 * kPieceTokens);
  BackgroundCheck check({TokenFile::open(path)});
  for (uint64_t p = 0; p < 40; ++p) check.touch(0, p * kPieceTokens, 1);
}

// Samples of files above 256 MiB come before their check, and none after it has failed.
TEST(OpenTokenFiles, LargeFilesAreCheckedWhileTheyAreRead) {
  const TemporaryDirectory dir;
  const std::string path = write_hole(dir / "a.tok", 150'000'000);
  const auto open = [&] {
    return open_token_files(std::vector<WeightedPath>{{path}}, 8, 264,
                            Tokenizer::load("bytes").identity());
  };
  ReadSample sample(8);
  const auto good = open();
  sample.read(*good, {0, 0});
  good->await_checks();
  flip_bit(path, 4096 + 3 * kPieceBytes);
  const auto source = open();
  sample.read(*source, {0, 0});
  source->await_checks();
  sample.read(*source, {0, 3 * kPieceTokens / 8});
  const std::string error = kind_and_error_of([&] { source->await_checks(); });
  EXPECT_NE(error.find("bytes [50335744, 67112960) have crc32c"), std::string::npos) << error;
  EXPECT_EQ(kind_and_error_of([&] { sample.read(*source, {0, 0}); }), error);
}

}  // namespace
}  // namespace moiety::data
