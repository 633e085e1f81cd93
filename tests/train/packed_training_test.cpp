// Training on conversations, packed: layouts agree, a run that goes on has the same bits, and what
// has no target anywhere is no NaN.
#include <cmath>
#include <filesystem>
#include <map>
#include <random>

#include "moiety/base/parallel.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/comm/thread_group.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/train.h"
#include "tests/data/data_helpers.h"
#include "tests/train/tiny_config.h"

namespace moiety::train {
namespace {

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

class Recorder final : public Observer {
 public:
  void step(const StepRecord& r, const StepWork&) override { records.push_back(r); }
  void event(std::string_view name, int64_t, const JsonLine& fields) override {
    if (name == "skip") skips.push_back(fields.text());
  }
  void evaluated(int64_t, const EvaluationResult& result, double) override { loss = result; }
  std::vector<StepRecord> records;
  std::vector<std::string> skips;
  EvaluationResult loss;
};

// Gradient descent of rate 1, which hides no scale.
TrainConfig descent(const std::string& directory) {
  TrainConfig c = tiny_config(directory);
  c.model.kv_heads = 4;
  c.model.shared_d_ffn = 16;
  c.model.router.z_coef = 1e-3f;
  c.model.aux_scope = model::AuxScope::kGlobal;
  c.data.pack = data::Pack::kDocuments;
  c.train = {.steps = 6,
             .tokens = 0,
             .micro_batch = 8,
             .global_batch = 8,
             .grad_clip = 0,
             .cuda_graph = {}};
  c.optim = {.lr = 1e4,
             .min_lr = 1e4,
             .warmup_steps = 0,
             .schedule = optim::ScheduleKind::kConstant,
             .beta1 = 0,
             .beta2 = 0,
             .eps = 1e4,
             .weight_decay = 0};
  c.precision.recipe = Recipe::kFp32;
  c.checkpoint.interval = 0;
  return c;
}

Recorder run(const TrainConfig& config, const std::string& path, bool evaluates = false) {
  const auto open = [&] {
    return data::open_token_files(std::vector<data::WeightedPath>{{path}}, config.data.seq_len, 264,
                                  data::Tokenizer::load("bytes").identity(), config.data.pack);
  };
  Recorder heard;
  TrainingPlan plan = make_plan(config);
  plan.train = open();
  if (evaluates) plan.valid = open();
  plan.resume_from = resume_candidates(config);
  plan.observer = &heard;
  comm::run_thread_ranks(int(config.run.ranks), {}, [&](comm::Communicator& world) {
    set_thread_budget(1);
    train(plan, world);
  });
  return heard;
}

TEST(PackedTraining, LayoutsAgree) {
  const TemporaryDirectory dir;
  const std::string path = write_conversations(dir / "a.tok", 300);
  const std::vector<StepRecord> one = run(descent(dir / "one"), path).records;
  ASSERT_EQ(one.size(), 6u);
  EXPECT_LT(one.back().loss, one.front().loss);
  for (const StepRecord& r : one) {
    EXPECT_GT(r.fill.value(), 0.8);
    EXPECT_LE(r.fill.value(), 1.0);
    EXPECT_NE(step_json(r, 0).find("\"fill\":"), std::string::npos);
  }
  struct Layout {
    int64_t ranks, micro_batch, tp, gtp, ep;
  };
  for (const Layout& l : {Layout{2, 4, 1, 1, 1}, Layout{2, 2, 1, 1, 1}, Layout{2, 8, 2, 1, 1},
                          Layout{4, 2, 1, 2, 2}, Layout{4, 4, 2, 1, 4}}) {
    SCOPED_TRACE(text("ranks {} micro_batch {} tp {} gtp {} ep {}", l.ranks, l.micro_batch, l.tp,
                      l.gtp, l.ep));
    const std::string folder = dir / "many";
    std::filesystem::remove_all(folder);
    TrainConfig c = descent(folder);
    c.run.ranks = l.ranks;
    c.train.micro_batch = l.micro_batch;
    c.parallel.tp = l.tp;
    c.parallel.gtp = l.gtp;
    c.parallel.ep = l.ep;
    const std::vector<StepRecord> many = run(c, path).records;
    ASSERT_EQ(many.size(), one.size());
    // Micro-batches that are accumulated have balance losses of their own.
    const bool is_whole = l.micro_batch * l.ranks / l.tp == 8;
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_EQ(many[i].fill, one[i].fill);
      EXPECT_NEAR(many[i].loss, one[i].loss, (is_whole ? 1e-4 : 1e-2) * one[i].loss);
      if (is_whole) {
        EXPECT_NEAR(many[i].aux, one[i].aux, 1e-4 * one[i].aux);
        EXPECT_NEAR(many[i].z, one[i].z, 1e-4 * one[i].z);
        EXPECT_NEAR(many[i].grad_norm, one[i].grad_norm, 1e-4 * one[i].grad_norm);
      }
    }
    EXPECT_EQ(many[0].balance, one[0].balance);
  }
}

std::map<std::string, uint64_t> digests(const TrainConfig& config, int64_t step) {
  std::map<std::string, uint64_t> all;
  const std::string path = config.checkpoints() + text("/step-{:08}", step);
  for (const auto& [name, tensor] : checkpoint::read_manifest(path).tensors) {
    for (const auto& [slot, entry] : tensor.slots) all[slot + "/" + name] = entry.digest;
  }
  return all;
}

TEST(PackedTraining, ResumeIsBitwise) {
  const TemporaryDirectory dir;
  const std::string path = write_conversations(dir / "a.tok", 60);
  TrainConfig whole = descent(dir / "whole"), part = descent(dir / "part");
  whole.checkpoint = part.checkpoint = {.interval = 2, .keep_last = 9};
  run(whole, path);
  part.train.steps = 2;
  run(part, path);
  part.train.steps = 6;
  EXPECT_EQ(run(part, path).records.size(), 4u);
  EXPECT_EQ(digests(part, 6), digests(whole, 6));
}

// In a stream too only targets have a loss, and validation counts them alone.
TEST(PackedTraining, StreamsAndValidation) {
  const TemporaryDirectory dir;
  const std::string path = write_conversations(dir / "a.tok", 100);
  const auto targets = int64_t(data::TokenFile::open(path)->target_count());
  for (const data::Pack pack : {data::Pack::kStream, data::Pack::kDocuments}) {
    TrainConfig c = descent(dir / (pack == data::Pack::kStream ? "stream" : "documents"));
    c.data.pack = pack;
    c.train.steps = 1;
    c.eval = {.every = 0, .samples = 1000};
    const Recorder heard = run(c, path, true);
    EXPECT_EQ(heard.records[0].fill.has_value(), pack == data::Pack::kDocuments);
    // But for what the last sample of the stream lacks.
    EXPECT_LE(heard.loss.tokens, targets);
    EXPECT_GE(heard.loss.tokens, targets - 16);
    EXPECT_GT(heard.loss.loss, 1);
    EXPECT_LT(heard.loss.loss, 7);
    EXPECT_TRUE(std::isfinite(heard.loss.bits_per_byte));
  }
}

// The loss of masked targets, counted by hand: a target's loss is by how much it lengthens the loss
// of the document up to it. A mask that is shifted by one has other sums.
TEST(PackedTraining, MaskedLossIsThatOfItsTargets) {
  const TemporaryDirectory dir;
  const std::vector<uint32_t> ids{7, 31, 150, 8, 8, 99, 199, 3, 64, 20, 5, 112};
  const auto sum_of = [&](const std::string& name, size_t length,
                          const std::vector<uint8_t>& targets) {
    const std::vector<uint32_t> document(ids.begin(), ids.begin() + ptrdiff_t(length));
    const std::string path = data::write_masked(dir / (name + ".tok"), {{document, targets}});
    TrainConfig c = descent(dir / name);
    c.optim.lr = c.optim.min_lr = 0;
    c.train.steps = 1;
    c.train.micro_batch = c.train.global_batch = 1;
    c.eval = {.every = 0, .samples = 1};
    const Recorder heard = run(c, path, true);
    // Training and validation compute one loss.
    EXPECT_NEAR(heard.records.at(0).loss, heard.loss.loss, 1e-6 * heard.loss.loss);
    return heard.loss.loss * double(heard.loss.tokens);
  };
  std::vector<double> sums{0, 0};  // of the first n tokens
  for (size_t n = 2; n <= ids.size(); ++n) {
    sums.push_back(sum_of(text("first{}", n), n, std::vector<uint8_t>(n, 1)));
  }
  const std::vector<std::vector<uint8_t>> masks{{0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0},
                                                {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1},
                                                {0, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0}};
  for (size_t m = 0; m < masks.size(); ++m) {
    double expected = 0;
    for (size_t i = 0; i < ids.size(); ++i) expected += masks[m][i] ? sums[i + 1] - sums[i] : 0;
    EXPECT_NEAR(sum_of(text("mask{}", m), ids.size(), masks[m]), expected, 2e-5 * expected);
  }
}

TEST(PackedTraining, NoTargetAtAll) {
  const TemporaryDirectory dir;
  const std::string path = write_conversations(dir / "a.tok", 100, false);
  const TrainConfig c = descent(dir / "run");
  TrainConfig none = descent(dir / "none");
  none.train.steps = 1;
  const Recorder heard = run(c, path);
  EXPECT_EQ(heard.records.size(), 6u);
  ASSERT_EQ(heard.skips.size(), 6u);
  EXPECT_NE(heard.skips[0].find("no valid target"), std::string::npos);
  run(none, path);
  EXPECT_EQ(digests(c, 6), digests(none, 1));
}

}  // namespace
}  // namespace moiety::train
