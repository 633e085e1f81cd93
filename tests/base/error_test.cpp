#include "moiety/base/error.h"

#include <set>
#include <string>

#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace moiety {
namespace {

TEST(Error, IsThrownAsTheTypeOfItsKind) {
  EXPECT_THROW(fail(ErrorKind::kUsage, "x"), UsageError);
  EXPECT_THROW(fail(ErrorKind::kData, "x"), DataError);
  EXPECT_THROW(fail(ErrorKind::kIo, "x"), IoError);
  EXPECT_THROW(fail(ErrorKind::kCheckpoint, "x"), CheckpointError);
  EXPECT_THROW(fail(ErrorKind::kNumerical, "x"), NumericalError);
  EXPECT_THROW(fail(ErrorKind::kOutOfMemory, "x"), MemoryError);
  EXPECT_THROW(fail(ErrorKind::kCuda, "x"), DeviceError);
  std::set<std::string> names;
  for (int k = 0; k <= static_cast<int>(ErrorKind::kNumerical); ++k) {
    const ErrorKind kind{k};
    EXPECT_EQ(error_of([&] { fail(kind, "{} of {}", 1, "two"); }, kind), "1 of two");
    names.insert(name(kind));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(ErrorKind::kNumerical) + 1);
}

TEST(Error, TextsWithoutArgumentsAreTakenAsTheyAre) {
  EXPECT_STREQ(DataError("100 % of {}").what(), "100 % of {}");
  EXPECT_STREQ(DataError("{}: no documents", "a.tok").what(), "a.tok: no documents");
}

TEST(Error, ChecksNameWhatTheyWereTold) {
  const auto check = [](int k) { MOIETY_CHECK(k % 16 == 0, "gemm: K={} must be whole", k); };
  EXPECT_EQ(error_of([&] { check(32); }), kNoError);
  EXPECT_EQ(error_of([&] { check(33); }, ErrorKind::kInvalidArgument), "gemm: K=33 must be whole");
}

}  // namespace
}  // namespace moiety
