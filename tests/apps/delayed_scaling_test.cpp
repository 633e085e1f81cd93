// Training with precision.scaling = delayed, through the program itself: its histories in
// checkpoints, under other layouts, and beside everything that makes a step again or undoes it.
#include <filesystem>

#include "apps/moiety/exit_code.h"
#include "moiety/train/amax_histories.h"
#include "tests/apps/train_rank.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

const Arguments kFp8{"--precision.recipe=fp8_tensor"};
const Arguments kDelayed =
    kFp8 + Arguments{"--precision.scaling=delayed", "--precision.amax_history=4"};
const Arguments kEveryStep{"--checkpoint.interval=1", "--checkpoint.keep_last=20"};

std::map<std::string, uint64_t> histories(const std::string& checkpoint) {
  std::map<std::string, uint64_t> out;
  for (const auto& [name, digest] : digests(checkpoint)) {
    if (name.starts_with("amax_history/")) out[name] = digest;
  }
  return out;
}

// The steps of a run of these arguments, from the checkpoint of a step of another run, if it is
// given.
std::map<int64_t, nlohmann::json> steps_of(const Arguments& arguments, const std::string& from = "",
                                           int64_t step = 0) {
  const std::string directory = arguments[1].substr(6);
  if (!from.empty()) {
    fs::create_directories(directory + "/checkpoints");
    fs::copy(checkpoint_path(from, step), checkpoint_path(directory, step));
  }
  const ProgramResult result = run(arguments);
  EXPECT_EQ(result.code, kExitDone) << result.err;
  return steps(directory);
}

void expect_same(const std::map<int64_t, nlohmann::json>& some,
                 const std::map<int64_t, nlohmann::json>& all) {
  ASSERT_FALSE(some.empty());
  for (const auto& [step, r] : some) {
    for (const char* field : {"loss", "aux", "gnorm"}) {
      EXPECT_EQ(r[field], all.at(step)[field]) << field << " of step " << step;
    }
  }
}

TEST(DelayedScaling, TrainsAsCurrentScalingDoes) {
  const TemporaryDirectory dir;
  const Arguments longer{"--train.steps=100", "--checkpoint.interval=0"};
  const auto last = [&](const std::string& name, const Arguments& more) {
    const auto all = steps_of(tiny(dir / name, 2, 2) + longer + more);
    double sum = 0;
    for (int64_t s = 91; s <= 100; ++s) sum += all.at(s)["loss"].get<double>();
    return sum / 10;
  };
  const double bf16 = last("bf16", {"--precision.recipe=bf16"});
  const double current = last("current", kFp8), delayed = last("delayed", kDelayed);
  EXPECT_NE(delayed, current);
  EXPECT_NEAR(delayed, bf16, 0.02 * bf16);
  EXPECT_NEAR(last("newest", kDelayed + Arguments{"--precision.amax_history=1"}), bf16,
              0.02 * bf16);
}

TEST(DelayedScaling, LayoutsDifferLittle) {
  const TemporaryDirectory dir;
  const auto expected = steps_of(tiny(dir / "one") + kDelayed);
  const std::vector<std::tuple<std::string, int, int, Arguments>> layouts{
      {"accumulated", 1, 1, {"--train.micro_batch=2"}},
      {"dp2", 2, 1, {}},
      {"ep2", 2, 2, {}},
      {"tp2", 2, 1, {"--parallel.tp=2", "--train.micro_batch=8", "--model.kv_heads=4"}},
      {"gtp2", 2, 1, {"--parallel.gtp=2", "--parallel.egtp=2"}},
      {"ep4", 4, 4, {}},
      {"tp2ep2", 4, 2, {"--parallel.tp=2", "--train.micro_batch=4", "--model.kv_heads=4"}}};
  const auto wide = steps_of(tiny(dir / "wide") + kDelayed + Arguments{"--model.kv_heads=4"});
  for (const auto& [name, ranks, ep, more] : layouts) {
    const bool has_tp = name.starts_with("tp");
    for (const auto& [step, r] : steps_of(tiny(dir / name, ranks, ep) + kDelayed + more)) {
      const double loss = (has_tp ? wide : expected).at(step)["loss"].get<double>();
      EXPECT_NEAR(r["loss"].get<double>(), loss, 0.005 * loss) << name << " step " << step;
    }
  }
}

// A resume goes on bitwise, with histories that are full and such that are not.
TEST(DelayedScaling, ResumesBitwise) {
  const TemporaryDirectory dir;
  const Arguments common =
      kDelayed + kEveryStep + Arguments{"--train.micro_batch=1", "--train.steps=8"};
  const std::string whole = dir / "whole";
  const auto all = steps_of(tiny(whole, 4, 2) + common);
  for (const int64_t stop : {0, 2, 6}) {
    const std::string again = dir / text("{}", stop);
    const auto rest = steps_of(tiny(again, 4, 2) + common, stop ? whole : std::string(), stop);
    EXPECT_EQ(rest.begin()->first, stop + 1);
    expect_same(rest, all);
    EXPECT_EQ(digests(checkpoint_path(again, 8)), digests(checkpoint_path(whole, 8)));
  }
  // Two layers of attention's qkv and o, and of experts' fc1 and fc2; x and dy.
  EXPECT_EQ(histories(checkpoint_path(whole, 8)).size(), 16u);
  const auto manifest = checkpoint::read_manifest(checkpoint_path(whole, 8));
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(manifest.tensors.at("layers.1.moe.experts.fc1.amax_dy").shape, (Shape{4, 4}));
  EXPECT_EQ(manifest.tensors.at("layers.0.attn.qkv.amax_x").shape, (Shape{1, 4}));
}

// Under another layout the histories are the same bits, and so are those that it saves.
TEST(DelayedScaling, HistoriesMoveBetweenLayouts) {
  const TemporaryDirectory dir;
  const Arguments common = kDelayed + kEveryStep + Arguments{"--model.kv_heads=4"};
  const std::string from = dir / "from";
  const auto all = steps_of(tiny(from, 2, 2) + common);
  const auto expected = digests(checkpoint_path(from, 4));
  const std::vector<std::tuple<std::string, int, int, Arguments>> layouts{
      {"one", 1, 1, {}},
      {"tp2", 2, 1, {"--parallel.tp=2", "--train.micro_batch=8"}},
      {"gtp2", 2, 1, {"--parallel.gtp=2", "--parallel.egtp=2"}},
      {"ep4", 4, 4, {}},
      {"gtp2ep2", 4, 2, {"--parallel.gtp=2", "--parallel.egtp=2"}}};
  for (const auto& [name, ranks, ep, more] : layouts) {
    const std::string to = dir / (name + ".again");
    save_again(checkpoint_path(from, 4), tiny(to, ranks, ep) + common + more);
    EXPECT_EQ(digests(checkpoint_path(to, 4)), expected) << name;
    const auto rest = steps_of(tiny(dir / name, ranks, ep) + common + more, from, 4);
    EXPECT_EQ(rest.begin()->first, 5) << name;
    for (const auto& [step, r] : rest) {
      const double loss = all.at(step)["loss"].get<double>();
      EXPECT_NEAR(r["loss"].get<double>(), loss, 0.005 * loss) << name << " step " << step;
    }
  }
}

// What computes a value once more, or beside the step, leaves losses and histories as they are.
TEST(DelayedScaling, RecomputationAndEvaluationLeaveNoTrace) {
  const TemporaryDirectory dir;
  const std::string train = write_tokens(dir / "a.tok", {ramp(900)});
  const std::string valid = write_tokens(dir / "v.tok", {ramp(400, 5)});
  const Arguments common =
      kDelayed + Arguments{"--data.synthetic=none", "--data.train=" + train,
                           "--data.valid=[\"" + valid + "\"]", "--eval.samples=16"};
  const auto expected = steps_of(tiny(dir / "plain", 2, 2) + common);
  const auto digest = digests(checkpoint_path(dir / "plain", 6));
  for (const char* option : {"memory.recompute=moe", "memory.recompute=full", "eval.every=1",
                             "moe.delay_wgrad=true", "ep.overlap=shared", "guard.nan=tensor"}) {
    const std::string name = dir / option;
    expect_same(steps_of(tiny(name, 2, 2) + common + Arguments{text("--{}", option)}), expected);
    EXPECT_EQ(digests(checkpoint_path(name, 6)), digest) << option;
  }
  // `moiety eval` casts with the checkpoint's scales, as the run's validation did.
  steps_of(tiny(dir / "one") + common);
  const ProgramResult result = run({"eval", dir / "one", "--data", valid, "--samples=16"});
  ASSERT_EQ(result.code, kExitDone) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out)["loss"], events(dir / "one", "eval").back()["loss"]);
  ASSERT_EQ(run({"generate", dir / "one", "--prompt", "a", "--tokens", "4"}).code, kExitDone);
}

TEST(DelayedScaling, FrozenPartsHaveHistoriesOfTheirInputs) {
  const TemporaryDirectory dir;
  const Arguments common = kDelayed + kEveryStep +
                           Arguments{"--train.freeze=[\"embed*\", \"layers.0.*\", \"*.attn.*\"]"};
  const auto all = steps_of(tiny(dir / "whole", 2, 2) + common);
  expect_same(steps_of(tiny(dir / "rest", 2, 2) + common, dir / "whole", 3), all);
  EXPECT_EQ(digests(checkpoint_path(dir / "rest", 6)), digests(checkpoint_path(dir / "whole", 6)));
}

// A step that the experts had no room for is made again; one whose gradient is not finite never
// was.
TEST(DelayedScaling, StepsThatAreUndoneLeaveNoTrace) {
  const TemporaryDirectory dir;
  const Arguments common = kDelayed + kEveryStep;
  const Arguments skewed{"--router.aux=none", "--moe.experts=8", "--moe.top_k=1"};
  const ProgramResult again = run(tiny(dir / "again", 4, 4) + common + skewed);
  ASSERT_EQ(again.code, kExitDone) << again.err;
  const ProgramResult wide =
      run(tiny(dir / "wide", 4, 4) + common + skewed + Arguments{"--moe.capacity_factor=-1"});
  ASSERT_EQ(wide.code, kExitDone) << wide.err;
  EXPECT_NE(again.err.find("is made again"), std::string::npos) << again.err;
  EXPECT_EQ(wide.err.find("is made again"), std::string::npos);
  expect_same(steps(dir / "again"), steps(dir / "wide"));
  EXPECT_EQ(digests(checkpoint_path(dir / "again", 6)), digests(checkpoint_path(dir / "wide", 6)));

  // A rate that breaks the weights: the first step that follows is skipped, and so are all others.
  const ProgramResult broken = run(tiny(dir / "broken", 2, 2) + common +
                                   Arguments{"--optim.lr=1e38", "--optim.warmup_steps=0",
                                             "--train.steps=9", "--guard.max_skips=99"});
  const auto skips = events(dir / "broken", "skip");
  ASSERT_FALSE(skips.empty()) << broken.err;
  const int64_t first = skips[0]["step"].get<int64_t>();
  ASSERT_GT(first, 1);
  ASSERT_LT(first, 9);
  EXPECT_EQ(histories(checkpoint_path(dir / "broken", 9)),
            histories(checkpoint_path(dir / "broken", first - 1)));
}

// Scaling and the length of histories may change at a resume.
TEST(DelayedScaling, SettingsChangeAtAResume) {
  const TemporaryDirectory dir;
  const auto resume = [&](const std::string& name, const std::string& from, const Arguments& more) {
    fs::create_directories(dir / name + "/checkpoints");
    fs::copy(checkpoint_path(dir / from, 3), checkpoint_path(dir / name, 3));
    const ProgramResult result = run(tiny(dir / name) + kEveryStep + more);
    EXPECT_EQ(result.code, kExitDone) << result.err;
    EXPECT_EQ(steps(dir / name).begin()->first, 4) << name;
    return result.err;
  };
  steps_of(tiny(dir / "current") + kFp8 + kEveryStep);
  steps_of(tiny(dir / "delayed") + kDelayed + kEveryStep);
  EXPECT_NE(resume("begun", "current", kDelayed).find("the checkpoint has no histories"),
            std::string::npos);
  EXPECT_EQ(histories(checkpoint_path(dir / "begun", 6)).size(), 16u);
  EXPECT_NE(resume("ended", "delayed", kFp8).find("precision.scaling"), std::string::npos);
  EXPECT_EQ(histories(checkpoint_path(dir / "ended", 6)).size(), 0u);
  const std::string shorter =
      resume("shorter", "delayed", kDelayed + Arguments{"--precision.amax_history=2"});
  EXPECT_NE(shorter.find("precision.amax_history = 2: the newest of the checkpoint's 4 steps"),
            std::string::npos)
      << shorter;
  resume("longer", "delayed", kDelayed + Arguments{"--precision.amax_history=1024"});
  EXPECT_EQ(resume("same", "delayed", kDelayed).find("the newest of"), std::string::npos);
  // Nothing else of a checkpoint knows of them.
  ASSERT_EQ(run({"verify", dir / "delayed"}).code, kExitDone);
  const ProgramResult info = run({"info", checkpoint_path(dir / "delayed", 6), "--tensors"});
  EXPECT_NE(info.out.find("layers.0.attn.o.amax_x"), std::string::npos) << info.out;
  ASSERT_EQ(run({"convert", checkpoint_path(dir / "delayed", 3), "--expert-weights", "indexed",
                 "--out", dir / "indexed"})
                .code,
            kExitDone);
  const auto from_indexed = steps_of(tiny(dir / "from-indexed") + kDelayed +
                                     Arguments{"--run.resume=" + (dir / "indexed")});
  expect_same(from_indexed, steps(dir / "delayed"));
}

// Histories begin where the recipe does, and outlive it.
TEST(DelayedScaling, TheRecipeSwitches) {
  const TemporaryDirectory dir;
  const Arguments common =
      kEveryStep + Arguments{"--precision.scaling=delayed", "--precision.switch_step=4"};
  const Arguments in{"--precision.recipe=bf16", "--precision.switch_recipe=fp8_tensor"},
      out{"--precision.recipe=fp8_tensor", "--precision.switch_recipe=bf16"};
  for (const Arguments& way : {in, out}) {
    const std::string whole = dir / way[0].substr(19);
    const auto all = steps_of(tiny(whole, 2, 2) + common + way);
    const bool begins = way == in;
    EXPECT_EQ(histories(checkpoint_path(whole, 2)) == histories(checkpoint_path(whole, 3)), begins);
    EXPECT_EQ(histories(checkpoint_path(whole, 5)) == histories(checkpoint_path(whole, 6)),
              !begins);
    for (const int64_t stop : {2, 3, 4}) {
      const std::string rest = text("{}-{}", whole, stop);
      expect_same(steps_of(tiny(rest, 2, 2) + common + way, whole, stop), all);
      EXPECT_EQ(digests(checkpoint_path(rest, 6)), digests(checkpoint_path(whole, 6)));
    }
  }
}

TEST(DelayedScaling, OtherRecipesRefuseIt) {
  const TemporaryDirectory dir;
  for (const char* recipe : {"fp32", "bf16", "fp8_block", "mxfp8", "nvfp4"}) {
    const ProgramResult result =
        run(tiny(dir / "r") +
            Arguments{text("--precision.recipe={}", recipe), "--precision.scaling=delayed"});
    EXPECT_EQ(result.code, kExitUsage);
    EXPECT_NE(result.last_line().find(text("precision.scaling = \"delayed\": precision.recipe is "
                                           "\"{}\"; only recipe fp8_tensor",
                                           recipe)),
              std::string::npos)
        << result.err;
  }
  for (const char* steps : {"0", "1025"}) {
    const ProgramResult result =
        run(tiny(dir / "r") + kDelayed + Arguments{text("--precision.amax_history={}", steps)});
    EXPECT_EQ(result.code, kExitUsage);
    EXPECT_NE(result.last_line().find("precision.amax_history"), std::string::npos) << result.err;
    EXPECT_NE(result.last_line().find("1024"), std::string::npos) << result.err;
  }
}

}  // namespace
}  // namespace moiety::app
