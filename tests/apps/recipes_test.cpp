// Training under the recipes fp8_tensor, fp8_block, mxfp8 and nvfp4, through the program itself.
#include <cmath>
#include <filesystem>

#include "apps/moiety/exit_code.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRecipes[] = {"fp8_tensor", "fp8_block", "mxfp8", "nvfp4"};

Arguments recipe(const std::string& name) { return {"--precision.recipe=" + name}; }

double mean_of_last(const std::map<int64_t, nlohmann::json>& run, int n) {
  double sum = 0;
  auto it = run.rbegin();
  for (int i = 0; i < n; ++i, ++it) sum += it->second["loss"].get<double>();
  return sum / n;
}

void expect_same_steps(const std::map<int64_t, nlohmann::json>& run,
                       const std::map<int64_t, nlohmann::json>& expected) {
  for (const auto& [step, r] : run) {
    for (const char* field : {"loss", "aux", "gnorm", "lr", "recipe"}) {
      EXPECT_EQ(r[field], expected.at(step)[field]) << field << " of step " << step;
    }
  }
}

TEST(Recipes, ALossOfAHundredStepsIsNearThatOfBf16) {
  const TemporaryDirectory dir;
  const Arguments longer{"--train.steps=100", "--checkpoint.interval=0"};
  const auto loss = [&](const std::string& name, const std::string& directory, int ep,
                        const Arguments& layout) {
    train(tiny(directory, 2, ep) + longer + recipe(name) + layout);
    const auto all = steps(directory);
    EXPECT_EQ(all.at(100)["recipe"], name);
    EXPECT_EQ(all.at(100)["mfu_recipe"], all.at(100)["mfu"]) << name;
    EXPECT_LT(mean_of_last(all, 10), 0.9 * all.at(1)["loss"].get<double>()) << name;
    return mean_of_last(all, 10);
  };
  const Arguments gtp2{"--parallel.gtp=2", "--parallel.egtp=2"};
  const double bf16 = loss("bf16", dir / "bf16", 2, {});
  for (const char* name : kRecipes) {
    for (const double quantized : {loss(name, dir / name, 2, {}),
                                   loss(name, dir / (std::string(name) + ".gtp2"), 1, gtp2)}) {
      EXPECT_NEAR(quantized, bf16, 0.02 * bf16) << name;
      EXPECT_NE(quantized, bf16) << name;
    }
  }
}

// The differences between layouts are the order of sums, as in bf16; maxima of activations that are
// taken over a rank's tokens (nvfp4, fp8_tensor); and blocks along tokens that begin anew on every rank.
TEST(Recipes, LayoutsDifferLittle) {
  const TemporaryDirectory dir;
  for (const char* name : kRecipes) {
    const std::string one = dir / text("{}-one", name);
    ASSERT_EQ(run(tiny(one) + recipe(name)).code, kExitDone);
    const auto expected = steps(one);
    for (const auto& [ranks, ep] :
         std::vector<std::pair<int, int>>{{2, 1}, {2, 2}, {4, 2}, {4, 4}}) {
      const std::string many = dir / text("{}-{}-{}", name, ranks, ep);
      ASSERT_EQ(run(tiny(many, ranks, ep) + recipe(name)).code, kExitDone);
      for (const auto& [step, r] : steps(many)) {
        const double loss = expected.at(step)["loss"].get<double>();
        EXPECT_NEAR(r["loss"].get<double>(), loss, 0.005 * loss) << many << " step " << step;
      }
    }
  }
}

TEST(Recipes, RunsAreBitwiseEqualAndResumeSo) {
  const TemporaryDirectory dir;
  for (const char* name : kRecipes) {
    const Arguments common =
        recipe(name) +
        Arguments{"--checkpoint.interval=1", "--checkpoint.keep_last=10", "--train.micro_batch=1"};
    const std::string whole = dir / text("{}-whole", name);
    ASSERT_EQ(run(tiny(whole, 4, 2) + common).code, kExitDone);
    for (const int stop : {0, 3}) {
      const std::string again = dir / text("{}-{}", name, stop);
      if (stop > 0) {
        fs::create_directories(again + "/checkpoints");
        fs::copy(checkpoint_path(whole, stop), checkpoint_path(again, stop));
      }
      ASSERT_EQ(run(tiny(again, 4, 2) + common).code, kExitDone);
      EXPECT_EQ(steps(again).begin()->first, stop + 1);
      expect_same_steps(steps(again), steps(whole));
      EXPECT_EQ(digests(checkpoint_path(again, 6)), digests(checkpoint_path(whole, 6)));
    }
  }
}

TEST(Recipes, SwitchAtAStep) {
  const TemporaryDirectory dir;
  const Arguments common =
      recipe("nvfp4") + Arguments{"--checkpoint.interval=1", "--checkpoint.keep_last=10"};
  for (const char* later : {"bf16", "fp8_tensor", "mxfp8"}) {
    const Arguments to_later{"--precision.switch_step=4",
                             text("--precision.switch_recipe={}", later)};
    const std::string whole = dir / text("whole-{}", later);
    const ProgramResult result = run(tiny(whole, 2, 2) + common + to_later);
    ASSERT_EQ(result.code, kExitDone) << result.err;
    EXPECT_NE(result.err.find(text("from step 4 on: {} in place of nvfp4", later)),
              std::string::npos);
    const auto all = steps(whole);
    for (const auto& [step, r] : all) EXPECT_EQ(r["recipe"], step < 4 ? "nvfp4" : later) << step;
    for (const int stop : {2, 3, 4}) {
      const std::string resumed = dir / text("{}-{}", later, stop);
      fs::create_directories(resumed + "/checkpoints");
      fs::copy(checkpoint_path(whole, stop), checkpoint_path(resumed, stop));
      ASSERT_EQ(run(tiny(resumed, 2, 2) + common + to_later).code, kExitDone);
      expect_same_steps(steps(resumed), all);
      EXPECT_EQ(digests(checkpoint_path(resumed, 6)), digests(checkpoint_path(whole, 6)));
    }
  }
}

// Masters are what a checkpoint holds, so any recipe goes on from any other's.
TEST(Recipes, CheckpointsLoadUnderAnotherRecipe) {
  const TemporaryDirectory dir;
  const std::string from = dir / "nvfp4";
  ASSERT_EQ(run(tiny(from) + recipe("nvfp4") + Arguments{"--train.steps=3"}).code, kExitDone);
  for (const char* name : {"bf16", "fp8_tensor", "fp8_block", "mxfp8"}) {
    const std::string to = dir / name;
    fs::create_directories(to + "/checkpoints");
    fs::copy(checkpoint_path(from, 3), checkpoint_path(to, 3), fs::copy_options::recursive);
    const ProgramResult result = run(tiny(to, 2, 2) + recipe(name));
    ASSERT_EQ(result.code, kExitDone) << result.err;
    EXPECT_NE(result.err.find("precision.recipe"), std::string::npos) << result.err;
    const auto resumed = steps(to);
    EXPECT_EQ(resumed.begin()->first, 4);
    EXPECT_EQ(resumed.at(6)["recipe"], name);
  }
}

TEST(Recipes, LayersThatStayInBf16) {
  const TemporaryDirectory dir;
  const auto losses = [&](const std::string& name, const Arguments& more) {
    EXPECT_EQ(run(tiny(dir / name) + more).code, kExitDone) << name;
    std::vector<double> all;
    for (const auto& [step, r] : steps(dir / name)) all.push_back(r["loss"].get<double>());
    return all;
  };
  const auto bf16 = losses("bf16", recipe("bf16"));
  const auto kept = [](int first, int last) {
    return recipe("mxfp8") + Arguments{text("--precision.keep_first={}", first),
                                       text("--precision.keep_last={}", last)};
  };
  EXPECT_EQ(losses("all", kept(1, 1)), bf16);
  EXPECT_NE(losses("first", kept(1, 0)), bf16);
  EXPECT_NE(losses("last", kept(0, 1)), losses("first_again", kept(1, 0)));
  const auto without =
      losses("ffn", recipe("mxfp8") + Arguments{"--precision.attention_linears=false"});
  EXPECT_NE(without, bf16);
  EXPECT_NE(without, losses("mxfp8", recipe("mxfp8")));
}

// Rows of tokens that travel quantized: in the recipe's format nothing changes, in another one what
// experts read; ranks that share experts train as ranks that do not. Losses over 20 steps stay
// within 1 % of those of rows in bf16.
TEST(Recipes, RowsTravelQuantized) {
  const TemporaryDirectory dir;
  const Arguments longer{"--train.steps=20", "--checkpoint.interval=0"};
  const auto train = [&](const std::string& name, const std::string& format, int ep,
                         const Arguments& more) {
    const std::string path = dir / text("{}-{}-{}", name, format, ep);
    EXPECT_EQ(
        run(tiny(path, 2, ep) + longer + more + Arguments{"--precision.dispatch=" + format}).code,
        kExitDone)
        << path;
    return steps(path);
  };
  const auto expect_near = [](const auto& got, const auto& expected, const std::string& what) {
    ASSERT_EQ(got.size(), 20u) << what;
    for (const auto& [step, r] : got) {
      const double loss = expected.at(step)["loss"].template get<double>();
      EXPECT_NEAR(r["loss"].template get<double>(), loss, 0.01 * loss) << what << " step " << step;
    }
  };
  for (const char* name : {"bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"}) {
    const auto bf16 = train(name, "bf16", 1, recipe(name));
    EXPECT_EQ(train(name, "auto", 1, recipe(name)).at(20)["loss"], bf16.at(20)["loss"]) << name;
    for (const char* format : {"fp8_block", "mxfp8"}) {
      const auto quantized = train(name, format, 1, recipe(name));
      expect_near(quantized, bf16, text("{} {}", name, format));
      if (name == std::string_view(format)) {  // the same codes
        EXPECT_EQ(quantized.at(20)["loss"], bf16.at(20)["loss"]) << name;
      } else if (name != std::string_view("fp8_block") && name != std::string_view("mxfp8")) {
        EXPECT_NE(quantized.at(20)["loss"], bf16.at(20)["loss"]) << name << " " << format;
      }
      expect_near(train(name, format, 2, recipe(name)), quantized, text("{} {} ep", name, format));
    }
  }
}

// `moiety eval` computes what validation in the run computes.
TEST(Recipes, EvalIsTheValidationOfTheRun) {
  const TemporaryDirectory dir;
  const std::string train = write_tokens(dir / "a.tok", {ramp(900)});
  const std::string valid = write_tokens(dir / "v.tok", {ramp(400, 5)});
  for (const char* format : {"fp8_tensor", "nvfp4"}) {
    const std::string name = dir / format;
    ASSERT_EQ(run(tiny(name) + recipe(format) +
                  Arguments{"--precision.dispatch=mxfp8", "--data.synthetic=none",
                            "--data.train=" + train, "--data.valid=[\"" + valid + "\"]",
                            "--eval.samples=16"})
                  .code,
              kExitDone);
    const ProgramResult result = run({"eval", name, "--data", valid, "--samples=16"});
    ASSERT_EQ(result.code, kExitDone) << result.err;
    EXPECT_EQ(nlohmann::json::parse(result.out)["loss"], events(name, "eval").back()["loss"]);
    ASSERT_EQ(run({"generate", name, "--prompt", "a", "--tokens", "4"}).code, kExitDone);
  }
}

}  // namespace
}  // namespace moiety::app
