#include "moiety/data/spill.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"

namespace moiety::data {
namespace {

// What comes out of `spill`, whole.
std::vector<unsigned char> all_of(Spill& spill) {
  std::vector<unsigned char> out;
  spill.read([&](const void* data, size_t bytes) {
    const auto* p = static_cast<const unsigned char*>(data);
    out.insert(out.end(), p, p + bytes);
  });
  return out;
}

class SpillTest : public testing::Test {
 protected:
  SpillTest() { std::filesystem::create_directory(folder_); }
  ~SpillTest() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path folder_ = std::filesystem::path(testing::TempDir()) / "spill_test";
};

// Nothing, what stays in the buffer, and what goes through the file several times.
TEST_F(SpillTest, GivesBackWhatWasAppended) {
  for (const size_t bytes : {0, 1, 1000, (1 << 20) - 1, 1 << 20, 5'000'017}) {
    SCOPED_TRACE(bytes);
    std::vector<unsigned char> in(bytes);
    for (size_t i = 0; i < bytes; ++i) in[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
    Spill spill(folder_ / "bytes");
    for (size_t at = 0, step = 1; at < bytes; at += step, step = step * 3 + 1) {
      spill.append(in.data() + at, std::min(step, bytes - at));
    }
    EXPECT_EQ(spill.crc32c(), crc32c(in.data(), in.size()));
    EXPECT_EQ(all_of(spill), in);
    EXPECT_TRUE(std::filesystem::is_empty(folder_)) << "the file has no name";
  }
}

TEST_F(SpillTest, NamesTheFileThatCannotBeMade) {
  Spill spill(folder_ / "absent" / "bytes");
  const std::vector<unsigned char> in(2 << 20);
  try {
    spill.append(in.data(), in.size());
    FAIL() << "no error";
  } catch (const IoError& e) {
    EXPECT_NE(std::string(e.what()).find("absent/bytes: cannot create"), std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace moiety::data
