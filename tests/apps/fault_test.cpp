// A run's own knowledge of its faults: errors, memory, the guard. faults.py tests processes that
// are killed or stopped; tests/train has findings, verdicts and stacks.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <set>
#include <thread>

#include "apps/moiety/config/train_options.h"
#include "apps/moiety/report/run_files.h"
#include "moiety/base/parallel.h"
#include "moiety/comm/thread_group.h"
#include "moiety/train/memory_estimate.h"
#include "moiety/train/precision.h"
#include "moiety/train/trainer.h"
#include "tests/apps/train_helpers.h"
#include "tests/support/model_batch.h"

namespace moiety::app {
namespace {

using namespace train;

TEST(Errors, TravelWithTheirExitCode) {
  const Failure f =
      from_peers("rank 2 failed: " + to_peers({ErrorKind::kData, "t.tok (exit code 9) is cut"}));
  EXPECT_EQ(f.code(), kExitData);
  EXPECT_EQ(f.text, "rank 2 failed: t.tok (exit code 9) is cut");
  EXPECT_EQ(from_peers("rank 1 has ended").code(), kExitComm);
}

std::vector<std::string> options_arguments(const Arguments& arguments) {
  std::vector<std::string> overrides;
  for (const std::string& a : arguments) {
    if (a.starts_with("--") && a.find('.') < a.find('=')) overrides.push_back(a);
    if (a.starts_with("--run=")) overrides.push_back("--run.dir=" + a.substr(6));
  }
  return overrides;
}

Options options_of(const Arguments& arguments) {
  return load_config({}, options_arguments(arguments)).options;
}

// Records the tensors that a pass shows: "0 attn.qkv", "0 back attention", ...
class Recorder final : public TensorProbe {
 public:
  void enter(int64_t layer, bool backward) override { layer_ = layer, backward_ = backward; }
  void stored(const StoredTensor& t) override {
    seen.push_back(text("{} {}{}", layer_, backward_ ? "back " : "", t.operation));
  }
  // Whether the list holds these, in this order.
  bool has_in_order(const std::vector<std::string>& wanted) const {
    auto at = seen.begin();
    for (const std::string& w : wanted) {
      at = std::find(at, seen.end(), w);
      if (at == seen.end()) return false;
    }
    return true;
  }
  std::vector<std::string> seen;

 private:
  int64_t layer_ = -1;
  bool backward_ = false;
};

// With rows that are copied; those that experts read where they lie are seen as the norm's output.
TEST(TensorProbe, SeesEveryOperationAndChangesNothing) {
  const Arguments copies{"--moe.layout=expert"};
  const TrainConfig config = train_config(options_of(tiny("r") + copies));
  comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) {
    RankModel model(config, Grid{}, 128, world);
    model::Transformer& transformer = model.transformer();
    optim::DistributedOptimizer optimizer(transformer.parameter_specs(),
                                          {.weights = DType::kFloat32}, model.groups());
    transformer.bind(optimizer.parameters());
    optimizer.initialize(1, Stream());
    data::BatchBuffer batch(8, 16, {});
    batch.fill(*data::synthetic_source("uniform", 16, 264, 1), std::vector<data::SampleRef>(8));
    Arena arena("activations");
    Recorder probe;
    std::vector<double> losses;
    for (TensorProbe* p : {static_cast<TensorProbe*>(nullptr), static_cast<TensorProbe*>(&probe)}) {
      const ArenaScope scope(arena);
      const model::StepSums sums = transformer.make_sums();
      transformer.set_probe(p);
      transformer.forward(model_batch(batch.batch()), 512, sums, arena, Stream());
      transformer.backward(model_batch(batch.batch()), Stream());
      losses.push_back(sums.read().loss_sum);
    }
    EXPECT_EQ(losses[0], losses[1]);
    EXPECT_TRUE(probe.has_in_order({"-1 embedding",
                                    "0 layers.0.attn_norm.weight",
                                    "0 attn.qkv",
                                    "0 norm_rope",
                                    "0 attention",
                                    "0 attn.o",
                                    "0 router",
                                    "0 dispatch",
                                    "0 experts.fc1",
                                    "0 experts.fc2",
                                    "0 combine",
                                    "1 attn.qkv",
                                    "1 combine",
                                    "-1 final_norm.weight",
                                    "-1 loss",
                                    "-1 back final_norm.weight",
                                    "1 back combine",
                                    "1 back experts.fc2",
                                    "1 back dispatch",
                                    "1 back layers.1.moe.experts.fc2.weight",
                                    "1 back attention",
                                    "0 back router",
                                    "0 back attn.qkv",
                                    "0 back layers.0.attn_norm.weight",
                                    "-1 back embed.weight"}));
    model.close();
  });
}

struct MemoryCase {
  const char* name;
  int ranks, ep;
  Arguments more;
};

TEST(Memory, TheEstimateIsWhatARankTakes) {
  const Arguments large{"--data.seq_len=128", "--model.d_model=64", "--train.micro_batch=4",
                        "--train.global_batch=16"};
  const MemoryCase cases[] = {
      {"fp32", 1, 1, {}},
      {"bf16", 1, 1, {"--precision.recipe=bf16", "--optim.state_dtype=bf16"}},
      {"ep", 4, 2, {}},
      {"ep bf16", 2, 2, {"--precision.recipe=bf16"}},
      {"shared", 1, 1, {"--moe.shared_d_ffn=64", "--moe.shared_gate", "--model.tie_embeddings"}},
      {"dense", 1, 1, {"--model.dense_layers=[0,1]", "--model.d_ffn_dense=128"}},
      {"tp", 2, 1, {"--parallel.tp=2", "--moe.shared_d_ffn=64", "--moe.shared_gate"}},
      {"tp bf16 tied",
       4,
       2,
       {"--parallel.tp=2", "--precision.recipe=bf16", "--model.tie_embeddings",
        "--model.vocab=288"}},
      {"tp dense",
       2,
       1,
       {"--parallel.tp=2", "--model.dense_layers=[0,1]", "--model.d_ffn_dense=128"}},
      {"gtp", 4, 1, {"--parallel.gtp=2", "--parallel.egtp=4", "--model.vocab=288"}},
      {"gtp mxfp8",
       4,
       2,
       {"--parallel.gtp=4", "--parallel.egtp=2", "--precision.recipe=mxfp8", "--model.vocab=320"}},
      {"fp8_block", 1, 1, {"--precision.recipe=fp8_block", "--precision.pow2_scales=false"}},
      {"mxfp8 ep", 4, 2, {"--precision.recipe=mxfp8"}},
      {"mxfp8 dense",
       1,
       1,
       {"--precision.recipe=mxfp8", "--model.dense_layers=[0]", "--model.d_ffn_dense=256",
        "--moe.shared_d_ffn=64"}},
      {"nvfp4", 2, 2, {"--precision.recipe=nvfp4", "--precision.keep_last=1"}},
      {"nvfp4 rows", 1, 1, {"--precision.recipe=nvfp4", "--precision.weight_2d=false"}},
      {"recompute moe", 2, 2, {"--memory.recompute=moe", "--model.layers=6"}},
      {"recompute full", 1, 1, {"--memory.recompute=full", "--model.layers=6"}},
      {"recompute mxfp8",
       2,
       2,
       {"--memory.recompute=full", "--model.layers=6", "--precision.recipe=mxfp8",
        "--moe.shared_d_ffn=64", "--moe.shared_gate"}},
      {"delayed", 2, 2, {"--moe.delay_wgrad", "--model.layers=6"}},
      {"zero-copy", 2, 2, {"--ep.zero_copy=auto", "--ep.depth=3"}},
      {"zero-copy recompute", 2, 2, {"--ep.zero_copy=auto", "--memory.recompute=moe"}},
      {"shared beside", 2, 2, {"--ep.overlap=shared", "--moe.shared_d_ffn=64"}},
      {"rank-major", 4, 4, {"--moe.layout=rank", "--ep.zero_copy=auto", "--moe.top_k=4"}},
      {"rank-major again", 2, 2, {"--moe.layout=rank", "--memory.recompute=moe"}},
      {"batches in turn", 2, 2, {"--ep.overlap=micro_batch", "--ep.zero_copy=auto"}},
      {"delayed mxfp8",
       2,
       2,
       {"--moe.delay_wgrad", "--memory.recompute=moe", "--precision.recipe=mxfp8",
        "--moe.shared_d_ffn=64", "--precision.dispatch=mxfp8"}},
      {"dispatch fp8_block",
       2,
       2,
       {"--precision.recipe=bf16", "--precision.dispatch=fp8_block", "--memory.recompute=full"}},
      {"narrow gradients",
       4,
       1,
       {"--optim.grad_dtype=bf16", "--precision.recipe=bf16", "--parallel.gtp=2",
        "--model.vocab=4096", "--memory.recompute=full", "--memory.loss_chunk=64"}},
      {"delayed scaling", 2, 2, {"--precision.recipe=fp8_tensor", "--precision.scaling=delayed"}},
      {"recompute dense",
       1,
       1,
       {"--memory.recompute=full", "--model.layers=4", "--model.dense_layers=[0,1,2,3]",
        "--model.d_ffn_dense=256", "--precision.recipe=fp8_block"}},
  };
  for (const MemoryCase& c : cases) {
    Options o = options_of(tiny("r", c.ranks, c.ep) + large + c.more);
    o.run.ranks = c.ranks;
    const TrainConfig config = train_config(o);
    const Grid grid = check_layout(config);
    const MemoryEstimate m = estimate_memory(config, grid);
    std::atomic<int64_t> master{0}, moments{0};
    comm::run_thread_ranks(c.ranks, {}, [&](comm::Communicator& world) {
      const int64_t tokens = 4 * 128;
      RankModel model(config, grid, tokens, world);
      optim::OptimizerConfig oc;
      oc.weights = storage_dtype(config);
      oc.moments = config.optim.state_dtype;
      oc.main_grad = config.optim.grad_dtype;
      WeightGathering gathering(config, model.groups(), int64_t{1} << 33);
      optim::DistributedOptimizer optimizer(
          training_specs(config, model.transformer(), grid, world.rank()), oc, model.groups(),
          gathering.peers(false), gathering.peers(true));
      model.transformer().bind(optimizer.parameters(), gathering.bind(optimizer));
      optimizer.initialize(1, Stream());
      int64_t weights = 0;
      for (const optim::Parameter& p : optimizer.parameters()) {
        weights += p.weight.bytes();
        for (const QuantizedView& q : p.quantized) {
          for (const TensorView* x : {&q.row_data, &q.row_scales, &q.col_data, &q.col_scales}) {
            weights += x->bytes();
          }
        }
      }
      EXPECT_EQ(weights, m.parameters) << c.name;
      for (const optim::StatePiece& p : optimizer.state_view()) {
        const int64_t bytes =
            byte_size(p.dtype, std::accumulate(p.box.size.begin(), p.box.size.begin() + p.box.rank,
                                               int64_t{1}, std::multiplies<>()));
        (p.slot == "weight" ? master : moments) += bytes;
      }
      const auto source = data::synthetic_source("uniform", 128, 264, 1);
      data::BatchBuffer batch(4, 128, {});
      const std::vector<data::SampleRef> samples{{0, 1}, {0, 2}, {0, 3}, {0, 4}};
      batch.fill(*source, samples);
      ExpertCapacity capacity(config, model.transformer(), tokens / grid.tp);
      Arena arena("activations"), other("activations");
      const bool turns = model.transformer().takes_turns();
      model.share_rows(capacity.rows(), arena, turns ? &other : nullptr);
      EXPECT_EQ(model.expert_parallel_bytes(), m.expert_parallel) << c.name;
      const model::StepSums sums = model.transformer().make_sums();
      {
        const ArenaScope scope(arena), others(other);
        const auto step = gathering.begin_step("train", 1);
        const model::Batch pass = model_batch(batch.batch());
        model.transformer().forward(pass, capacity.rows(), sums, arena, Stream());
        if (turns) {
          model.transformer().backward_and_forward(pass, pass, capacity.rows(), sums, other,
                                                   Stream());
        }
        model.transformer().backward(pass, Stream());
        gathering.flush();
      }
      EXPECT_NEAR(double(arena.peak() + other.peak()), double(m.arena()), 0.03 * double(m.arena()))
          << c.name;
      model.close();
    });
    // No rows of padding, which ranks have as well (memory_test.cpp).
    if (grid.tp * grid.gtp == 1) {
      EXPECT_EQ(master, m.master * c.ranks) << c.name;
      EXPECT_EQ(moments, m.moments * c.ranks) << c.name;
    }
  }
}

TEST(Memory, TheNearestChangeFits) {
  Options o = options_of(tiny("r") + Arguments{"--train.micro_batch=8", "--data.seq_len=512",
                                               "--model.vocab=8192", "--memory.loss_chunk=4096"});
  const Grid grid = check_layout(train_config(o));
  const auto fit = [&](double share) {
    const TrainConfig config = train_config(o);
    const int64_t needed = estimate_memory(config, grid).total();
    return nearest_fit(config, grid, int64_t(share * double(needed))).value_or("none");
  };
  EXPECT_EQ(fit(0.99), "memory.loss_chunk = 256");
  o.memory.loss_chunk = 64;
  EXPECT_EQ(fit(0.99), "checkpoint.async = false");
  const std::string smaller = fit(0.7);
  ASSERT_TRUE(smaller.starts_with("train.micro_batch = ")) << smaller;
  const auto needs = [&](int64_t micro_batch) {
    Options changed = o;
    changed.train.micro_batch = micro_batch;
    return double(estimate_memory(train_config(changed), grid).total());
  };
  const int64_t micro_batch = std::stoll(smaller.substr(20));
  EXPECT_LE(needs(micro_batch), 0.7 * needs(8));
  EXPECT_GT(needs(2 * micro_batch), 0.7 * needs(8));
  EXPECT_EQ(fit(0.01), "none");
  const std::string report = memory_report(train_config(o), grid, 1 << 20);
  EXPECT_NE(report.find("; it may take 1.0 MiB; no batch fits"), std::string::npos) << report;
}

TEST(Memory, RecomputationIsTriedBeforeASmallerBatch) {
  Options o = options_of(tiny("r") + Arguments{"--train.micro_batch=8", "--data.seq_len=512",
                                               "--model.layers=12", "--memory.loss_chunk=64",
                                               "--checkpoint.async=false"});
  const Grid grid = check_layout(train_config(o));
  const auto needs = [&](const char* mode) {
    Options changed = o;
    changed.memory.recompute = mode;
    return estimate_memory(train_config(changed), grid).total();
  };
  const int64_t none = needs("none"), moe = needs("moe"), full = needs("full");
  EXPECT_EQ(needs("norm"), none);
  EXPECT_LT(double(moe), 0.8 * double(none));
  EXPECT_LT(double(full), 0.8 * double(moe));
  const auto fit = [&](int64_t limit) {
    return nearest_fit(train_config(o), grid, limit).value_or("none");
  };
  EXPECT_EQ(fit(moe), "memory.recompute = moe");
  EXPECT_EQ(fit(moe - 1), "memory.recompute = full");
  EXPECT_TRUE(fit(full - 1).starts_with("train.micro_batch = ")) << fit(full - 1);
  o.memory.recompute = "full";
  EXPECT_EQ(fit(full - 1), "train.micro_batch = 4");
}

TEST(Memory, MoreThanTheMachineHasEndsTheRunAtOnce) {
  const TemporaryDirectory dir;
  const ProgramResult result =
      run(tiny(dir / "r", 2, 1) + Arguments{"--model.d_model=8192", "--model.layers=200",
                                            "--model.heads=64", "--moe.d_ffn=16384"});
  EXPECT_EQ(result.code, kExitMemory);
  const std::string line = result.last_line();
  EXPECT_NE(line.find(" failed: out of memory before the first step; a rank needs "),
            std::string::npos)
      << line;
  EXPECT_NE(line.find("no batch fits"), std::string::npos) << line;
}

// The same tokens in every sample, but for one step's, which are random: always, or (fickle) only
// the first time that they are read, as if the memory had been wrong.
class DisturbedSource final : public data::SampleSource {
 public:
  DisturbedSource(uint64_t first, uint64_t count, bool fickle)
      : first_(first), count_(count), fickle_(fickle) {}
  int64_t seq_len() const override { return 16; }
  std::vector<data::SamplerSource> sources() const override {
    return {{{1, 1 << 20, uint64_t{1} << 32}, 1 << 16}};
  }
  double text_bytes(int, uint64_t) const override { return 0; }
  void read(data::SampleRef sample, const data::SampleRow& row) const override {
    const bool disturbed =
        sample.index - first_ < count_ && !(fickle_ && read_before(sample.index));
    const auto token = [&](size_t s) {
      return disturbed ? int32_t((sample.index * 131 + s * s * 7919) % 251) : int32_t(s);
    };
    for (size_t s = 0; s < row.token.size(); ++s) {
      row.token[s] = token(s);
      row.target[s] = token(s + 1);
    }
  }

 private:
  bool read_before(uint64_t index) const { return !seen_.insert(index).second; }

  uint64_t first_, count_;
  bool fickle_;
  mutable std::set<uint64_t> seen_;
};

// The message of a run whose loss jumps at step 140; empty if it does not end by it.
std::string disturbed_run(const std::string& directory, bool fickle, int max_skips) {
  const std::vector<std::string> overrides =
      options_arguments(tiny(directory) + Arguments{"--guard.spike_sigma=20", "--train.steps=150",
                                                    text("--guard.max_skips={}", max_skips),
                                                    "--data.shuffle=false", "--log.progress=off"});
  const Config config = load_config({}, overrides);
  RunFiles files(config, 150, true);
  TrainingPlan plan = make_plan(train_config(config.options));
  plan.train = std::make_shared<DisturbedSource>(139 * 8, 8, fickle);
  plan.observer = &files.reporter;
  try {
    comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) {
      set_thread_budget(1);  // small steps, and perhaps a busy machine
      Heartbeat heartbeat(nullptr, 0);
      Trainer(plan, world, heartbeat).run();
    });
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

TEST(Guard, ALossThatJumpsIsSkipped) {
  const TemporaryDirectory dir;
  EXPECT_EQ(disturbed_run(dir / "r", false, 3), "");
  const auto skips = events(dir / "r", "skip");
  ASSERT_EQ(skips.size(), 1u);
  EXPECT_EQ(skips[0]["step"], 140);
  EXPECT_NE(skips[0]["why"].get<std::string>().find(" is a spike"), std::string::npos);
  const auto by_step = steps(dir / "r");
  EXPECT_EQ(by_step.at(140)["skipped"], true);
  EXPECT_EQ(by_step.at(141)["skipped"], false);
  // The spike has changed nothing.
  EXPECT_NEAR(by_step.at(141)["loss"].get<double>(), by_step.at(139)["loss"].get<double>(), 0.01);
}

TEST(Guard, TheReplayTellsDataFromHardware) {
  const TemporaryDirectory dir;
  const std::string same = disturbed_run(dir / "same", false, 1);
  EXPECT_NE(same.find("step 140: 1 step in a row was skipped; the last: loss "), std::string::npos);
  EXPECT_NE(same.find("the replay gives the same bits"), std::string::npos) << same;
  const std::string other = disturbed_run(dir / "other", true, 1);
  EXPECT_NE(other.find("not reproduced: suspect hardware; checksums"), std::string::npos) << other;
  const auto failure = nlohmann::json::parse(read_all(dir / "other/failures/rank0-step140.json"));
  EXPECT_EQ(failure["kind"], "nan");
  EXPECT_NE(failure["checksum"], failure["checksum_of_replay"]);
}

}  // namespace
}  // namespace moiety::app
