#include "moiety/base/replace_file.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <gtest/gtest.h>

#include "moiety/base/error.h"

namespace moiety {
namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(ReplaceFile, LeavesTheNewBytesAndNothingElse) {
  const fs::path directory = fs::path(testing::TempDir()) / "moiety-replace-file";
  fs::remove_all(directory);
  fs::create_directories(directory);
  replace_file(directory / "a", "one");
  EXPECT_EQ(read(directory / "a"), "one");
  replace_file(directory / "a", "two, ", "three");
  EXPECT_EQ(read(directory / "a"), "two, three");
  EXPECT_EQ(std::distance(fs::directory_iterator(directory), {}), 1);
  EXPECT_THROW(replace_file(directory / "absent/a", "x"), IoError);
  fs::create_directories(directory / "d/inside");
  EXPECT_THROW(replace_file(directory / "d", "a file in a directory's place"), IoError);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory), {}), 2) << "temporary files stay";
  fs::remove_all(directory);
}

}  // namespace
}  // namespace moiety
