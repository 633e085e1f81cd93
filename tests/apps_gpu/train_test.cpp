// Training runs on a GPU, through the program: against the CPU, captured against eager, resumed.
#include <filesystem>

#include "tests/apps/train_helpers.h"
#include "tests/support/gpu_test.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

const Arguments kOnGpu{"--run.device=cuda"};
const Arguments kOnCpu{"--run.device=cpu"};
const Arguments kEager{"--train.cuda_graph=false"};
const Arguments kBf16{"--precision.recipe=bf16"};

class TrainGpu : public GpuTest {
 protected:
  std::string at(const std::string& name) const { return dir / name; }
  void train_at(const std::string& name, const Arguments& more) const {
    train(tiny(at(name)) + Arguments{"--router.bias_rate=0.001", "--router.z_coef=0.001"} + more);
  }
  // A copy of what a run left at its checkpoint of this step.
  void stop_after(const std::string& from, const std::string& to, int step) const {
    fs::create_directories(at(to) + "/checkpoints");
    fs::copy(checkpoint_path(at(from), step), checkpoint_path(at(to), step));
  }
  TemporaryDirectory dir;
};

void expect_equal(const std::string& a, const std::string& b) {
  const auto left = steps(a), right = steps(b);
  ASSERT_FALSE(left.empty());
  for (const auto& [step, r] : left) {
    ASSERT_TRUE(right.contains(step)) << step;
    for (const char* field : {"loss", "aux", "z", "gnorm", "lr", "tokens", "bal", "entropy"}) {
      EXPECT_EQ(r[field], right.at(step)[field]) << field << " of step " << step;
    }
  }
}

// The weights move, so the routing does: the loads of the experts differ from step to step.
TEST_F(TrainGpu, CapturedStepsAreEagerOnes) {
  const Arguments longer = kOnGpu + kBf16 +
                           Arguments{"--train.steps=50", "--train.micro_batch=4",
                                     "--data.document_mask=true", "--eval.every=0"};
  train_at("captured", longer + Arguments{"--train.cuda_graph=true"});
  train_at("eager", longer + kEager);
  expect_equal(at("captured"), at("eager"));
  EXPECT_EQ(digests(checkpoint_path(at("captured"), 50)),
            digests(checkpoint_path(at("eager"), 50)));
  const auto captured = steps(at("captured"));
  EXPECT_NE(captured.at(10)["bal"], captured.at(50)["bal"]);
}

TEST_F(TrainGpu, AStepNeitherAllocatesNorWaits) {
  for (const Arguments& how : {kEager, Arguments{"--train.cuda_graph=true"}}) {
    const std::string name = how == kEager ? "eager" : "captured";
    train_at(name, kOnGpu + kBf16 + how + Arguments{"--train.steps=20"});
    for (const auto& [step, r] : steps(at(name))) {
      if (step == 1) continue;  // finds out how much memory a step takes
      EXPECT_EQ(r["host_waits"], 0) << step;
      EXPECT_EQ(r["allocations"], 0) << step;
    }
  }
}

TEST_F(TrainGpu, TwoRunsAreBitwiseEqual) {
  const Arguments bf16_moments = kOnGpu + kBf16 + Arguments{"--optim.state_dtype=bf16"};
  train_at("a", bf16_moments);
  train_at("b", bf16_moments);
  expect_equal(at("a"), at("b"));
  EXPECT_EQ(digests(checkpoint_path(at("a"), 6)), digests(checkpoint_path(at("b"), 6)));
}

TEST_F(TrainGpu, NearTheCpu) {
  const Arguments longer{"--train.steps=20", "--moe.shared_d_ffn=16", "--moe.shared_gate=true"};
  train_at("gpu", kOnGpu + longer);
  train_at("cpu", kOnCpu + longer);
  expect_near(at("gpu"), at("cpu"), 1e-4);
}

TEST_F(TrainGpu, RecipesAreNearTheCpu) {
  for (const char* recipe : {"bf16", "fp8_block", "mxfp8", "nvfp4"}) {
    // Choices of experts part in the end; a gentle rate keeps that small.
    const Arguments more{text("--precision.recipe={}", recipe), "--model.d_model=128",
                         "--moe.d_ffn=128", "--train.steps=20", "--optim.lr=0.001"};
    train_at(text("gpu-{}", recipe), kOnGpu + more);
    train_at(text("cpu-{}", recipe), kOnCpu + more);
    expect_losses_near(at(text("gpu-{}", recipe)), at(text("cpu-{}", recipe)), 0.02);
  }
}

// Activations, biases and the order in memory, on every path that the GPU has.
TEST_F(TrainGpu, OptionsOfExpertsAreNearTheCpu) {
  const Arguments gpt_oss{"--moe.activation=qgeglu",  "--moe.act_alpha=1.702",
                          "--moe.act_limit=0.05",     "--moe.act_offset=1",
                          "--moe.expert_bias",        "--moe.shared_d_ffn=16",
                          "--model.dense_layers=[0]", "--model.d_ffn_dense=48"};
  const Arguments in_memory{"--moe.expert_weights=indexed", "--moe.glu_interleave=32"};
  const Arguments relu2{"--moe.activation=relu2", "--moe.expert_bias"};
  train_at("cpu", kOnCpu + gpt_oss);
  train_at("gpu", kOnGpu + gpt_oss);
  expect_near(at("gpu"), at("cpu"), 1e-4);
  train_at("in-memory", kOnGpu + gpt_oss + in_memory);
  expect_near(at("in-memory"), at("cpu"), 1e-4);
  train_at("cpu-relu2", kOnCpu + relu2);
  train_at("gpu-relu2", kOnGpu + relu2);
  expect_near(at("gpu-relu2"), at("cpu-relu2"), 1e-4);
  for (const char* path : {"auto", "cuda_plain"}) {
    train_at(text("bf16-{}", path),
             kOnGpu + kBf16 + gpt_oss + in_memory + Arguments{text("--moe.path={}", path)});
  }
  expect_losses_near(at("bf16-auto"), at("bf16-cuda_plain"), 0.01);
  train_at("indexed", kOnGpu + kBf16 + gpt_oss + Arguments{"--moe.expert_weights=indexed"});
  train_at("packed", kOnGpu + kBf16 + gpt_oss);
  expect_equal(at("indexed"), at("packed"));
}

TEST_F(TrainGpu, TheRecipeChangesOnTheWay) {
  const Arguments more{"--precision.recipe=mxfp8", "--precision.switch_step=4",
                       "--model.d_model=128", "--moe.d_ffn=128", "--train.steps=8"};
  train_at("captured", kOnGpu + more);
  train_at("eager", kOnGpu + more + kEager);
  expect_equal(at("captured"), at("eager"));
}

TEST_F(TrainGpu, ResumeIsBitwise) {
  const Arguments each = kOnGpu + kBf16 +
                         Arguments{"--checkpoint.interval=1", "--checkpoint.keep_last=10",
                                   "--optim.state_dtype=bf16", "--guard.spike_sigma=9"};
  train_at("whole", each);
  for (const int stop : {1, 3, 5}) {
    const std::string name = text("stopped{}", stop);
    stop_after("whole", name, stop);
    train_at(name, each + (stop == 3 ? kEager : Arguments{}));
    const auto whole = steps(at("whole")), resumed = steps(at(name));
    ASSERT_EQ(resumed.begin()->first, stop + 1);
    for (const auto& [step, r] : resumed) {
      EXPECT_EQ(r["loss"], whole.at(step)["loss"]) << step;
      EXPECT_EQ(r["gnorm"], whole.at(step)["gnorm"]) << step;
    }
    EXPECT_EQ(digests(checkpoint_path(at(name), 6)), digests(checkpoint_path(at("whole"), 6)));
  }
}

TEST_F(TrainGpu, CheckpointsMoveBetweenDevices) {
  const Arguments each{"--checkpoint.interval=3", "--checkpoint.keep_last=10"};
  train_at("gpu", kOnGpu + each);
  train_at("cpu", kOnCpu + each);
  stop_after("gpu", "to-cpu", 3);
  stop_after("cpu", "to-gpu", 3);
  train_at("to-cpu", kOnCpu + each);
  train_at("to-gpu", kOnGpu + each);
  expect_near(at("to-cpu"), at("cpu"), 1e-4);
  expect_near(at("to-gpu"), at("cpu"), 1e-4);
  // A state that a GPU has loaded is saved bit for bit.
  stop_after("cpu", "again", 6);
  const Arguments done =
      kOnGpu + each +
      Arguments{"--optim.lr=0", "--optim.min_lr=0", "--optim.weight_decay=0", "--train.steps=7"};
  train_at("again", done);
  const auto before = digests(checkpoint_path(at("cpu"), 6)),
             after = digests(checkpoint_path(at("again"), 7));
  for (const auto& [name, digest] : before) {
    if (name.starts_with("weight/") && !name.ends_with("router.bias")) {
      EXPECT_EQ(digest, after.at(name)) << name;
    }
  }
}

// Experts get room for what the routing needs: steps that lose pairs are made again.
TEST_F(TrainGpu, CapacityGrows) {
  const Arguments more = kOnGpu + kBf16 + Arguments{"--train.steps=12", "--router.aux=none"};
  train_at("captured", more);
  train_at("eager", more + kEager);
  expect_equal(at("captured"), at("eager"));
  for (const auto& [step, r] : steps(at("captured"))) EXPECT_EQ(r["drop"], 0) << step;
}

TEST_F(TrainGpu, EvaluationIsNearTheCpu) {
  const std::string tokens = write_tokens(dir / "a.tok", {ramp(900), ramp(300, 7)});
  const Arguments data{"--data.synthetic=none",
                       "--data.train=[\"" + tokens + "\"]",
                       "--data.valid=[\"" + tokens + "\"]",
                       "--eval.every=2",
                       "--eval.samples=8",
                       "--train.steps=6"};
  train_at("gpu", kOnGpu + data);
  train_at("cpu", kOnCpu + data);
  const auto gpu = events(at("gpu"), "eval"), cpu = events(at("cpu"), "eval");
  ASSERT_EQ(gpu.size(), cpu.size());
  for (size_t i = 0; i < gpu.size(); ++i) {
    const double expected = cpu[i]["loss"].get<double>();
    EXPECT_NEAR(gpu[i]["loss"].get<double>(), expected, 1e-4 * expected);
  }
}

// A gradient that is not finite is skipped on the device; the third in a row ends the run, and the
// replay names the tensor.
TEST_F(TrainGpu, TheGuardStopsABadRun) {
  const ProgramResult result =
      run(tiny(at("bad")) + kOnGpu +
          Arguments{"--optim.lr=1e30", "--optim.warmup_steps=0", "--train.steps=20"});
  EXPECT_EQ(result.code, kExitNumerical) << result.err;
  EXPECT_EQ(events(at("bad"), "halt").size(), 1u);
  EXPECT_EQ(events(at("bad"), "skip").size(), 3u);
}

// The demo's model: on Hopper's paths, with weight gradients that wait and layers that are computed
// again, its losses are the same, and those of every GPU's kernels are near.
TEST_F(TrainGpu, PathsGiveTheDemosLosses) {
  if (gpu_properties(0).major != 9) GTEST_SKIP() << gpu_properties(0).name << " is no Hopper";
  const Arguments demo = kOnGpu + kBf16 + Arguments{"--model.d_model=128", "--model.layers=4",
                                                    "--moe.experts=8",     "--moe.d_ffn=128",
                                                    "--data.seq_len=256",  "--train.steps=200",
                                                    "--optim.lr=0.004",    "--router.aux_coef=0.01",
                                                    "--eval.every=0"};
  train_at("plain", demo + Arguments{"--moe.path=cuda_plain"});
  for (const char* path : {"sm90", "sm90_fused"}) {
    for (const bool late : {false, true}) {
      for (const char* recompute : {"none", "moe"}) {
        const std::string name = text("{}-{}-{}", path, late, recompute);
        SCOPED_TRACE(name);
        train_at(name,
                 demo + Arguments{text("--moe.path={}", path), text("--moe.delay_wgrad={}", late),
                                  text("--memory.recompute={}", recompute)});
        expect_equal(at(name), at("sm90-false-none"));
      }
    }
  }
  ASSERT_EQ(steps(at("sm90-false-none")).size(), 200u);
  expect_losses_near(at("sm90-false-none"), at("plain"), 0.02);
}

// The experts' weight gradients wait, rows travel in a format, gradients are kept in bf16: each
// changes what a step does, none what it gives beyond its rounding.
TEST_F(TrainGpu, LateNarrowAndQuantizedDispatch) {
  const Arguments wide{"--model.d_model=128", "--moe.d_ffn=128", "--train.steps=12",
                       "--optim.lr=0.001"};
  const Arguments late{"--moe.delay_wgrad=true"};
  struct Case {
    const char *recipe, *dispatch;
  };
  for (const Case& c : {Case{"bf16", "fp8_block"}, Case{"fp8_block", "fp8_block"},
                        Case{"mxfp8", "mxfp8"}, Case{"nvfp4", "auto"}}) {
    SCOPED_TRACE(c.recipe);
    const auto named = [&](const char* what) { return text("{}-{}", what, c.recipe); };
    const Arguments each =
        wide + Arguments{text("--precision.recipe={}", c.recipe),
                         text("--precision.dispatch={}", c.dispatch), "--optim.grad_dtype=bf16"};
    train_at(named("captured"), kOnGpu + each + late);
    train_at(named("eager"), kOnGpu + each + late + kEager);
    train_at(named("at-once"), kOnGpu + each);
    train_at(named("cpu"), kOnCpu + each + late);
    expect_equal(at(named("captured")), at(named("eager")));
    expect_equal(at(named("captured")), at(named("at-once")));
    expect_losses_near(at(named("captured")), at(named("cpu")), 0.02);
  }
}

}  // namespace
}  // namespace moiety::app
