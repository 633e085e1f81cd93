#include "apps/moiety/input_file.h"

#include <sys/stat.h>

#include <gtest/gtest.h>

#include "tests/support/error_of.h"
#include "tests/support/files.h"

namespace moiety::app {
namespace {

std::string error_at(const std::string& path, int64_t most = 100) {
  return error_of([&] { read_file(path, most, ErrorKind::kData); }, ErrorKind::kData);
}

TEST(InputFile, ReadsRegularFiles) {
  const TemporaryDirectory dir;
  const std::string path = dir.write("a", "0123456789");
  EXPECT_EQ(read_file(path, 10, ErrorKind::kData), "0123456789");
  const InputFile file(path, ErrorKind::kUsage);
  EXPECT_EQ(file.bytes(), 10);
  std::string some(3, ' ');
  file.read(7, std::as_writable_bytes(std::span(some)));
  EXPECT_EQ(some, "789");
  EXPECT_EQ(
      error_of([&] { file.read(8, std::as_writable_bytes(std::span(some))); }, ErrorKind::kUsage),
      path + ": cannot be read at byte 10: it became shorter");
  EXPECT_EQ(read_file(dir.write("empty", ""), 0, ErrorKind::kData), "");
}

TEST(InputFile, RefusesWhatIsNoFileAndNeverWaits) {
  const TemporaryDirectory dir;
  const std::string fifo = dir / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(error_at(fifo), fifo + ": is not a regular file");
  EXPECT_EQ(error_at("/dev/null"), "/dev/null: is not a regular file");
  EXPECT_EQ(error_at(dir / "."), (dir / ".") + ": is a directory, not a file");
  EXPECT_EQ(error_at(dir / "no"), (dir / "no") + ": cannot open: No such file or directory");
  EXPECT_EQ(error_at(dir.write("long", "12345"), 4),
            (dir / "long") + ": has 5 B, at most 4 B are read");
}

}  // namespace
}  // namespace moiety::app
