// Training runs: layouts, resume, capacity, guard, signals.
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <thread>
#include <unistd.h>

#include "apps/moiety/commands/signals.h"
#include "apps/moiety/config/model_options.h"
#include "apps/moiety/config/options.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

struct LayoutCase {
  int ranks, ep;
};

TEST(Train, LayoutDoesNotMatter) {
  const TemporaryDirectory dir;
  const Arguments longer{"--train.steps=20", "--router.z_coef=0.001", "--router.bias_rate=0.001"};
  ASSERT_EQ(run(tiny(dir / "one") + longer).code, kExitDone);
  const auto one = steps(dir / "one");
  ASSERT_EQ(one.size(), 20u);
  EXPECT_LT(one.at(20)["loss"].get<double>(), one.at(1)["loss"].get<double>() - 0.3);
  for (const LayoutCase c : {LayoutCase{2, 2}, {2, 1}, {4, 2}, {4, 4}}) {
    const std::string name = dir / text("r{}e{}", c.ranks, c.ep);
    ASSERT_EQ(run(tiny(name, c.ranks, c.ep) + longer).code, kExitDone);
    for (const auto& [step, r] : steps(name)) {
      for (const char* field : {"loss", "aux", "z", "gnorm"}) {
        const double expected = one.at(step)[field].get<double>();
        EXPECT_NEAR(r[field].get<double>(), expected, 1e-4 * expected)
            << field << " of step " << step << ", ranks " << c.ranks << ", ep " << c.ep;
      }
      EXPECT_EQ(r["bal"], one.at(step)["bal"]) << step;
    }
  }
}

TEST(Train, TwoRunsOfALayoutAreBitwiseEqual) {
  const TemporaryDirectory dir;
  for (const LayoutCase c : {LayoutCase{1, 1}, {2, 2}, {4, 2}}) {
    const std::string a = dir / text("a{}{}", c.ranks, c.ep),
                      b = dir / text("b{}{}", c.ranks, c.ep);
    const Arguments bf16{"--precision.recipe=bf16", "--optim.state_dtype=bf16"};
    ASSERT_EQ(run(tiny(a, c.ranks, c.ep) + bf16).code, kExitDone);
    ASSERT_EQ(run(tiny(b, c.ranks, c.ep) + bf16).code, kExitDone);
    const auto left = steps(a), right = steps(b);
    for (const auto& [step, r] : left) {
      EXPECT_EQ(r["loss"], right.at(step)["loss"]);
      EXPECT_EQ(r["gnorm"], right.at(step)["gnorm"]);
    }
    EXPECT_EQ(digests(checkpoint_path(a, 6)), digests(checkpoint_path(b, 6)));
  }
}

TEST(Train, InitialWeightsDoNotDependOnTheLayout) {
  const TemporaryDirectory dir;
  const Arguments still{"--train.steps=1", "--optim.lr=0", "--optim.min_lr=0"};
  ASSERT_EQ(run(tiny(dir / "a") + still).code, kExitDone);
  ASSERT_EQ(run(tiny(dir / "b", 4, 2) + still).code, kExitDone);
  const auto a = digests(checkpoint_path(dir / "a", 1)), b = digests(checkpoint_path(dir / "b", 1));
  for (const auto& [name, digest] : a) {
    if (name.starts_with("weight/")) {
      EXPECT_EQ(digest, b.at(name)) << name;
    }
  }
}

// Makes the directory that a run leaves when it is stopped after `step` steps.
void stop_after(const std::string& from, const std::string& to, int step) {
  fs::create_directories(to + "/checkpoints");
  fs::copy(checkpoint_path(from, step), checkpoint_path(to, step));
}

TEST(Train, ResumeIsBitwise) {
  const TemporaryDirectory dir;
  const std::string train = write_tokens(dir / "a.tok", {ramp(400), ramp(300, 7), ramp(61, 3)});
  const std::string other = write_tokens(dir / "b.tok", {ramp(500, 11)});
  const auto arguments = [&](const std::string& run_dir) {
    return tiny(dir / run_dir, 2, 2) +
           Arguments{"--data.synthetic=none",
                     "--data.train=[\"" + train + "\", {path = \"" + other + "\", weight = 0.4}]",
                     "--train.micro_batch=2",
                     "--router.bias_rate=0.01",
                     "--precision.recipe=bf16",
                     "--optim.state_dtype=bf16",
                     "--checkpoint.interval=1",
                     "--checkpoint.keep_last=10",
                     "--guard.spike_sigma=9"};
  };
  ASSERT_EQ(run(arguments("whole")).code, kExitDone);
  const auto whole = steps(dir / "whole");
  for (int stop = 1; stop <= 5; ++stop) {
    const std::string name = text("stopped{}", stop);
    stop_after(dir / "whole", dir / name, stop);
    const Arguments prefetch{text("--data.prefetch={}", stop)};
    ASSERT_EQ(run(arguments(name) + prefetch).code, kExitDone);
    const auto resumed = steps(dir / name);
    ASSERT_EQ(resumed.begin()->first, stop + 1);
    for (const auto& [step, r] : resumed) {
      for (const char* field : {"loss", "aux", "gnorm", "lr", "tokens", "bal"}) {
        EXPECT_EQ(r[field], whole.at(step)[field]) << field << " of step " << step;
      }
    }
    EXPECT_EQ(digests(checkpoint_path(dir / name, 6)), digests(checkpoint_path(dir / "whole", 6)));
  }
}

TEST(Train, RecomputationChangesNoBit) {
  const TemporaryDirectory dir;
  const auto train = [&](const std::string& name, const std::string& mode) {
    const Arguments more{"--memory.recompute=" + mode, "--router.bias_rate=0.01",
                         "--precision.recipe=nvfp4",   "--moe.shared_d_ffn=16",
                         "--checkpoint.interval=1",    "--checkpoint.keep_last=10",
                         "--train.micro_batch=1",      "--guard.nan=tensor"};
    ASSERT_EQ(run(tiny(dir / name, 2, 2) + more).code, kExitDone) << name;
  };
  train("none", "none");
  const auto whole = steps(dir / "none");
  for (const std::string mode : {"norm", "moe", "full"}) {
    train(mode, mode);
    stop_after(dir / "none", dir / ("resumed-" + mode), 3);
    train("resumed-" + mode, mode);
    for (const std::string& name : {mode, "resumed-" + mode}) {
      const auto all = steps(dir / name);
      EXPECT_EQ(all.begin()->first, name == mode ? 1 : 4);
      for (const auto& [step, r] : all) {
        for (const char* field : {"loss", "aux", "gnorm", "bal", "drop"}) {
          EXPECT_EQ(r[field], whole.at(step)[field])
              << field << " of step " << step << ", " << name;
        }
      }
      EXPECT_EQ(digests(checkpoint_path(dir / name, 6)), digests(checkpoint_path(dir / "none", 6)));
    }
  }
}

TEST(Train, ResumeUnderAnotherLayout) {
  const TemporaryDirectory dir;
  const Arguments keep{"--checkpoint.interval=3", "--checkpoint.keep_last=10"};
  ASSERT_EQ(run(tiny(dir / "whole", 2, 2) + keep).code, kExitDone);
  const auto whole = steps(dir / "whole");
  for (const LayoutCase c : {LayoutCase{1, 1}, {4, 2}, {2, 1}}) {
    const std::string name = dir / text("r{}e{}", c.ranks, c.ep);
    stop_after(dir / "whole", name, 3);
    const ProgramResult result = run(tiny(name, c.ranks, c.ep) + keep);
    ASSERT_EQ(result.code, kExitDone) << result.err;
    EXPECT_NE(result.err.find("saved under another layout"), std::string::npos);
    for (const auto& [step, r] : steps(name)) {
      const double expected = whole.at(step)["loss"].get<double>();
      EXPECT_NEAR(r["loss"].get<double>(), expected, 1e-4 * expected);
    }
  }
}

TEST(Train, ResumeComparesTheConfiguration) {
  const TemporaryDirectory dir;
  ASSERT_EQ(run(tiny(dir / "r") + Arguments{"--train.steps=2"}).code, kExitDone);
  const ProgramResult other = run(tiny(dir / "r") + Arguments{"--model.layers=3", "--run.seed=9"});
  EXPECT_EQ(other.code, kExitCheckpoint);
  EXPECT_NE(other.err.find("run.seed"), std::string::npos) << other.err;
  EXPECT_NE(other.last_line().find("model.layers was 2, is now 3"), std::string::npos) << other.err;
  const ProgramResult rate = run(tiny(dir / "r") + Arguments{"--optim.lr=0.02"});
  EXPECT_EQ(rate.code, kExitDone);
  EXPECT_NE(rate.err.find("resume: optim.lr was 0.01, is now 0.02"), std::string::npos) << rate.err;
  EXPECT_NE(rate.err.find("resume: train.steps was 2, is now 6"), std::string::npos) << rate.err;
  EXPECT_TRUE(fs::exists(dir / "r/config.2.toml"));
  EXPECT_EQ(steps(dir / "r").rbegin()->first, 6);
}

TEST(Train, ADamagedCheckpointIsNamedAndSkipped) {
  const TemporaryDirectory dir;
  const Arguments keep{"--checkpoint.interval=2", "--checkpoint.keep_last=10"};
  ASSERT_EQ(run(tiny(dir / "r", 2, 2) + keep).code, kExitDone);
  const std::string damaged = checkpoint_path(dir / "r", 6) + "/rank-00001-of-00002.safetensors";
  std::string bytes = read_all(damaged);
  bytes[bytes.size() - 5] ^= 1;  // its size stays right
  std::ofstream(damaged, std::ios::binary) << bytes;
  const ProgramResult again = run(tiny(dir / "r", 2, 2) + keep);
  EXPECT_EQ(again.code, kExitDone) << again.err;
  EXPECT_NE(again.err.find("trying an older checkpoint"), std::string::npos) << again.err;
  EXPECT_NE(again.err.find("resumed from " + checkpoint_path(dir / "r", 4)), std::string::npos);

  fs::resize_file(damaged, 1000);
  const ProgramResult shorter = run(tiny(dir / "r", 2, 2) + keep);
  EXPECT_EQ(shorter.code, kExitDone);
  EXPECT_NE(shorter.err.find("step-00000006"), std::string::npos) << shorter.err;
}

TEST(Train, ResumeKeyDecides) {
  const TemporaryDirectory dir;
  EXPECT_EQ(run(tiny(dir / "r") + Arguments{"--run.resume=must"}).code, kExitCheckpoint);
  ASSERT_EQ(run(tiny(dir / "r") + Arguments{"--run.resume=never", "--train.steps=2"}).code,
            kExitDone);
  EXPECT_EQ(run(tiny(dir / "r") + Arguments{"--run.resume=never"}).code, kExitUsage);
  EXPECT_EQ(run(tiny(dir / "s") + Arguments{"--run.resume=" + (dir / "r")}).code, kExitDone);
  EXPECT_EQ(steps(dir / "s").begin()->first, 3);
  EXPECT_EQ(run(tiny(dir / "t") + Arguments{"--run.resume=" + (dir / "nowhere")}).code,
            kExitCheckpoint);
}

TEST(Train, InitFromTakesWeightsAlone) {
  const TemporaryDirectory dir;
  ASSERT_EQ(run(tiny(dir / "a") + Arguments{"--train.steps=30"}).code, kExitDone);
  const Arguments from{"--run.init_from=" + (dir / "a")};
  ASSERT_EQ(run(tiny(dir / "b", 2, 2) + from).code, kExitDone);
  const double untrained = steps(dir / "a").at(1)["loss"].get<double>();
  EXPECT_EQ(steps(dir / "b").begin()->first, 1);
  EXPECT_EQ(steps(dir / "b").at(1)["tokens"], 128);
  EXPECT_LT(steps(dir / "b").at(1)["loss"].get<double>(), untrained - 1);
}

TEST(Train, CapacityGrowsAndNothingIsLost) {
  const TemporaryDirectory dir;
  const Arguments skewed{"--router.aux=none", "--moe.experts=8", "--moe.top_k=1",
                         "--train.steps=12"};
  const ProgramResult automatic = run(tiny(dir / "auto", 4, 4) + skewed);
  const ProgramResult worst =
      run(tiny(dir / "worst", 4, 4) + skewed + Arguments{"--moe.capacity_factor=-1"});
  ASSERT_EQ(automatic.code, kExitDone);
  ASSERT_EQ(worst.code, kExitDone);
  EXPECT_NE(automatic.err.find(" is made again: experts now take "), std::string::npos)
      << automatic.err;
  EXPECT_EQ(worst.err.find(" is made again"), std::string::npos);
  const auto a = steps(dir / "auto"), w = steps(dir / "worst");
  for (const auto& [step, r] : a) {
    EXPECT_EQ(r["loss"], w.at(step)["loss"]) << step;
    EXPECT_EQ(r["drop"], 0);
  }
  EXPECT_EQ(digests(checkpoint_path(dir / "auto", 12)),
            digests(checkpoint_path(dir / "worst", 12)));
}

TEST(Train, AGivenCapacityDropsOrStops) {
  const TemporaryDirectory dir;
  const Arguments small{"--moe.capacity_factor=0.5"};
  const ProgramResult error = run(tiny(dir / "a", 2, 2) + small);
  EXPECT_EQ(error.code, kExitUsage);
  EXPECT_NE(error.last_line().find("moe.capacity_factor: an expert-parallel rank needs "),
            std::string::npos)
      << error.err;
  const ProgramResult drop = run(tiny(dir / "b", 2, 2) + small + Arguments{"--moe.overflow=drop"});
  EXPECT_EQ(drop.code, kExitDone) << drop.err;
  // 8 x 16 tokens, 2 experts each, half of the rows, 2 layers.
  for (const auto& [step, r] : steps(dir / "b")) EXPECT_EQ(r["drop"], 256) << step;
  const ProgramResult report =
      run(tiny(dir / "c", 2, 2) + small + Arguments{"--moe.overflow=report"});
  EXPECT_EQ(report.code, kExitDone);
  EXPECT_NE(report.err.find("256 (token, expert) pairs were dropped"), std::string::npos);
}

void non_finite_gradients_stop(const std::string& recipe) {
  const TemporaryDirectory dir;
  const ProgramResult result =
      run(tiny(dir / "r", 2, 2) + Arguments{"--optim.lr=1e38", "--optim.warmup_steps=0",
                                            "--train.steps=50", "--guard.max_skips=2",
                                            "--precision.recipe=" + recipe});
  EXPECT_EQ(result.code, kExitNumerical) << result.err;
  EXPECT_NE(result.last_line().find("2 steps in a row were skipped"), std::string::npos)
      << result.err;
  // The replay names the first tensor, on some rank; both ranks leave what they know.
  EXPECT_NE(result.last_line().find("; replay: rank "), std::string::npos) << result.err;
  const auto halt = events(dir / "r", "halt");
  ASSERT_EQ(halt.size(), 1u);
  const int64_t halted = halt[0]["step"].get<int64_t>();
  for (int rank : {0, 1}) {
    const auto failure =
        nlohmann::json::parse(read_all(dir / text("r/failures/rank{}-step{}.json", rank, halted)));
    EXPECT_EQ(failure["kind"], "nan");
    EXPECT_EQ(failure["verdict"], halt[0]["verdict"]);
    EXPECT_EQ(failure["checksum"], failure["checksum_of_replay"]);
    EXPECT_TRUE(failure.contains("inputs"));
  }
  EXPECT_EQ(events(dir / "r", "skip").size(), 2u);
  const auto last = steps(dir / "r").rbegin()->second;
  EXPECT_EQ(last["skipped"], true);
}

TEST(Train, NonFiniteGradientsAreSkippedThenStop) { non_finite_gradients_stop("fp32"); }
// Stochastic rounding draws in the replay what it drew in the step.
TEST(Train, NonFiniteGradientsOfARecipeToo) { non_finite_gradients_stop("nvfp4"); }

TEST(Train, TheStepLineCountsModelFlopsOfARank) {
  const TemporaryDirectory dir;
  ASSERT_EQ(run(tiny(dir / "r", 2, 2)).code, kExitDone);
  const Config config = load_config(std::vector{dir / "r/config.toml"}, {});
  const model::Config model = model_config(config.options, 264);
  const double flops = model::flops_per_token(model, 16) * 8 * 16 / 2;
  const auto last = steps(dir / "r").rbegin()->second;
  const double seconds = last["step_ms"].get<double>() * 1e-3;
  EXPECT_NEAR(last["tflops"].get<double>() * 1e12 * seconds, flops, 1e-6 * flops);
  EXPECT_DOUBLE_EQ(last["mfu"].get<double>(), 100 * last["tflops"].get<double>());
}

TEST(Train, StopsAtTheHourAndGoesOn) {
  const TemporaryDirectory dir;
  EXPECT_EQ(run(tiny(dir / "r") + Arguments{"--run.max_hours=1e-9"}).code, kExitStartAgain);
  EXPECT_EQ(steps(dir / "r").rbegin()->first, 1);
  EXPECT_EQ(run(tiny(dir / "r")).code, kExitDone);
  EXPECT_EQ(steps(dir / "r").rbegin()->first, 6);
}

TEST(Train, SignalsSaveAndStop) {
  const TemporaryDirectory dir;
  const std::string metrics = dir / "r/metrics.jsonl";
  // Signals come when training is on: the handlers stand by then.
  std::thread sender([&] {
    const auto wait_for = [&](const char* what) {
      for (int i = 0; i < 3000 && read_all(metrics).find(what) == std::string::npos; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    };
    wait_for("\"loss\"");
    kill(getpid(), SIGUSR1);
    wait_for("\"checkpoint\"");
    kill(getpid(), SIGTERM);
  });
  const ProgramResult result = run(tiny(dir / "r", 2, 2) + Arguments{"--train.steps=100000"});
  sender.join();
  EXPECT_EQ(result.code, kExitStartAgain) << result.err;
  const auto saved = events(dir / "r", "checkpoint");
  ASSERT_EQ(saved.size(), 2u);
  EXPECT_EQ(saved[1]["step"], steps(dir / "r").rbegin()->first);
  for (const nlohmann::json& event : saved) {
    EXPECT_EQ(event["path"], checkpoint_path(dir / "r", event["step"]));
  }
  EXPECT_EQ(events(dir / "r", "stop").at(0)["complete"], false);
}

TEST(Train, ASecondInterruptEndsAtOnce) {
  const auto interrupt_twice = [] {
    train::TrainRequests requests;
    const SignalHandlers handlers(requests);
    raise(SIGINT);
    raise(SIGINT);
  };
  EXPECT_EXIT(interrupt_twice(), testing::ExitedWithCode(kExitInterrupted), "");
}

TEST(Train, ASaveThatFailsIsTriedAgain) {
  const TemporaryDirectory dir;
  dir.write("r/checkpoints", "a file where the directory should be");
  const ProgramResult result = run(tiny(dir / "r", 2, 2) + Arguments{"--checkpoint.interval=4"});
  EXPECT_EQ(result.code, kExitDisk);
  EXPECT_NE(result.err.find("the checkpoint of step 4 failed and is tried again later"),
            std::string::npos)
      << result.err;
  EXPECT_EQ(steps(dir / "r").size(), 6u);
}

TEST(Train, EvaluatesAtIntervalsAndAtTheEnd) {
  const TemporaryDirectory dir;
  const std::string valid = write_tokens(dir / "v.tok", {ramp(400)});
  const Arguments eval{"--data.valid=" + valid, "--eval.every=4", "--eval.samples=5"};
  ASSERT_EQ(run(tiny(dir / "a") + eval).code, kExitDone);
  ASSERT_EQ(run(tiny(dir / "b", 4, 2) + eval).code, kExitDone);
  const auto a = events(dir / "a", "eval"), b = events(dir / "b", "eval");
  ASSERT_EQ(a.size(), 3u);
  ASSERT_EQ(b.size(), 3u);
  EXPECT_EQ(a[0]["step"], 0);  // where the curve begins
  EXPECT_EQ(a[1]["step"], 4);
  EXPECT_EQ(a[2]["step"], 6);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(a[i]["tokens"], 80);
    EXPECT_EQ(b[i]["tokens"], 80);
    const double expected = a[i]["loss"].get<double>();
    EXPECT_NEAR(b[i]["loss"].get<double>(), expected, 1e-4 * expected);
    EXPECT_TRUE(std::isfinite(a[i]["bits_per_byte"].get<double>()));
  }
}

TEST(Train, DataThatEndsEndsTheRun) {
  const TemporaryDirectory dir;
  const std::string train = write_tokens(dir / "t.tok", {ramp(16 * 20 + 1)});  // 20 samples
  const ProgramResult result =
      run(tiny(dir / "r") +
          Arguments{"--data.synthetic=none", "--data.train=" + train, "--data.epochs=1"});
  EXPECT_EQ(result.code, kExitDone);
  EXPECT_NE(result.err.find("the data has ended after step 2"), std::string::npos) << result.err;
  EXPECT_TRUE(fs::exists(checkpoint_path(dir / "r", 2)));
}

TEST(Train, DenseAndSharedLayers) {
  const TemporaryDirectory dir;
  const Arguments mixed{
      "--model.layers=3",       "--model.dense_layers=[0]", "--model.d_ffn_dense=48",
      "--moe.shared_d_ffn=16",  "--moe.shared_gate",        "--model.tie_embeddings",
      "--router.score=sigmoid", "--router.aux=sequence",    "--router.groups=2",
      "--router.group_top_k=2", "--data.document_mask"};
  ASSERT_EQ(run(tiny(dir / "a") + mixed).code, kExitDone);
  ASSERT_EQ(run(tiny(dir / "b", 4, 2) + mixed).code, kExitDone);
  const auto a = steps(dir / "a"), b = steps(dir / "b");
  for (const auto& [step, r] : a) {
    const double expected = r["loss"].get<double>();
    EXPECT_NEAR(b.at(step)["loss"].get<double>(), expected, 1e-4 * expected) << step;
  }
}

TEST(Train, DryRunStopsBeforeStepOne) {
  const TemporaryDirectory dir;
  const ProgramResult result = run(tiny(dir / "r", 2, 2) + Arguments{"--dry-run"});
  EXPECT_EQ(result.code, kExitDone);
  // The memory of a rank, by what it is for.
  for (const char* part : {"memory of a rank:", "  parameters    ", "  moments       ",
                           "  activations   ", "  snapshot      ", "  total         "}) {
    EXPECT_NE(result.err.find(part), std::string::npos) << part << "\n" << result.err;
  }
  EXPECT_TRUE(steps(dir / "r").empty());
  EXPECT_FALSE(fs::exists(dir / "r/checkpoints"));
}

TEST(Train, AtMostOneLineASecondAndARecordOfEveryStep) {
  const TemporaryDirectory dir;
  const auto lines = [](const std::string& all) {
    int n = 0;
    for (size_t at = 0; (at = all.find("\nstep ", at)) != std::string::npos; ++at) {
      n += all.compare(at, 12, "\nstep 6: sav") != 0;
    }
    return n;
  };
  const auto start = std::chrono::steady_clock::now();
  const ProgramResult quiet = run(tiny(dir / "a"));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  ASSERT_EQ(quiet.code, kExitDone);
  EXPECT_EQ(quiet.err.rfind("48.1 k parameters, 35.8 k active a token; 1 rank, fp32; 6 steps of 8 "
                            "x 16 tokens\n",
                            0),
            0u)
      << quiet.err;
  EXPECT_GE(lines(quiet.err), 1);
  EXPECT_LE(lines(quiet.err), 2 + int(took.count()));
  EXPECT_EQ(lines("\n" + read_all(dir / "a/log.txt")), lines(quiet.err));
  EXPECT_EQ(steps(dir / "a").size(), 6u);
  EXPECT_EQ(lines(run(tiny(dir / "b") + Arguments{"--log.every=1"}).err), 6);
  EXPECT_EQ(lines(run(tiny(dir / "c") + Arguments{"--log.every=4"}).err), 2);
  EXPECT_EQ(steps(dir / "c").size(), 2u);
}

}  // namespace
}  // namespace moiety::app
