#include "moiety/base/replace_file.h"

#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "tests/support/files.h"

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

TEST(ReplaceFile, WhatIsNotAFileIsWrittenIntoAndStays) {
  const TemporaryDirectory dir;
  replace_file("/dev/null", "nothing");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_THROW(replace_file("/dev/full", "x"), IoError);
  const std::string fifo = dir / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THROW(replace_file(fifo, "nobody reads it"), IoError);
  const int reader = ::open(fifo.c_str(), O_RDONLY | O_NONBLOCK);
  replace_file(fifo, "some", "body");
  char bytes[16] = "";
  EXPECT_EQ(::read(reader, bytes, sizeof(bytes)), 8);
  EXPECT_STREQ(bytes, "somebody");
  ::close(reader);
  EXPECT_TRUE(fs::is_fifo(fifo));
}

TEST(ReplaceFile, ALinkStaysAndItsFileIsReplaced) {
  const TemporaryDirectory dir;
  const std::string file = dir.write("there/file", "old");
  fs::create_symlink(file, dir / "link");
  fs::create_symlink(dir / "there/new", dir / "dangling");
  replace_file(dir / "link", "new");
  replace_file(dir / "dangling", "made");
  EXPECT_TRUE(fs::is_symlink(dir / "link"));
  EXPECT_EQ(read(file), "new");
  EXPECT_TRUE(fs::is_symlink(dir / "dangling"));
  EXPECT_EQ(read(dir / "there/new"), "made");
  fs::create_symlink("loop", dir / "loop");
  EXPECT_THROW(replace_file(dir / "loop", "x"), IoError);
  EXPECT_TRUE(fs::is_symlink(dir / "loop"));
}

}  // namespace
}  // namespace moiety
