// Training on conversations, packed: layouts agree, a resume goes on in the same bits, and what has
// no target anywhere is no NaN.
#include <cmath>
#include <filesystem>
#include <random>

#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

// Conversations of 3 to 20 tokens, of which the second halves are targets; or none is.
std::string write_conversations(const std::string& path, int count, bool any = true) {
  std::mt19937 random(3);
  std::vector<std::pair<std::vector<uint32_t>, std::vector<uint8_t>>> documents;
  for (int d = 0; d < count; ++d) {
    auto& [ids, targets] = documents.emplace_back();
    const size_t length = 3 + random() % 18;
    uint32_t id = uint32_t(random()) % 200;
    for (size_t i = 0; i < length; ++i) {
      ids.push_back(id = (id * 5 + uint32_t(random()) % 2) % 200);
      targets.push_back(any && i >= length / 2);
    }
  }
  return data::write_masked(path, documents);
}

Arguments packed(const std::string& directory, const std::string& data, const Arguments& more,
                 int ranks = 1, int ep = 1) {
  return tiny(directory, ranks, ep) +
         Arguments{"--data.synthetic=none", "--data.train=['" + data + "']",
                   "--data.pack=documents", "--checkpoint.interval=0",
                   "--router.z_coef=0.001", "--model.kv_heads=4",
                   "--moe.shared_d_ffn=16"} +
         more;
}

TEST(PackedTraining, LayoutsAgree) {
  const TemporaryDirectory dir;
  const std::string data = write_conversations(dir / "a.tok", 300);
  train(packed(dir / "one", data, kDescent));
  const auto of_one = steps(dir / "one");
  ASSERT_EQ(of_one.size(), 6u);
  for (const auto& [step, record] : of_one) {
    EXPECT_GT(record["fill"].get<double>(), 0.8);
    EXPECT_LE(record["fill"].get<double>(), 1.0);
  }
  struct Layout {
    int ranks, ep, micro_batch;
    Arguments more;
    bool is_whole = true;  // micro-batches that are accumulated have balance losses of their own
  };
  const Layout layouts[] = {{2, 1, 4, {}},
                            {2, 1, 2, {}, false},
                            {2, 1, 8, {"--parallel.tp=2"}},
                            {4, 2, 2, {"--parallel.gtp=2"}},
                            {4, 4, 4, {"--parallel.tp=2"}}};
  for (const Layout& layout : layouts) {
    const std::string run = dir / "many";
    fs::remove_all(run);
    train(packed(
        run, data,
        kDescent + layout.more + Arguments{text("--train.micro_batch={}", layout.micro_batch)},
        layout.ranks, layout.ep));
    const bool is_whole = layout.is_whole;
    for (const auto& [step, record] : steps(run)) {
      const auto& expected = of_one.at(step);
      EXPECT_EQ(record["fill"], expected["fill"]);
      const double loss = expected["loss"].get<double>();
      EXPECT_NEAR(record["loss"].get<double>(), loss, (is_whole ? 1e-4 : 1e-2) * loss);
      if (step == 1) {
        EXPECT_EQ(record["bal"], expected["bal"]);
      }
    }
    if (is_whole) expect_near(run, dir / "one", 1e-4);
  }
}

TEST(PackedTraining, ResumeIsBitwise) {
  const TemporaryDirectory dir;
  const std::string data = write_conversations(dir / "a.tok", 60);
  const Arguments keep{"--checkpoint.interval=2", "--checkpoint.keep_last=9"};
  train(packed(dir / "whole", data, keep));
  fs::create_directories(dir / "run/checkpoints");
  fs::copy(checkpoint_path(dir / "whole", 2), checkpoint_path(dir / "run", 2));
  train(packed(dir / "run", data, keep));
  EXPECT_EQ(digests(checkpoint_path(dir / "run", 6)), digests(checkpoint_path(dir / "whole", 6)));
  const ProgramResult other =
      run(packed(dir / "run", data, keep + Arguments{"--data.pack=stream"}));
  EXPECT_EQ(other.code, kExitCheckpoint);
  EXPECT_NE(other.err.find("data.pack"), std::string::npos) << other.err;
}

// In a stream too only targets have a loss; validation counts them alone.
TEST(PackedTraining, StreamsAndValidation) {
  const TemporaryDirectory dir;
  const std::string data = write_conversations(dir / "a.tok", 100);
  for (const std::string pack : {"stream", "documents"}) {
    train(packed(dir / pack, data,
                 {"--data.pack=" + pack, "--data.valid=['" + data + "']", "--eval.every=6",
                  "--eval.samples=1000"}));
    EXPECT_EQ(steps(dir / pack).at(1).contains("fill"), pack == "documents");
    const nlohmann::json eval = events(dir / pack, "eval").at(0);
    const auto file = data::TokenFile::open(data);
    // But for the first token and what the last sample lacks, or the first tokens of documents.
    EXPECT_LE(eval["tokens"].get<uint64_t>(), file->target_count());
    EXPECT_GE(eval["tokens"].get<uint64_t>(), file->target_count() - 16);
    EXPECT_TRUE(std::isfinite(eval["loss"].get<double>()));
    EXPECT_TRUE(eval["bits_per_byte"].is_number());
  }
}

TEST(PackedTraining, NoTargetAtAll) {
  const TemporaryDirectory dir;
  const std::string data = write_conversations(dir / "a.tok", 100, false);
  const ProgramResult result = run(packed(dir / "run", data, {"--checkpoint.interval=6"}));
  EXPECT_EQ(result.code, kExitDone) << result.err;
  EXPECT_EQ(events(dir / "run", "skip").size(), 6u);
  EXPECT_EQ(events(dir / "run", "skip")[0]["why"], "no valid target");
}

}  // namespace
}  // namespace moiety::app
