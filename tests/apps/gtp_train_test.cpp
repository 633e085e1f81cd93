// Training with weights that gtp and egtp cut, alone and with data, tensor and expert parallelism:
// through the program itself, and, where the executor is looked at, rank by rank.
#include <array>
#include <cmath>
#include <filesystem>

#include "apps/moiety/exit_code.h"
#include "moiety/checkpoint/loader.h"
#include "moiety/checkpoint/saver.h"
#include "moiety/model/step_trace.h"
#include "moiety/train/evaluation.h"
#include "tests/apps/train_rank.h"

namespace moiety::app {
namespace {

using namespace train;

namespace fs = std::filesystem;

struct Cut {
  const char* name;
  int ranks = 1, tp = 1, gtp = 1, ep = 1, egtp = 1;
};
constexpr Cut kOne{"one"}, kGtp2{"gtp2", 2, 1, 2}, kGtp2Egtp2{"gtp2.egtp2", 2, 1, 2, 1, 2},
    kGtp2Ep2{"gtp2.ep2", 2, 1, 2, 2}, kGtp4{"gtp4", 4, 1, 4}, kTp2Gtp2{"tp2.gtp2", 4, 2, 2},
    kTp4{"tp4", 4, 4}, kDp4{"dp4", 4}, kEp2Egtp2{"ep2.egtp2", 4, 1, 1, 2, 2};
constexpr Cut kTogether[] = {{"gtp2.dp2.egtp4", 4, 1, 2, 1, 4},
                             {"gtp3.egtp3", 3, 1, 3, 1, 3},
                             {"gtp4.ep2.egtp2", 4, 1, 4, 2, 2},
                             {"tp2.gtp2.ep4", 4, 2, 2, 4},
                             {"tp2.gtp2.dp2.ep2.egtp4", 8, 2, 2, 2, 4}};

// 12 sequences a step on any number of ranks, in `micro_steps` parts; all kinds of layers. Most
// matrices do not fill their shards: on some ranks nothing but padding is left of 32 rows.
Arguments cut_model(const std::string& directory, const Cut& c, int micro_steps = 1) {
  return tiny(directory, c.ranks, c.ep) +
         Arguments{text("--parallel.tp={}", c.tp),
                   text("--parallel.gtp={}", c.gtp),
                   text("--parallel.egtp={}", c.egtp),
                   text("--train.micro_batch={}", 12 * c.tp / c.ranks / micro_steps),
                   "--train.global_batch=12",
                   "--model.kv_heads=4",
                   "--model.layers=3",
                   "--model.dense_layers=[1]",
                   "--model.d_ffn_dense=48",
                   "--moe.shared_d_ffn=16",
                   "--moe.shared_gate",
                   "--router.z_coef=0.001",
                   "--checkpoint.interval=0",
                   "--run.seed=3"};
}

void expect_same_steps(const std::string& run, const std::string& expected) {
  const auto all = steps(expected);
  for (const auto& [step, r] : steps(run)) {
    for (const char* field : {"loss", "aux", "z", "gnorm", "recipe"}) {
      EXPECT_EQ(r[field], all.at(step)[field]) << field << " of step " << step << " in " << run;
    }
  }
}

// ---- Losses.

void losses_equal(std::span<const Cut> cuts, const Arguments& more) {
  const TemporaryDirectory dir;
  const Arguments longer = Arguments{"--train.steps=20"} + more;
  train(cut_model(dir / "one", kOne) + longer);
  const auto one = steps(dir / "one");
  ASSERT_EQ(one.size(), 20u);
  EXPECT_LT(one.at(20)["loss"].get<double>(), one.at(1)["loss"].get<double>() - 0.3);
  for (const Cut& c : cuts) {
    train(cut_model(dir / c.name, c) + longer);
    expect_near(dir / c.name, dir / "one", 1e-4);
  }
}

constexpr Cut kAlone[] = {kGtp2, {"gtp3", 3, 1, 3}, kGtp4, {"gtp2.dp2", 4, 1, 2}, kTp2Gtp2};

TEST(GtpTrain, RanksTrainAsOne) { losses_equal(kAlone, {"--router.bias_rate=0.001"}); }

TEST(GtpTrain, RanksDescendAsOne) { losses_equal(kAlone, kDescent); }

TEST(GtpTrain, RanksThatCutExpertsTrainAsOne) {
  losses_equal(kTogether, {"--router.bias_rate=0.001"});
}

TEST(GtpTrain, RanksThatCutExpertsDescendAsOne) { losses_equal(kTogether, kDescent); }

TEST(GtpTrain, MicroStepsAndTiedEmbeddings) {
  const TemporaryDirectory dir;
  const Arguments tied = kDescent + Arguments{"--train.steps=10", "--model.tie_embeddings"};
  train(cut_model(dir / "one", kOne, 3) + tied);
  for (const Cut& c : {kGtp2Egtp2, kTp2Gtp2}) {
    train(cut_model(dir / c.name, c, 3) + tied);
    expect_near(dir / c.name, dir / "one", 1e-4);
  }
}

TEST(GtpTrain, AModelWithoutExperts) {
  const TemporaryDirectory dir;
  const Arguments dense{"--train.steps=10", "--model.dense_layers=[0,1,2]"};
  train(cut_model(dir / "one", kOne) + dense);
  for (const Cut& c : {kGtp2, kGtp4}) {
    train(cut_model(dir / c.name, c) + dense);
    expect_losses_near(dir / c.name, dir / "one", 1e-4);
  }
}

// The differences are the order of sums, as in bf16; maxima of activations that are taken over a
// rank's tokens (nvfp4, fp8_tensor); and blocks along tokens that begin anew on every rank.
TEST(GtpTrain, RecipesDifferLittle) {
  const TemporaryDirectory dir;
  for (const char* name : {"bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"}) {
    const Arguments recipe{"--train.steps=20", text("--precision.recipe={}", name)};
    const std::string one = dir / text("{}-one", name);
    train(cut_model(one, kOne) + recipe);
    for (const Cut& c : {kGtp2Egtp2, kGtp2Ep2}) {
      const std::string many = dir / text("{}-{}", name, c.name);
      train(cut_model(many, c) + recipe);
      expect_losses_near(many, one, 0.01);
    }
  }
}

// The formats of the shards change in the middle, and with them transports, executor and plans.
TEST(GtpTrain, TheRecipeSwitches) {
  const TemporaryDirectory dir;
  for (const char* later : {"bf16", "fp8_tensor", "mxfp8"}) {
    const Arguments to_later{
        "--train.steps=12",          "--precision.recipe=nvfp4",
        "--precision.switch_step=7", text("--precision.switch_recipe={}", later),
        "--checkpoint.interval=6",   "--checkpoint.keep_last=10"};
    const std::string one = dir / text("one-{}", later), two = dir / text("two-{}", later);
    train(cut_model(one, kOne) + to_later);
    train(cut_model(two, kGtp2Egtp2) + to_later);
    expect_losses_near(two, one, 0.01);
    for (const auto& [step, r] : steps(two)) EXPECT_EQ(r["recipe"], step < 7 ? "nvfp4" : later);
    const std::string resumed = dir / text("resumed-{}", later);
    fs::create_directories(resumed + "/checkpoints");
    fs::copy(checkpoint_path(two, 6), checkpoint_path(resumed, 6));
    train(cut_model(resumed, kGtp2Egtp2) + to_later);
    expect_same_steps(resumed, two);
    EXPECT_EQ(digests(checkpoint_path(resumed, 12)), digests(checkpoint_path(two, 12)));
  }
}

TEST(GtpTrain, GradientsThatTravelInBf16) {
  const TemporaryDirectory dir;
  const Arguments longer{"--train.steps=20", "--precision.recipe=bf16"};
  train(cut_model(dir / "one", kOne) + longer);
  for (const Cut& c : {kGtp2Egtp2, kTogether[0]}) {
    const std::string exact = dir / text("{}-exact", c.name);
    train(cut_model(exact, c) + longer);
    train(cut_model(dir / c.name, c) + longer + Arguments{"--precision.grad_reduce=bf16"});
    expect_losses_near(dir / c.name, dir / "one", 0.01);
    EXPECT_NE(steps(dir / c.name).at(20)["loss"], steps(exact).at(20)["loss"]);
  }
}

// Gradients are added up in bf16: of several micro-steps, and of two uses of a tied table, each
// contribution is rounded. Losses stay within 1 % over 20 steps (measured: docs/numerics.md).
TEST(GtpTrain, GradientsThatAreKeptInBf16) {
  const TemporaryDirectory dir;
  const Arguments longer{"--train.steps=20", "--precision.recipe=bf16", "--model.tie_embeddings"};
  for (const Cut& c : {kOne, kGtp2Egtp2, kTogether[0], kTp2Gtp2}) {
    const std::string wide = dir / text("{}-fp32", c.name), narrow = dir / c.name;
    train(cut_model(wide, c, 3) + longer);
    train(cut_model(narrow, c, 3) + longer + Arguments{"--optim.grad_dtype=bf16"});
    expect_losses_near(narrow, wide, 0.01);
    EXPECT_NE(steps(narrow).at(20)["loss"], steps(wide).at(20)["loss"]);
  }
}

TEST(GtpTrain, RecomputationAndDelayChangeNoBit) {
  const TemporaryDirectory dir;
  for (const char* recipe : {"fp32", "nvfp4"}) {
    const std::string none = dir / recipe;
    const Arguments common{text("--precision.recipe={}", recipe)};
    train(cut_model(none, kGtp2Egtp2, 2) + common);
    for (const auto& [mode, delay] :
         {std::pair("moe", false), {"full", false}, {"none", true}, {"full", true}}) {
      const std::string again = none + mode + (delay ? "-delayed" : "");
      train(cut_model(again, kGtp2Egtp2, 2) + common +
            Arguments{text("--memory.recompute={}", mode), text("--moe.delay_wgrad={}", delay)});
      expect_same_steps(again, none);
      EXPECT_EQ(digests(checkpoint_path(again, 6)), digests(checkpoint_path(none, 6)));
    }
  }
}

// ---- Checkpoints.

TEST(GtpTrain, InitialWeightsDoNotDependOnTheLayout) {
  const TemporaryDirectory dir;
  const Arguments still{"--train.steps=1", "--optim.lr=0", "--optim.min_lr=0"};
  train(cut_model(dir / "one", kOne) + still);
  const auto one = digests(checkpoint_path(dir / "one", 1));
  for (const Cut& c : kTogether) {
    train(cut_model(dir / c.name, c) + still);
    const auto many = digests(checkpoint_path(dir / c.name, 1));
    ASSERT_EQ(many.size(), one.size());
    for (const auto& [name, digest] : one) {
      if (name.starts_with("weight/")) {
        EXPECT_EQ(digest, many.at(name)) << name << " under " << c.name;
      }
    }
  }
}

TEST(GtpTrain, ResumeUnderTheSameLayoutIsBitwise) {
  const TemporaryDirectory dir;
  for (const char* recipe : {"bf16", "nvfp4"}) {
    const Arguments keep{"--checkpoint.interval=3", "--checkpoint.keep_last=10",
                         text("--precision.recipe={}", recipe), "--data.shuffle=true"};
    const std::string whole = dir / text("{}-whole", recipe), part = dir / text("{}-part", recipe);
    train(cut_model(whole, kGtp2Egtp2) + keep);
    fs::create_directories(part + "/checkpoints");
    fs::copy(checkpoint_path(whole, 3), checkpoint_path(part, 3));
    train(cut_model(part, kGtp2Egtp2) + keep);
    EXPECT_EQ(steps(part).begin()->first, 4);
    expect_same_steps(part, whole);
    EXPECT_EQ(digests(checkpoint_path(part, 6)), digests(checkpoint_path(whole, 6)));
  }
}

TEST(GtpTrain, ResumesUnderAnotherLayout) {
  const TemporaryDirectory dir;
  const Arguments keep{"--checkpoint.interval=3", "--checkpoint.keep_last=10", "--train.steps=13"};
  const std::string whole = dir / "whole";
  train(cut_model(whole, kTp2Gtp2) + keep);
  const std::string saved = checkpoint_path(whole, 3);
  for (const Cut& c : {kOne, kGtp4, kTp4, kDp4, kEp2Egtp2}) {
    save_again(saved, cut_model(dir / text("again-{}", c.name), c));
    EXPECT_EQ(digests(checkpoint_path(dir / text("again-{}", c.name), 3)), digests(saved))
        << c.name;
    const std::string part = dir / c.name;
    fs::create_directories(part + "/checkpoints");
    fs::copy(saved, checkpoint_path(part, 3));
    const ProgramResult result = run(cut_model(part, c) + keep);
    ASSERT_EQ(result.code, kExitDone) << result.err;
    EXPECT_NE(result.err.find("saved under another layout"), std::string::npos);
    EXPECT_EQ(steps(part).begin()->first, 4);
    expect_near(part, whole, 1e-4);
  }
}

// ---- Evaluation, and values that are not finite.

TEST(GtpTrain, EvaluatesBetweenSteps) {
  const TemporaryDirectory dir;
  const std::string valid = write_tokens(dir / "v.tok", {ramp(400)});
  const Arguments eval{"--data.valid=" + valid, "--eval.samples=5", "--eval.every=2"};
  train(cut_model(dir / "one", kOne) + eval);
  const auto one = events(dir / "one", "eval");
  ASSERT_EQ(one.size(), 4u);
  for (const Cut& c : {kGtp2, kTogether[2]}) {
    train(cut_model(dir / c.name, c) + eval);
    expect_near(dir / c.name, dir / "one", 1e-4);
    const auto many = events(dir / c.name, "eval");
    ASSERT_EQ(many.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_EQ(many[i]["tokens"], one[i]["tokens"]);
      const double loss = one[i]["loss"].get<double>();
      EXPECT_NEAR(many[i]["loss"].get<double>(), loss, 1e-5 * loss) << c.name;
    }
  }
  // One rank reads what two have saved.
  const ProgramResult again =
      run({"eval", dir / "gtp2", "--data=" + valid, "--samples=5", "--run.device=cpu"});
  ASSERT_EQ(again.code, kExitDone) << again.err;
  const double loss = events(dir / "gtp2", "eval").back()["loss"].get<double>();
  EXPECT_NEAR(nlohmann::json::parse(again.out)["loss"].get<double>(), loss, 1e-5 * loss);
}

// The checkpoint `from` with one weight that is NaN, as that of the run `to`.
void save_with_nan(const std::string& from, const std::string& to, const std::string& name,
                   int64_t element) {
  const checkpoint::Manifest manifest = checkpoint::read_manifest(from);
  optim::StateView view;
  std::vector<Tensor> memory;
  for (const auto& [tensor, entry] : manifest.tensors) {
    for (const auto& [slot, stored] : entry.slots) {
      memory.emplace_back(stored.dtype, entry.shape, "state");
      optim::Box box;
      box.rank = int(entry.shape.size());
      std::copy(entry.shape.begin(), entry.shape.end(), box.size.begin());
      view.push_back({tensor, slot, stored.dtype, entry.shape, box, memory.back().view().raw()});
    }
  }
  fs::create_directories(to);
  comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) {
    checkpoint::RunState state = checkpoint::load(from, view, {}, world.bootstrap());
    state.layout = {};
    for (const optim::StatePiece& p : view) {
      if (p.tensor == name && p.slot == "weight") static_cast<float*>(p.data)[element] = NAN;
    }
    checkpoint::Saver(to + "/checkpoints", world.bootstrap()).save(view, state, Stream());
  });
}

struct Planted {
  const char* tensor;
  int64_t element;  // of [rows, 32] or [experts, 32, 32]
  const char *operation, *sentence;
};

// Each in the shard of the second rank.
TEST(GtpTrain, ANanIsFoundAndNamed) {
  const TemporaryDirectory dir;
  train(cut_model(dir / "r", kGtp2Egtp2) + Arguments{"--train.steps=2"});
  for (const Planted& p :
       {Planted{"layers.2.moe.experts.fc2.weight", (3 * 32 + 20) * 32 + 7, "experts.fc2",
                "layer 2, expert 3: weight layers.2.moe.experts.fc2.weight is nan at [3, 20, 7]"},
        Planted{"layers.0.attn.o.weight", 25 * 32 + 5, "attn.o",
                "layer 0: weight layers.0.attn.o.weight is nan at [25, 5]"}}) {
    const std::string bad = dir / p.operation;
    save_with_nan(checkpoint_path(dir / "r", 2), bad, p.tensor, p.element);
    const ProgramResult result = run(cut_model(bad, kGtp2Egtp2) + Arguments{"--guard.nan=tensor"});
    ASSERT_EQ(result.code, kExitNumerical) << result.err;
    EXPECT_NE(result.last_line().find(text("rank 1: {}", p.sentence)), std::string::npos)
        << result.last_line();
    for (const int rank : {0, 1}) {
      const auto failure =
          nlohmann::json::parse(read_all(bad + text("/failures/rank{}-step3.json", rank)));
      EXPECT_EQ(failure["found_in_step"]["operation"], p.operation) << failure;
    }
  }
}

// ---- The executor.

// Bytes of a shard as it travels, padding included.
int64_t shard_bytes(const optim::ParamSpec& spec, DType storage) {
  const int64_t s = spec.layout->shard_rows(), k = spec.layout->slice_cols();
  if (!spec.format) return byte_size(storage, s * k);
  const auto blocks = [](int64_t n, int64_t block) { return (n + block - 1) / block; };
  switch (spec.format->format) {
    case Format::kFp8Tensor:  // every shard has the scale
      return s * k;
    case Format::kFp8Block128x128:
      return s * k + 4 * (s / 128) * blocks(k, 128);
    case Format::kMxfp8:  // by rows or by columns
      return s * k + s * k / 32;
    case Format::kNvfp4Tile16:
      return s * k / 2 + (s / 16) * (k / 16);
    default:
      ADD_FAILURE() << spec.name;
      return 0;
  }
}

std::string moved(const gtp::StepCounts::Moved& m) {
  return text("{} gathers of {} bytes, {} reduces of {}", m.gathers, m.gathered, m.reduces,
              m.reduced);
}

// Rows of the embedding for all tokens, those that lie at peers if they are spread evenly.
int64_t looked_up(const Rank& rank) {
  const int64_t row = byte_size(storage_dtype(rank.config), rank.config.model.d_model);
  const int64_t gtp = rank.grid.gtp;
  return rank.passes_of_step() * ((gtp - 1) * rank.tokens * row / gtp);
}

// The bytes that a step on demand moves of (dense, experts): every weight to forward and to
// backward, and its gradient; rows of the embedding; the head's two products share one gather.
std::array<gtp::StepCounts::Moved, 2> moved_on_demand(Rank& rank, int64_t wire) {
  const int64_t passes = rank.passes_of_step();
  std::array<gtp::StepCounts::Moved, 2> all;
  for (const optim::Parameter& p : rank.optimizer.parameters()) {
    if (p.bundle == gtp::kNoBundle) continue;
    const gtp::Layout& layout = *p.spec.layout;
    const int64_t members = p.spec.shape.size() == 3 ? p.spec.shape[0] : 1;
    const int64_t shards = passes * members * (layout.gtp_size - 1);
    const int64_t uses = p.spec.name == "head.weight" ? 1 : 2;
    gtp::StepCounts::Moved& m = all[p.spec.expert];
    if (p.spec.name == "embed.weight") {
      m.gathered += looked_up(rank);
      m.reduces += passes;
      m.reduced += passes * (layout.gtp_size - 1) * rank.tokens *
                   (byte_size(storage_dtype(rank.config), layout.cols) + 4);
      continue;
    }
    m.gathers += uses * passes;
    m.gathered += uses * shards * shard_bytes(p.spec, storage_dtype(rank.config));
    m.reduces += passes;
    m.reduced += wire * shards * layout.shard_rows() * layout.slice_cols();
  }
  return all;
}

// The same without what the plan keeps from one use to the next.
std::array<gtp::StepCounts::Moved, 2> moved_by_plan(Rank& rank, const gtp::Plan& plan,
                                                    std::array<gtp::StepCounts::Moved, 2> all) {
  for (gtp::StepCounts::Moved& m : all) m.gathers = m.gathered = 0;
  all[0].gathered = looked_up(rank);
  for (const gtp::Gather& g : plan.gathers) {
    for (const optim::Parameter& p : rank.optimizer.parameters()) {
      if (p.bundle != g.bundle) continue;
      const int64_t members = p.spec.shape.size() == 3 ? p.spec.shape[0] : 1;
      gtp::StepCounts::Moved& m = all[p.spec.expert];
      ++m.gathers;
      m.gathered +=
          members * (p.spec.layout->gtp_size - 1) * shard_bytes(p.spec, storage_dtype(rank.config));
    }
  }
  return all;
}

// A model whose blocks tp may cut in any recipe.
Arguments wide_model(const Cut& cut, int micro_steps) {
  return cut_model("r", cut, micro_steps) +
         Arguments{"--model.d_model=64", "--model.d_ffn_dense=128", "--moe.shared_d_ffn=64",
                   "--moe.d_ffn=64", "--moe.capacity_factor=-1"};
}

void expect_counted_bytes(const Cut& cut, const std::string& recipe, const std::string& wire) {
  const Arguments arguments =
      wide_model(cut, 3) +
      Arguments{"--precision.recipe=" + recipe,
                wire == "narrow" ? "--optim.grad_dtype=bf16" : "--precision.grad_reduce=" + wire};
  const std::string what = text("{} {} {}", cut.name, recipe, wire);
  run_ranks(arguments, [&](Rank& rank) {
    const auto demand = moved_on_demand(rank, wire == "main_grad" ? 4 : 2);
    const gtp::Executor& executor = *rank.gathering.executor();
    rank.step(0, "train");
    EXPECT_FALSE(executor.counts().step.planned) << what;
    EXPECT_EQ(moved(executor.counts().step.dense), moved(demand[0])) << what;
    EXPECT_EQ(moved(executor.counts().step.expert), moved(demand[1])) << what;
    rank.step(1, "train");
    EXPECT_TRUE(executor.counts().step.planned) << what;
    const gtp::Plan* plan = executor.plan_of({"train", rank.passes_of_step()});
    ASSERT_NE(plan, nullptr) << what;
    const auto planned = moved_by_plan(rank, *plan, demand);
    EXPECT_EQ(moved(executor.counts().step.dense), moved(planned[0])) << what;
    EXPECT_EQ(moved(executor.counts().step.expert), moved(planned[1])) << what;
    EXPECT_EQ(planned[0].gathers + planned[1].gathers + plan->report.merges,
              demand[0].gathers + demand[1].gathers)
        << what;
  });
}

// ---- What is known before the run.

using Call = std::pair<std::string, double>;  // kind and bundles; work behind it, ns

// The bundles that the executor learns of are those that are cut. The work of others belongs to the
// call before.
template <class BundleOf>
std::vector<Call> calls_of(std::span<const gtp::TraceEvent> events, const BundleOf& bundle_of) {
  std::vector<Call> calls;
  for (const gtp::TraceEvent& e : events) {
    const gtp::BundleSpec* const bundle =
        e.bundle == gtp::kNoBundle ? nullptr : &bundle_of(e.bundle);
    if (!bundle || bundle->group_size > 1) {
      if (!e.same_call) calls.emplace_back(gtp::name(e.kind), 0.0);
      if (bundle) calls.back().first += " " + bundle->name;
    }
    calls.back().second += e.work_ns;
  }
  return calls;
}

void expect_known_trace(const Cut& cut, const Arguments& more) {
  run_ranks(wide_model(cut, 2) + more, [&](Rank& rank) {
    const TrainConfig& o = rank.config;
    rank.step(0, "train");
    const model::StepShape shape{.grid = rank.grid,
                                 .sequences = o.train.micro_batch,
                                 .seq_len = o.data.seq_len,
                                 .micro_batches = int(rank.passes_of_step()),
                                 .storage = storage_dtype(o),
                                 .wire = gradient_wire(o)};
    const model::StepTrace known =
        model::step_trace(o.model, precision_of_recipe(o, o.precision.recipe), shape,
                          gtp::Policy::for_memory(int64_t{1} << 33));
    const gtp::Executor& executor = *rank.gathering.executor();
    const std::vector<Call> expected = calls_of(
        known.events, [&](gtp::BundleId b) -> const auto& { return known.bundles[b]; });
    const std::vector<Call> run = calls_of(
        executor.trace_of({"train", rank.passes_of_step()}), [&](gtp::BundleId b) -> const auto& {
          return executor.bundle(b);
        });
    ASSERT_EQ(run.size(), expected.size()) << cut.name;
    for (size_t i = 0; i < run.size(); ++i) {
      EXPECT_EQ(run[i].first, expected[i].first) << cut.name << ", call " << i;
      EXPECT_NEAR(run[i].second, expected[i].second, 1e-5 * expected[i].second)
          << cut.name << ", call " << i << ": " << run[i].first;
    }
  });
}

TEST(GtpTrain, TheTraceIsKnownBeforeTheRun) {
  expect_known_trace(kGtp2, {});
  expect_known_trace({"egtp2", 2, 1, 1, 1, 2}, {"--precision.recipe=mxfp8"});
  expect_known_trace(kTogether[2], {"--precision.recipe=nvfp4", "--memory.recompute=moe"});
  expect_known_trace(kTogether[3], {"--memory.recompute=full", "--model.tie_embeddings"});
  expect_known_trace(kTogether[4], {"--precision.recipe=bf16"});
  expect_known_trace(kEp2Egtp2, {"--ep.overlap=wgrad", "--moe.delay_wgrad"});
}

// The bytes of the experts' weights, whose shards are full, in a step on demand: received bytes
// over (G - 1) / G of their elements, in every pass.
void expect_bytes_of_an_element(const Cut& cut, const std::string& recipe, double bytes) {
  for (const int wire : {4, 2}) {
    const Arguments more{"--precision.recipe=" + recipe, "--model.d_model=256", "--moe.d_ffn=128",
                         text("--precision.grad_reduce={}", wire == 2 ? "bf16" : "main_grad")};
    run_ranks(wide_model(cut, 3) + more, [&](Rank& rank) {
      rank.step(0, "train");
      const model::Config& c = rank.config.model;
      const double weights = double(c.moe_layers() * c.router.experts / cut.ep * 3 * 256 * 128);
      const double others = double(cut.egtp - 1) / cut.egtp * double(rank.passes_of_step());
      const gtp::StepCounts::Moved& moved = rank.gathering.executor()->counts().step.expert;
      EXPECT_DOUBLE_EQ(double(moved.gathered + moved.reduced) / (weights * others), bytes + wire)
          << cut.name << ", " << recipe;
    });
  }
}

TEST(GtpTrain, BytesOfAnElementAreThoseOfItsFormat) {
  for (const Cut& cut : {kGtp2Egtp2, kTogether[2]}) {
    expect_bytes_of_an_element(cut, "bf16", 4);
    expect_bytes_of_an_element(cut, "fp8_tensor", 2);
    expect_bytes_of_an_element(cut, "fp8_block", 2 + 8.0 / (128 * 128));
    expect_bytes_of_an_element(cut, "mxfp8", 2.0625);
    expect_bytes_of_an_element(cut, "nvfp4", 1.0078125);
  }
}

TEST(GtpTrain, BytesMovedAreThoseOfTheFormula) {
  for (const char* recipe : {"fp32", "bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"}) {
    for (const char* wire : {"main_grad", "bf16"}) {
      expect_counted_bytes(kGtp2Egtp2, recipe, wire);
    }
  }
  expect_counted_bytes(kTogether[0], "fp8_block", "bf16");
  expect_counted_bytes(kTogether[1], "bf16", "main_grad");
  expect_counted_bytes(kTogether[2], "nvfp4", "main_grad");
  expect_counted_bytes(kTogether[4], "nvfp4", "bf16");
  expect_counted_bytes(kTp2Gtp2, "mxfp8", "bf16");
  expect_counted_bytes(kGtp2Egtp2, "bf16", "narrow");
}

// Losses and gradient norms of 20 steps.
std::vector<double> planned_or_not(const Arguments& arguments, bool planned) {
  std::vector<double> all;
  run_ranks(arguments, [&](Rank& rank) {
    for (int64_t k = 0; k < 20; ++k) {
      const optim::StepReport r = rank.step(k, planned ? "train" : text("train {}", k));
      if (rank.model.world().rank() > 0) continue;
      all.insert(all.end(), r.losses.begin(), r.losses.end());
      all.insert(all.end(), r.class_norms.begin(), r.class_norms.end());
      all.push_back(r.norm);
    }
    const gtp::ExecutorCounts& counts = rank.gathering.executor()->counts();
    EXPECT_EQ(counts.steps, 20);
    EXPECT_EQ(counts.planned, planned ? 19 : 0);
    EXPECT_EQ(counts.departures, 0);
  });
  return all;
}

TEST(GtpTrain, PlannedStepsEqualStepsOnDemand) {
  for (const auto& [recipe, delay] :
       {std::pair("fp32", false), {"mxfp8", true}, {"nvfp4", false}}) {
    for (const Cut& c : {kGtp2Egtp2, kTp2Gtp2}) {
      const Arguments arguments =
          wide_model(c, 3) + Arguments{"--memory.recompute=moe",
                                       text("--precision.recipe={}", recipe),
                                       text("--moe.delay_wgrad={}", delay)};
      const std::vector<double> planned = planned_or_not(arguments, true);
      EXPECT_TRUE(std::isfinite(planned.back()));
      EXPECT_EQ(planned, planned_or_not(arguments, false)) << recipe << " under " << c.name;
    }
  }
}

}  // namespace
}  // namespace moiety::app
