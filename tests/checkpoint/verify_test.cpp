#include "moiety/checkpoint/verify.h"

#include <filesystem>

#include <gtest/gtest.h>

#include "moiety/checkpoint/checkpoint_error.h"
#include "tests/checkpoint/faulty_files.h"
#include "tests/checkpoint/state_testing.h"

namespace moiety::checkpoint {
namespace {

class Verify : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& bytes) {
    write_file(path_ + "/" + name, bytes);
  }
  std::string read(const std::string& name) { return read_file(path_ + "/" + name); }
  void remove(const std::string& name) { std::filesystem::remove(path_ + "/" + name); }
  std::string flipped(std::string bytes, size_t at) {
    bytes[at] = char(bytes[at] ^ (1 << (at * 5 % 8)));
    return bytes;
  }
  // Repairing is refused, and changes no file.
  std::string refused_repair() {
    std::map<std::string, std::string> before, after;
    for (const std::string& name : list(posix(), path_)) before[name] = read(name);
    const std::string error = kind_and_error_of([&] { repair(path_); });
    for (const std::string& name : list(posix(), path_)) after[name] = read(name);
    EXPECT_EQ(before, after) << error;
    return error;
  }

  TemporaryDirectory directory_;
  std::string path_ = save_state(tiny_state(), directory_ / "c", Cut::kFlat, 2, 5, 1).path;
  const std::string manifest_ = read("manifest.json"), commit_ = read("COMMIT");
  const std::string rank1_ = "rank-00001-of-00002.safetensors";
};

TEST_F(Verify, AnyFlippedBitIsFoundAndItsFileNamed) {
  EXPECT_EQ(verify(path_), read_manifest(path_));
  for (const std::string& name : list(posix(), path_)) {
    const std::string good = read(name);
    for (size_t at = 0; at < good.size(); ++at) {
      write(name, flipped(good, at));
      const std::string error = kind_and_error_of([&] { verify(path_); });
      EXPECT_EQ(error.substr(0, 12), "checkpoint: ") << name << " byte " << at << ": " << error;
      EXPECT_NE(error.find(path_), std::string::npos) << error;
    }
    write(name, good);
  }
  verify(path_);
}

TEST_F(Verify, TheDamagedPieceIsNamed) {
  const std::string good = read(rank1_);
  write(rank1_, flipped(good, good.size() - 1));
  const std::string error = kind_and_error_of([&] { verify(path_); });
  EXPECT_NE(error.find(rank1_ + ": \""), std::string::npos) << error;
  EXPECT_NE(error.find(" of the data, expected "), std::string::npos) << error;
}

TEST_F(Verify, NothingIsRepairedThatIsGood) { EXPECT_EQ(repair(path_), Repair::kNone); }

TEST_F(Verify, ALostManifestIsMadeAgainToTheByte) {
  const std::vector<std::vector<std::string>> losses{
      {"manifest.json"}, {"COMMIT"}, {"manifest.json", "COMMIT"}};
  for (const auto& lost : losses) {
    for (const std::string& name : lost) remove(name);
    EXPECT_EQ(repair(path_), lost.size() == 2 ? Repair::kUnproved : Repair::kProved) << lost[0];
    EXPECT_EQ(read("manifest.json"), manifest_);
    EXPECT_EQ(read("COMMIT"), commit_);
    verify(path_);
  }
}

TEST_F(Verify, ADamagedManifestIsMadeAgain) {
  write("manifest.json", manifest_.substr(0, manifest_.size() / 2));
  EXPECT_EQ(repair(path_), Repair::kProved);
  EXPECT_EQ(read("manifest.json"), manifest_);
  write("COMMIT", "moiety-");
  EXPECT_EQ(repair(path_), Repair::kProved);
  EXPECT_EQ(read("COMMIT"), commit_);
}

TEST_F(Verify, DamagedDataAreNotDeclaredGood) {
  const std::string good = read(rank1_);
  write(rank1_, flipped(good, good.size() - 1));
  EXPECT_NE(refused_repair().find(rank1_), std::string::npos);
  remove("COMMIT");
  EXPECT_NE(refused_repair().find(rank1_), std::string::npos);
  write("COMMIT", commit_);
  remove("manifest.json");
  EXPECT_NE(refused_repair().find("the rank files are not what was saved"), std::string::npos);
  write("manifest.json", manifest_);
  remove(rank1_);
  EXPECT_NE(refused_repair().find(rank1_ + " is missing"), std::string::npos);
}

TEST_F(Verify, ADirectoryWithoutRankFilesIsRefused) {
  std::filesystem::create_directory(directory_ / "empty");
  EXPECT_EQ(kind_and_error_of([&] { repair(directory_ / "empty"); }),
            "checkpoint: " + (directory_ / "empty") + ": there is no file rank-00000-of-*");
}

}  // namespace
}  // namespace moiety::checkpoint
