// train.freeze through the program: what is frozen keeps its bits under every layout and recipe, the
// rest trains, and checkpoints go on, are refused and are read like others.
#include <cmath>
#include <filesystem>

#include "moiety/checkpoint/key_remap.h"
#include "moiety/train/memory_estimate.h"
#include "tests/apps/train_rank.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

const std::string kFreeze = "--train.freeze=[\"embed*\", \"layers.0.*\", \"*.router.*\"]";
bool is_frozen(const std::string& tensor) {
  return tensor.starts_with("embed") || tensor.starts_with("layers.0.") ||
         tensor.find(".router.") != std::string::npos;
}

// Layers of experts with all that they may have, and a dense one.
Arguments run_of(const std::string& directory, int ranks = 1, const Arguments& more = {}) {
  return tiny(directory, ranks) +
         Arguments{"--model.layers=3",       "--model.dense_layers=[1]", "--model.d_ffn_dense=32",
                   "--moe.shared_d_ffn=32",  "--moe.shared_gate",        "--moe.expert_bias",
                   "--model.kv_heads=4",     "--checkpoint.interval=2",  "--checkpoint.keep_last=9",
                   "--router.bias_rate=0.01"} +
         more;
}

checkpoint::Manifest manifest_of(const std::string& directory, int64_t step) {
  return checkpoint::read_manifest(checkpoint_path(directory, step));
}

// The digests of a checkpoint's weights by name, of the frozen ones or of the others.
std::map<std::string, uint64_t> weights_of(const std::string& directory, int64_t step,
                                           bool frozen) {
  std::map<std::string, uint64_t> digests;
  for (const auto& [name, tensor] : manifest_of(directory, step).tensors) {
    if (is_frozen(name) == frozen) digests[name] = tensor.slots.at("weight").digest;
  }
  return digests;
}

class Freeze : public testing::Test {
 protected:
  Freeze() : directory_(fs::path(testing::TempDir()) / "freeze") {
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }
  ~Freeze() override { fs::remove_all(directory_); }
  std::string path(const std::string& name) const { return (directory_ / name).string(); }

 private:
  fs::path directory_;
};

TEST_F(Freeze, KeepsBitsUnderEveryLayout) {
  train(run_of(path("one"), 1, {kFreeze}));
  EXPECT_NE(read_all(path("one") + "/log.txt")
                .find("train.freeze: 28656 of 64336 parameters stay as they are"),
            std::string::npos)
      << read_all(path("one") + "/log.txt");
  const auto frozen = weights_of(path("one"), 2, true);
  EXPECT_EQ(frozen.size(), 1u + 17 + 2);  // the embedding, layer 0, the router of layer 2
  EXPECT_EQ(weights_of(path("one"), 6, true), frozen);
  const auto first = weights_of(path("one"), 2, false), last = weights_of(path("one"), 6, false);
  for (const auto& [name, digest] : first) {
    EXPECT_NE(last.at(name), digest) << name;
    EXPECT_EQ(manifest_of(path("one"), 6).tensors.at(name).slots.size(), 3u) << name;
  }
  for (const auto& [name, digest] : frozen) {
    EXPECT_EQ(manifest_of(path("one"), 6).tensors.at(name).slots.size(), 1u) << name;
  }
  struct Layout {
    const char* name;
    int ranks, tp, gtp, ep, egtp;
  };
  for (const Layout& l : {Layout{"dp2", 2, 1, 1, 1, 1}, Layout{"ep2", 2, 1, 1, 2, 1},
                          Layout{"tp2", 2, 2, 1, 1, 1}, Layout{"gtp2", 2, 1, 2, 1, 1},
                          Layout{"egtp2", 2, 1, 1, 1, 2}, Layout{"tp2gtp2", 4, 2, 2, 2, 2},
                          Layout{"dp2gtp2ep2egtp2", 4, 1, 2, 2, 2}, Layout{"dp4", 4, 1, 1, 4, 1}}) {
    SCOPED_TRACE(l.name);
    train(run_of(path(l.name), l.ranks,
                 {kFreeze, text("--parallel.tp={}", l.tp), text("--parallel.gtp={}", l.gtp),
                  text("--parallel.ep={}", l.ep), text("--parallel.egtp={}", l.egtp),
                  text("--train.micro_batch={}", 8 / l.ranks * l.tp)}));
    EXPECT_EQ(weights_of(path(l.name), 2, true), frozen);
    EXPECT_EQ(weights_of(path(l.name), 6, true), frozen);
    expect_near(path(l.name), path("one"), 1e-4);
  }
}

// Options that change no bit change none, and lists of other kinds train under tp and gtp.
TEST_F(Freeze, KeepsBitsUnderEveryOption) {
  for (const std::string list :
       {"[\"embed*\", \"layers.0.*\", \"*.router.*\"]", "[\"*.experts.fc1.*\", \"embed*\"]",
        "[\"*.experts.fc2.weight\"]", "[\"*.experts.*\", \"head*\"]"}) {
    const std::string freeze = "--train.freeze=" + list;
    // Two micro-batches a step, which may take turns.
    const Arguments ep2{freeze, "--parallel.ep=2", "--precision.recipe=bf16",
                        "--train.micro_batch=2"};
    train(run_of(path("plain"), 2, ep2));
    const auto expected = steps(path("plain"));
    for (const Arguments& more : std::initializer_list<Arguments>{
             {"--ep.zero_copy=auto"},
             {"--moe.delay_wgrad", "--ep.zero_copy=auto", "--moe.combine=token"},
             {"--moe.delay_wgrad", "--memory.recompute=moe"},
             {"--ep.overlap=wgrad"},
             {"--ep.overlap=micro_batch"},
             {"--ep.overlap=shared", "--memory.recompute=full"},
             {"--moe.expert_weights=indexed", "--ep.depth=3"}}) {
      SCOPED_TRACE(list + more[0]);
      fs::remove_all(path("other"));
      train(run_of(path("other"), 2, ep2 + more));
      if (more.back() == "--moe.combine=token") continue;  // another sum, with room of its own
      for (const auto& [step, r] : steps(path("other"))) {
        EXPECT_EQ(r["loss"], expected.at(step)["loss"]);
        EXPECT_EQ(r["gnorm"], expected.at(step)["gnorm"]);
      }
    }
    fs::remove_all(path("plain"));
    train(run_of(path("one"), 1, {freeze}));
    for (const int gtp : {1, 2}) {
      const std::string many = path(text("many{}", gtp));
      train(run_of(many, 2 * gtp,
                   {freeze, "--parallel.tp=2", text("--parallel.gtp={}", gtp),
                    text("--parallel.egtp={}", gtp), text("--train.micro_batch={}", 8 / gtp)}));
      expect_near(many, path("one"), 1e-4);
      fs::remove_all(many);
    }
    fs::remove_all(path("one"));
  }
}

// The squares of the norms of a gradient's parts add up to that of the whole.
TEST_F(Freeze, TheNormCountsTheRest) {
  const Arguments one_step{"--train.steps=1"};
  const auto norm = [&](const std::string& name) {
    return steps(path(name)).at(1)["gnorm"].get<double>();
  };
  train(run_of(path("none"), 1, one_step));
  train(run_of(path("layers"), 1, one_step + Arguments{"--train.freeze=[\"layers.*\"]"}));
  train(run_of(path("rest"), 1,
               one_step + Arguments{"--train.freeze=[\"embed*\", \"final_norm*\", \"head*\"]"}));
  EXPECT_NEAR(std::hypot(norm("layers"), norm("rest")), norm("none"), 1e-5 * norm("none"));
  EXPECT_LT(norm("layers"), norm("none"));
  EXPECT_LT(norm("rest"), norm("none"));
}

TEST_F(Freeze, RecipesAndTheirSwitchKeepWhatTheMastersWere) {
  const Arguments sizes{"--model.d_model=128", "--model.heads=4", "--moe.d_ffn=128",
                        "--model.d_ffn_dense=128", "--moe.shared_d_ffn=128"};
  std::map<std::string, uint64_t> frozen;
  for (const char* recipe : {"bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"}) {
    for (const int ranks : {1, 2}) {
      SCOPED_TRACE(text("{} {}", recipe, ranks));
      const std::string run = path(text("{}{}", recipe, ranks));
      train(run_of(
          run, ranks,
          sizes + Arguments{kFreeze, text("--precision.recipe={}", recipe),
                            text("--parallel.gtp={}", ranks), text("--parallel.egtp={}", ranks),
                            "--precision.switch_step=5", "--precision.switch_recipe=bf16",
                            "--precision.keep_first=0", "--precision.keep_last=0"}));
      if (frozen.empty()) frozen = weights_of(run, 2, true);
      EXPECT_EQ(weights_of(run, 2, true), frozen);
      EXPECT_EQ(weights_of(run, 6, true), frozen);
    }
  }
}

TEST_F(Freeze, ResumesBitwiseAndUnderAnotherLayout) {
  for (const char* recipe : {"fp32", "fp8_block"}) {
    const Arguments more{kFreeze,
                         text("--precision.recipe={}", recipe),
                         "--model.d_model=128",
                         "--moe.d_ffn=128",
                         "--model.d_ffn_dense=128",
                         "--moe.shared_d_ffn=128"};
    const std::string whole = path(text("whole-{}", recipe)), cut = path(text("cut-{}", recipe));
    train(run_of(whole, 2, more));
    train(run_of(cut, 2, more + Arguments{"--train.steps=4", "--optim.decay_steps=3"}));
    fs::remove_all(checkpoint_path(cut, 4));
    train(run_of(cut, 2, more));
    EXPECT_EQ(weights_of(cut, 6, true), weights_of(whole, 6, true));
    EXPECT_EQ(steps(cut).size(), 6u);
  }
  const Arguments more{kFreeze};
  train(run_of(path("a"), 1, more));
  fs::create_directories(path("b/checkpoints"));
  fs::copy(checkpoint_path(path("a"), 4), checkpoint_path(path("b"), 4));
  train(run_of(path("b"), 1, more));
  EXPECT_EQ(weights_of(path("b"), 6, false), weights_of(path("a"), 6, false));
  EXPECT_EQ(steps(path("b")).at(6)["loss"], steps(path("a")).at(6)["loss"]);
  fs::create_directories(path("c/checkpoints"));
  fs::copy(checkpoint_path(path("a"), 4), checkpoint_path(path("c"), 4));
  train(run_of(path("c"), 2, more + Arguments{"--parallel.gtp=2", "--parallel.ep=2"}));
  EXPECT_EQ(weights_of(path("c"), 6, true), weights_of(path("a"), 6, true));
  expect_near(path("c"), path("a"), 1e-4);
}

TEST_F(Freeze, AnotherListIsAnotherRun) {
  train(run_of(path("a"), 1, {kFreeze}));
  for (const Arguments& other : std::initializer_list<Arguments>{
           {}, {"--train.freeze=[\"embed*\"]"}, {"--train.freeze=[\"layers.0.*\", \"embed*\"]"}}) {
    const ProgramResult refused = run(run_of(path("a"), 1, other + Arguments{"--train.steps=8"}));
    EXPECT_EQ(refused.code, kExitCheckpoint) << refused.err;
    EXPECT_NE(refused.last_line().find("train.freeze was [\"embed*\", \"layers.0.*\""),
              std::string::npos)
        << refused.last_line();
  }
  // Weights alone go anywhere; those that were frozen are trained from what they were.
  const std::string from = "--run.init_from=" + checkpoint_path(path("a"), 6);
  train(run_of(path("b"), 1, {from}));
  train(run_of(path("c"), 1, {from, "--train.freeze=[\"head*\"]"}));
  EXPECT_EQ(manifest_of(path("c"), 6).tensors.at("head.weight").slots.at("weight").digest,
            manifest_of(path("a"), 6).tensors.at("head.weight").slots.at("weight").digest);
  EXPECT_NE(weights_of(path("c"), 6, true), weights_of(path("a"), 6, true));
}

TEST_F(Freeze, CheckpointsAreReadLikeOthers) {
  write_tokens(path("t.tok"), {ramp(400)});
  train(run_of(path("a"), 1, {kFreeze, "--precision.recipe=bf16"}));
  const std::string saved = checkpoint_path(path("a"), 6);
  const ProgramResult eval = run({"eval", saved, "--data", path("t.tok"), "--json"});
  ASSERT_EQ(eval.code, kExitDone) << eval.err;
  const ProgramResult text = run({"generate", saved, "--prompt", "ab", "--tokens", "4"});
  EXPECT_EQ(text.code, kExitDone) << text.err;
  EXPECT_EQ(run({"verify", path("a")}).code, kExitDone);
  EXPECT_EQ(run({"info", saved, "--tensors"}).code, kExitDone);
  fs::create_directories(path("converted/checkpoints"));
  const ProgramResult converted = run({"convert", saved, "--expert-weights", "indexed", "--out",
                                       path("converted/checkpoints/step-00000006")});
  ASSERT_EQ(converted.code, kExitDone) << converted.err;
  const ProgramResult again =
      run({"eval", path("converted/checkpoints/step-00000006"), "--data", path("t.tok"), "--json"});
  ASSERT_EQ(again.code, kExitDone) << again.err;
  EXPECT_EQ(nlohmann::json::parse(again.out)["loss"], nlohmann::json::parse(eval.out)["loss"]);
  train(run_of(path("a"), 1,
               {kFreeze, "--precision.recipe=bf16", "--train.steps=8",
                "--run.resume=" + path("converted/checkpoints/step-00000006")}));
  EXPECT_EQ(weights_of(path("a"), 8, true), weights_of(path("a"), 6, true));
}

TEST_F(Freeze, AGlobThatMatchesNothingIsNamed) {
  for (const auto& [list, why] :
       {std::pair("[\"embed*\", \"layers.9.*\"]", "train.freeze: \"layers.9.*\" matches no tensor"),
        std::pair("[\"*.attn.v.*\"]",
                  "layers.0.attn.v.weight is frozen and "
                  "layers.0.attn.q.weight is not"),
        std::pair("[\"*\"]", "train.freeze: all parameters are frozen")}) {
    const ProgramResult refused =
        run(run_of(path("a"), 1, {text("--train.freeze={}", list), "--dry-run"}));
    EXPECT_EQ(refused.code, kExitUsage) << refused.err;
    EXPECT_NE(refused.last_line().find(why), std::string::npos) << refused.last_line();
  }
}

}  // namespace
}  // namespace moiety::app
