// Runs of several ranks, threads that share a GPU, through the program.
#pragma once

#include <filesystem>

#include "tests/apps/train_helpers.h"
#include "tests/support/gpu_test.h"

namespace moiety::app {

struct Ranks {
  const char* name;
  int ranks, tp, ep = 1;
};
inline constexpr Ranks kOne{"one", 1, 1}, kDp2{"dp2", 2, 1}, kDp3{"dp3", 3, 1}, kTp2{"tp2", 2, 2},
    kTp2Dp2{"tp2.dp2", 4, 2}, kDp4{"dp4", 4, 1};

inline const Arguments kOnGpu{"--run.device=cuda", "--run.share_gpus", "--run.launch=threads"};
inline const Arguments kOnCpu{"--run.device=cpu"};
inline const Arguments kEager{"--train.cuda_graph=false"};
inline const Arguments kCaptured{"--train.cuda_graph=true"};
// A rate at which ranks and devices choose the same experts: a near tie that parts changes the next
// digits.
inline const Arguments kGentle{"--optim.lr=0.002"};
inline const Arguments kLonger{"--train.steps=20", "--checkpoint.interval=0"};

class RanksOnGpu : public GpuTest {
 protected:
  std::string at(const std::string& name) const { return dir / name; }
  // Twelve sequences a step, which one to four ranks share; all kinds of layers.
  Arguments model(const std::string& name, const Ranks& r) const {
    return tiny(at(name), r.ranks, r.ep) +
           Arguments{text("--parallel.tp={}", r.tp),
                     "--train.global_batch=12",
                     text("--train.micro_batch={}", 12 * r.tp / r.ranks),
                     "--model.kv_heads=4",
                     "--model.layers=3",
                     "--model.dense_layers=[1]",
                     "--model.d_ffn_dense=48",
                     "--moe.shared_d_ffn=16",
                     "--moe.shared_gate",
                     "--router.bias_rate=0.001",
                     "--router.z_coef=0.001",
                     "--guard.comm_timeout_s=20"};
  }
  void train_at(const std::string& name, const Ranks& r, const Arguments& more) const {
    train(model(name, r) + more);
  }
  void stop_after(const std::string& from, const std::string& to, int step) const {
    std::filesystem::create_directories(at(to) + "/checkpoints");
    std::filesystem::copy(checkpoint_path(at(from), step), checkpoint_path(at(to), step),
                          std::filesystem::copy_options::recursive);
  }
  void expect_equal(const std::string& a, const std::string& b) const {
    const auto left = steps(at(a)), right = steps(at(b));
    ASSERT_FALSE(left.empty());
    for (const auto& [step, r] : left) {
      ASSERT_TRUE(right.contains(step)) << step;
      for (const char* field : {"loss", "aux", "z", "gnorm", "lr", "tokens", "bal", "entropy"}) {
        EXPECT_EQ(r[field], right.at(step)[field])
            << field << " of step " << step << " in " << a << " and " << b;
      }
    }
  }
  // Captured steps in bf16 are those that run one by one, and two runs are equal: losses and files.
  void expect_captured_is_eager(const Ranks& r) const {
    const Arguments bf16 =
        kOnGpu + Arguments{"--train.steps=20", "--precision.recipe=bf16", "--train.micro_batch=3",
                           "--optim.state_dtype=bf16", "--data.seq_len=256"};
    const auto named = [&](const char* what) { return text("{}-{}", what, r.name); };
    train_at(named("captured"), r, bf16 + kCaptured);
    train_at(named("again"), r, bf16 + kCaptured);
    train_at(named("eager"), r, bf16 + kEager);
    expect_equal(named("captured"), named("eager"));
    expect_equal(named("captured"), named("again"));
    const auto all = digests(checkpoint_path(at(named("captured")), 20));
    EXPECT_EQ(all, digests(checkpoint_path(at(named("eager")), 20)));
    EXPECT_EQ(all, digests(checkpoint_path(at(named("again")), 20)));
  }
  // A run that goes on from its third step has the state of one that never stopped.
  void expect_resume_is_bitwise(const Ranks& r) const {
    const Arguments each = kOnGpu + Arguments{"--precision.recipe=bf16", "--checkpoint.interval=3",
                                              "--checkpoint.keep_last=10"};
    train_at("whole", r, each);
    stop_after("whole", "rest", 3);
    train_at("rest", r, each);
    EXPECT_EQ(digests(checkpoint_path(at("rest"), 6)), digests(checkpoint_path(at("whole"), 6)));
  }
  // A rate that breaks the weights ends the run after as many skipped steps as it allows.
  void expect_bad_run_halts(const Ranks& r) const {
    const ProgramResult result =
        run(model("bad", r) + kOnGpu +
            Arguments{"--optim.lr=1e30", "--optim.warmup_steps=0", "--train.steps=20"});
    EXPECT_EQ(result.code, kExitNumerical) << result.err;
    EXPECT_EQ(events(at("bad"), "halt").size(), 1u);
    EXPECT_EQ(events(at("bad"), "skip").size(), 3u);
  }
  void expect_refused(const Ranks& r, const Arguments& more, int code,
                      const std::string& what) const {
    const ProgramResult result = run(model("refused", r) + more);
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_NE(result.err.find(what), std::string::npos) << result.err;
  }
  TemporaryDirectory dir;
};

}  // namespace moiety::app
