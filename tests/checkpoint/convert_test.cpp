// Checkpoints whose experts are converted, loaded as they are then, and converted back.
#include "moiety/checkpoint/convert.h"

#include <filesystem>

#include <gtest/gtest.h>

#include "moiety/checkpoint/verify.h"
#include "tests/checkpoint/faulty_files.h"
#include "tests/checkpoint/state_testing.h"

namespace moiety::checkpoint {
namespace {

namespace fs = std::filesystem;
constexpr ExpertForm kPacked = ExpertForm::kPacked, kIndexed = ExpertForm::kIndexed;

const State& experts_state() {
  static const State state = [] {
    State s;
    for (const char* slot : {"weight", "exp_avg", "exp_avg_sq"}) {
      const DType dtype = slot == std::string("weight") ? DType::kFloat32 : DType::kBFloat16;
      s.push_back({"l.fc1.weight", slot, dtype, {12, 32, 5}});
      s.push_back({"l.fc1.bias", slot, dtype, {12, 32}});
      s.push_back({"l.fc2.weight", slot, dtype, {12, 5, 16}});
      s.push_back({"one.fc1.weight", slot, dtype, {1, 16, 3}});
      s.push_back({"norm", slot, dtype, {5}});
    }
    s.push_back({"no_rows", "weight", DType::kFloat32, {0, 4}});
    return s;
  }();
  return state;
}

const std::vector<ExpertModule> kModules{
    {"l.fc1", 12, true}, {"l.fc2", 12, false}, {"one.fc1", 1, true}, {"absent", 12, true}};

ConvertOptions to(ExpertForm form, int64_t interleave) {
  ConvertOptions options;
  options.form = form;
  options.interleave = interleave;
  options.modules = kModules;
  options.piece_bytes = 200;
  return options;
}

std::map<std::string, std::string> files_of(const std::string& path) {
  std::map<std::string, std::string> files;
  for (const std::string& name : list(posix(), path)) files[name] = read_file(path + "/" + name);
  return files;
}

class Convert : public ::testing::Test {
 protected:
  std::string converted(const std::string& from, const std::string& name, ExpertForm form,
                        int64_t interleave) {
    convert(from, directory_ / name, to(form, interleave));
    return directory_ / name;
  }
  std::vector<std::string> names() { return list(posix(), directory_.path()); }

  const TemporaryDirectory directory_;
  const std::string saved_ =
      save_state(experts_state(), directory_ / "c", Cut::kFlat, 3, 5, 1, small_pieces()).path;
};

TEST_F(Convert, LoadsUnderEveryCutAndGoesBackToTheByte) {
  const std::string plain = converted(saved_, "plain", kPacked, 0);
  for (const auto& [form, s] :
       {std::pair<ExpertForm, int64_t>{kIndexed, 8}, {kIndexed, 0}, {kPacked, 8}}) {
    const std::string path = converted(saved_, text("{}{}", name(form), s), form, s);
    verify(path);
    const Manifest m = read_manifest(path);
    EXPECT_EQ(m.run.experts.form, form);
    EXPECT_EQ(m.run.experts.interleave, s);
    EXPECT_EQ(m.id, read_manifest(saved_).id);
    EXPECT_EQ(m.tensors.contains("l.fc1.weight"), form == kPacked);
    EXPECT_EQ(m.tensors.contains("l.fc1.weight10"), form == kIndexed);
    for (const Cut cut : {Cut::kRows, Cut::kColumns, Cut::kFlat, Cut::kBlocks, Cut::kLast}) {
      for (const int ranks : {1, 2, 3}) {
        EXPECT_EQ(load_state(experts_state(), path, cut, ranks, 1), 0) << path << ", " << ranks;
      }
    }
    const std::string back =
        converted(path, path.substr(path.rfind('/') + 1) + "-back", kPacked, 0);
    EXPECT_EQ(files_of(back), files_of(plain));
    EXPECT_EQ(files_of(converted(back, back.substr(back.rfind('/') + 1) + "-again", form, s)),
              files_of(path));
  }
}

TEST_F(Convert, IsPlainAgainAndElseOfAVersionThatOldReadersRefuse) {
  EXPECT_EQ(read_file(saved_ + "/COMMIT").substr(0, 20), "moiety-checkpoint 1 ");
  const std::string indexed = converted(saved_, "i", kIndexed, 0);
  EXPECT_EQ(read_file(indexed + "/COMMIT").substr(0, 20), "moiety-checkpoint 2 ");
  EXPECT_EQ(read_file(converted(indexed, "p", kPacked, 0) + "/COMMIT").substr(0, 20),
            "moiety-checkpoint 1 ");
  // The manifest is made again from the rank file, experts' layout included.
  const std::string manifest = read_file(indexed + "/manifest.json");
  fs::remove(indexed + "/manifest.json");
  EXPECT_EQ(repair(indexed), Repair::kProved);
  EXPECT_EQ(read_file(indexed + "/manifest.json"), manifest);
  // A word of another version is no way around it.
  const std::string file = "manifest.json";
  EXPECT_NE(error_of([&] {
              std::string text = manifest;
              text.replace(text.find("\"version\":2"), 11, "\"version\":1");
              parse_manifest(text, file);
            }).find("version 1, by its experts 2"),
            std::string::npos);
}

TEST_F(Convert, APartOfTheExpertsIsRefused) {
  State state;
  for (const int e : {0, 1, 3, 10}) {
    state.push_back({"l.fc1.weight" + std::to_string(e), "weight", DType::kFloat32, {32, 5}});
  }
  const State packed{{"l.fc1.weight", "weight", DType::kFloat32, {12, 32, 5}}};
  RunState run = run_state(1, 1);
  run.experts = {kIndexed, 0, kModules};
  on_ranks(1, [&](int rank, comm::Bootstrap& bootstrap) {
    RankState part(state, Cut::kRows, rank, 1), whole(packed, Cut::kRows, rank, 1);
    part.fill(1);
    whole.fill(1);
    Saver saver(directory_ / "part", bootstrap);
    const std::string path = saver.save(part.view(), run, Stream()).path;
    const std::string error = kind_and_error_of([&] { load(path, whole.view(), {}, bootstrap); });
    EXPECT_EQ(error,
              "checkpoint: checkpoint: weight: l.fc1.weight<index> is there for 4 of 12 "
              "experts; missing are 2, 4, 5, 6, 7, 8, 9, 11");
    EXPECT_EQ(whole.differences(1), 0);
    EXPECT_NE(kind_and_error_of([&] { converted(path, "x", kPacked, 0); }).find("missing are 2"),
              std::string::npos);
  });
  EXPECT_EQ(names(), (std::vector<std::string>{"c", "part"}));
}

TEST_F(Convert, LeavesNothingWhenItIsStoppedOrRefused) {
  const std::vector<std::string> before = names();
  std::atomic<bool> stop = false;
  int64_t calls = 0;
  ConvertOptions options = to(kIndexed, 8);
  options.stop = &stop;
  options.progress = [&](uint64_t done, uint64_t all) {
    EXPECT_LE(done, all);
    stop = ++calls == 5;
  };
  EXPECT_NE(
      kind_and_error_of([&] { convert(saved_, directory_ / "x", options); }).find("interrupted"),
      std::string::npos);
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(names(), before);
  EXPECT_EQ(
      kind_and_error_of([&] { converted(saved_, "x", kIndexed, 32); }),
      "usage: convert: l.fc1.weight: interleave 32 must be 0, or a multiple of 8 that divides "
      "the 16 rows of a half");
  EXPECT_NE(
      kind_and_error_of([&] { converted(saved_, "c", kIndexed, 8); }).find("is there already"),
      std::string::npos);
  EXPECT_EQ(kind_and_error_of([&] { converted(saved_, "no/x", kIndexed, 8); }).substr(0, 3), "io:");
  const std::string file = saved_ + "/" + rank_file_name(1, 3), bytes = read_file(file);
  write_file(file, bytes.substr(0, bytes.size() - 1) + char(bytes.back() ^ 1));
  EXPECT_NE(kind_and_error_of([&] { converted(saved_, "x", kIndexed, 8); }).find("crc32c"),
            std::string::npos);
  EXPECT_EQ(names(), before);
}

TEST_F(Convert, AFailureOfAnyCallLeavesAllOrNothing) {
  const State state{{"two.fc1.weight", "weight", DType::kFloat32, {2, 16, 3}},
                    {"norm", "weight", DType::kFloat32, {5}}};
  const std::string saved = save_state(state, directory_ / "s", Cut::kRows, 1, 5, 1).path;
  const std::vector<std::string> before = names();
  FaultyFiles none(Fault::kFail, -1);
  ConvertOptions options = to(kIndexed, 8);
  options.modules = {{"two.fc1", 2, true}};
  options.piece_bytes = 1 << 20;
  convert(saved, directory_ / "x", options, none);
  const auto good = files_of(directory_ / "x");
  ASSERT_GT(none.calls(), 30);
  for (int n = 0; n < none.calls(); ++n) {
    fs::remove_all(directory_ / "x");
    FaultyFiles files(Fault::kFail, n);
    const std::string error = error_of([&] { convert(saved, directory_ / "x", options, files); });
    if (fs::exists(directory_ / "x")) {
      EXPECT_EQ(files_of(directory_ / "x"), good) << "call " << n;
    } else {
      EXPECT_NE(error, kNoError) << "call " << n;
      EXPECT_EQ(names(), before) << "call " << n << ": " << error;
    }
  }
}

}  // namespace
}  // namespace moiety::checkpoint
