// The memory of a rank by what it is for: what `estimate_memory` says before anything is allocated,
// against what a rank then has, under twelve layouts. Most shards have rows that are padding.
#include "moiety/optim/buffer_layout.h"
#include "moiety/train/memory_estimate.h"
#include "moiety/train/memory_limit.h"
#include "tests/apps/train_rank.h"

namespace moiety::app {
namespace {

using namespace train;

struct Bytes {
  int64_t parameters = 0, main_grad = 0, state = 0;
};

int64_t weight_bytes(const optim::Parameter& p) {
  int64_t bytes = p.weight.bytes();
  for (const QuantizedView& q : p.quantized) {
    for (const TensorView* x : {&q.row_data, &q.row_scales, &q.col_data, &q.col_scales}) {
      bytes += x->bytes();
    }
  }
  return bytes;
}

// The bytes of the parameters. Sums over the ranks of a domain are divided among them.
Bytes bytes_of_parameters(Rank& rank) {
  const bool travels = rank.config.precision.grad_reduce == GradReduce::kBf16;
  Bytes b;
  double summed = 0, owned = 0, frozen_codes = 0;
  for (const optim::Parameter& p : rank.optimizer.parameters()) {
    const int ranks = rank.model.groups().of(p.spec.domain).size();
    b.parameters += weight_bytes(p);
    if (!p.trained()) {
      EXPECT_FALSE(p.grad.defined());
      if (!p.quantized.empty()) frozen_codes += double(p.spec.numel()) / ranks;
      continue;
    }
    b.main_grad += p.grad.bytes();
    owned += double(p.grad.numel()) / ranks;
    if (ranks == 1) continue;
    summed += double(p.grad.numel()) / ranks;
    if (travels) b.main_grad += 2 * 2 * p.grad.numel();
  }
  b.main_grad += std::llround(4 * summed);
  b.state = std::llround(12 * owned + 2 * frozen_codes);
  return b;
}

// Master and moments as the optimizer allocates them: of buckets, whose parameters begin at whole
// 128 elements.
void expect_state(const Rank& rank, const std::vector<optim::ParamSpec>& specs, int64_t estimate) {
  int64_t state = 0, slack = 0;
  for (const optim::BucketLayout& bucket : optim::layout_buffers(specs, rank.grid)) {
    const bool codes = specs[size_t(bucket.slots[0].parameter)].format.has_value();
    const int64_t bytes = !bucket.frozen ? 12 : codes ? 2 : 0;
    state += bytes * bucket.segment();
    slack += bytes * optim::kParameterAlignment * int64_t(1 + bucket.slots.size());
  }
  EXPECT_GE(state, estimate - 12);
  EXPECT_LE(state, estimate + slack);
}

struct LayoutOfMemory {
  const char* name;
  int ranks, tp, gtp, ep, egtp;
};
constexpr LayoutOfMemory kLayouts[] = {
    {"one", 1, 1, 1, 1, 1},
    {"dp2", 2, 1, 1, 1, 1},
    {"dp4.ep2", 4, 1, 1, 2, 1},
    {"tp2.ep2", 2, 2, 1, 2, 1},
    {"tp2.dp2", 4, 2, 1, 1, 1},
    {"gtp2", 2, 1, 2, 1, 1},
    {"gtp3.egtp3", 3, 1, 3, 1, 3},
    {"gtp2.dp2.egtp4", 4, 1, 2, 1, 4},
    {"gtp4.ep2.egtp2", 4, 1, 4, 2, 2},
    {"dp4.ep4", 4, 1, 1, 4, 1},
    {"tp2.gtp2.ep4", 4, 2, 2, 4, 1},
    {"tp2.gtp2.dp2.ep2.egtp2", 8, 2, 2, 2, 2},
};

void expect_estimate(const LayoutOfMemory& l, const Arguments& more) {
  std::string with;
  for (const std::string& argument : more) with += " " + argument;
  SCOPED_TRACE(l.name + with);
  const Arguments arguments = tiny("r", l.ranks, l.ep) +
                              Arguments{text("--parallel.tp={}", l.tp),
                                        text("--parallel.gtp={}", l.gtp),
                                        text("--parallel.egtp={}", l.egtp),
                                        "--data.seq_len=128",
                                        "--train.micro_batch=2",
                                        text("--train.global_batch={}", 4 * l.ranks / l.tp),
                                        "--model.d_model=64",
                                        "--model.kv_heads=4",
                                        "--model.dense_layers=[0]",
                                        "--model.d_ffn_dense=128",
                                        "--moe.shared_d_ffn=64",
                                        "--moe.shared_gate"} +
                              more;
  const TrainConfig config = config_of(arguments);
  const MemoryEstimate m = estimate_memory(config, check_layout(config));
  run_ranks(arguments, [&](Rank& rank) {
    const Bytes b = bytes_of_parameters(rank);
    EXPECT_EQ(b.parameters, m.parameters);
    EXPECT_NEAR(double(b.main_grad), double(m.main_grad), 12);  // parts of elements
    EXPECT_NEAR(double(b.state), double(m.master + m.moments), 36);
    expect_state(
        rank,
        training_specs(config, rank.model.transformer(), rank.grid, rank.model.world().rank()),
        m.master + m.moments);
    EXPECT_EQ(rank.model.expert_parallel_bytes(), m.expert_parallel);
    for (int64_t step = 0; step < 2; ++step) rank.step(step, "train");
    EXPECT_NEAR(double(rank.arena.peak()), double(m.arena()), 0.06 * double(m.arena()))
        << l.name << with;
    const gtp::Executor* const executor = rank.gathering.executor();
    if (!executor) {
      EXPECT_EQ(m.gathered, 0);
      return;
    }
    const gtp::Plan* const plan = executor->plan_of({"train", rank.passes_of_step()});
    ASSERT_NE(plan, nullptr);
    // The calls of weights that nothing cuts take positions in the estimate's plan alone.
    const bool all_cut = l.gtp > 1 && l.egtp > 1;
    EXPECT_NEAR(double(plan->report.bytes), double(m.gathered),
                all_cut ? 0 : 0.02 * double(m.gathered));
    EXPECT_NEAR(double(executor->counts().arena_bytes), double(m.gathered),
                0.03 * double(m.gathered));
  });
}

TEST(MemoryClasses, AreThoseOfARankUnderTwelveLayouts) {
  for (const LayoutOfMemory& l : kLayouts) {
    expect_estimate(l, {});
    expect_estimate(l, {"--precision.recipe=bf16", "--precision.grad_reduce=bf16"});
    if (l.tp == 1) expect_estimate(l, {"--precision.recipe=nvfp4"});
    expect_estimate(l, {"--precision.recipe=fp8_tensor"});
    expect_estimate(l, {"--precision.recipe=mxfp8", "--memory.recompute=moe"});
    expect_estimate(l, {"--moe.activation=relu2", "--moe.expert_bias"});
    expect_estimate(l, {"--train.freeze=[\"embed*\", \"layers.0.*\", \"*.router.*\"]"});
  }
}

TEST(MemoryClasses, FollowWhatIsFrozen) {
  const Arguments some{"--train.freeze=[\"embed*\", \"layers.0.*\", \"*.router.*\"]"},
      experts{"--train.freeze=[\"*.experts.*\"]"},
      head{"--train.freeze=[\"embed*\", \"layers.*\", \"final_norm*\"]"};
  for (const Arguments& frozen : {some, experts, head}) {
    for (const size_t l : {size_t{0}, size_t{6}, size_t{11}}) {
      expect_estimate(kLayouts[l], frozen);
      if (l == 0) expect_estimate(kLayouts[l], frozen + Arguments{"--moe.layout=expert"});
      expect_estimate(kLayouts[l], frozen + Arguments{"--precision.recipe=mxfp8"});
      expect_estimate(kLayouts[l], frozen + Arguments{"--memory.recompute=full"});
    }
    const auto estimate = [](const Arguments& more) {
      const TrainConfig config = config_of(tiny("r") + more);
      return estimate_memory(config, check_layout(config));
    };
    const MemoryEstimate with = estimate(frozen), without = estimate({});
    EXPECT_EQ(with.parameters, without.parameters);
    EXPECT_LT(with.main_grad, without.main_grad);
    EXPECT_LT(with.master, without.master);
    EXPECT_LT(with.moments, without.moments);
    EXPECT_LE(with.arena(), without.arena());
    EXPECT_LT(with.total(), without.total());
  }
}

// With each way in which rows lie before experts.
void expect_estimates_of_rows(const LayoutOfMemory& l, std::initializer_list<Arguments> each) {
  for (const char* layout : {"expert", "rank"}) {
    const std::string rows = text("--moe.layout={}", layout);
    for (const Arguments& more : each) expect_estimate(l, Arguments{rows} + more);
  }
}

// Rows that experts copy, and rows that they read through maps, with all that this changes.
TEST(MemoryClasses, FollowTheLayoutOfRows) {
  expect_estimates_of_rows(
      kLayouts[0],
      {{"--precision.recipe=bf16"},
       {"--moe.delay_wgrad"},
       {"--moe.delay_wgrad", "--memory.recompute=moe"},
       {"--precision.recipe=mxfp8", "--precision.dispatch=mxfp8"},
       {"--precision.recipe=bf16", "--precision.dispatch=fp8_block"},
       {"--precision.recipe=fp8_block", "--moe.delay_wgrad", "--memory.recompute=full"}});
  const auto total = [](const char* layout) {
    const TrainConfig config = config_of(tiny("r") + Arguments{text("--moe.layout={}", layout)});
    return estimate_memory(config, check_layout(config)).total();
  };
  EXPECT_LT(total("rank"), total("expert"));
  EXPECT_EQ(total("auto"), total("rank"));
  const TrainConfig copies = config_of(tiny("r") + Arguments{"--moe.layout=expert"});
  // A smaller chunk of logits and a layout of rows are the nearest changes.
  const std::string change =
      nearest_fit(copies, check_layout(copies), total("rank"), {}).value_or("none");
  EXPECT_TRUE(change == "moe.layout = rank" || change.starts_with("memory.loss_chunk")) << change;
}

// Rows that came from another rank leave their columns, under a recipe that takes fewer bytes for them.
TEST(MemoryClasses, FollowWhatIsKeptOfRowsThatCame) {
  expect_estimates_of_rows(kLayouts[2],  // ep 2
                           {{"--precision.recipe=fp8_block"},
                            {"--precision.recipe=nvfp4"},
                            {"--precision.recipe=nvfp4", "--precision.dispatch=mxfp8"},
                            {"--precision.recipe=mxfp8", "--precision.dispatch=mxfp8"},
                            {"--precision.recipe=nvfp4", "--moe.delay_wgrad"},
                            {"--precision.recipe=nvfp4", "--train.freeze=[\"*.experts.fc1.*\"]"}});
}

TEST(MemoryClasses, OfAGpuLeaveTheSnapshotToTheHost) {
  const Device gpu{DeviceType::kCuda, 0};
  const TrainConfig config =
      config_of(tiny("r") + Arguments{"--train.micro_batch=2", "--data.seq_len=128",
                                      "--moe.layout=expert"});  // as a GPU does by itself
  const Grid grid = check_layout(config);
  const MemoryEstimate host = estimate_memory(config, grid),
                       there = estimate_memory(config, grid, gpu);
  EXPECT_EQ(there.snapshot, 0);
  EXPECT_EQ(there.pinned, host.snapshot);
  EXPECT_EQ(host.snapshot, host.master + host.moments);
  EXPECT_EQ(host.gpu + host.pinned, 0);
  // The batch of a step and its targets, and cuBLASLt's workspace.
  EXPECT_EQ(there.gpu, (32 << 20) + 8 * 128 * 9);
  EXPECT_EQ(there.parameters, host.parameters);
  EXPECT_EQ(there.activations, host.activations);
  EXPECT_GE(there.arena(), host.arena());
  EXPECT_EQ(there.expert_parallel, 0);  // one rank exchanges nothing
  EXPECT_EQ(there.total(), host.total() - host.snapshot - host.expert_parallel + there.gpu +
                               there.arena() - host.arena());
  // Memory outside of the GPU is no help there.
  const int64_t limit = there.total() - 1;
  for (const int64_t part : {limit, limit / 2, limit / 8}) {
    const std::string change = nearest_fit(config, grid, part, gpu).value_or("none");
    EXPECT_EQ(change.find("checkpoint.async"), change.npos) << change;
  }
  EXPECT_THROW(check_memory(config, grid, limit, gpu), Error);
  EXPECT_NO_THROW(check_memory(config, grid, limit + 1, gpu));
  const std::string report = memory_report(config, grid, limit, gpu);
  EXPECT_NE(report.find("snapshot 0 B, GPU 32.0 MiB; it may take "), report.npos) << report;
}

// Rows are on their way in memory of the group, in pieces of 2 MiB, and there is no other.
TEST(MemoryClasses, OfRanksOnGpusHaveTheExchangeOfExperts) {
  const Device gpu{DeviceType::kCuda, 0};
  const TrainConfig config =
      config_of(tiny("r", 2, 2) + Arguments{"--train.micro_batch=2", "--data.seq_len=128"});
  TrainConfig direct = config;
  direct.ep.zero_copy = moe::ZeroCopy::kAuto;
  const Grid grid = check_layout(config);
  const MemoryEstimate there = estimate_memory(config, grid, gpu);
  const int64_t group =
      moe::EpGroup::bytes(moe::ExpertMap(4, 2), ep_limits(config, 256), {.device = gpu}).total;
  EXPECT_GT(group, 0);
  EXPECT_EQ(there.expert_parallel, group + comm::kGpuMemoryUnit);
  // Rows that peers store are in memory that they map, by the same pieces, and not in a pass's own.
  const MemoryEstimate mapped = estimate_memory(direct, grid, gpu);
  EXPECT_EQ(mapped.expert_parallel, there.expert_parallel + comm::kGpuMemoryUnit);
  EXPECT_LT(mapped.arena(), there.arena());
  TrainConfig carried = direct;
  carried.comm.transport = comm::GpuTransport::kNccl;
  EXPECT_GT(estimate_memory(carried, grid, gpu).arena(), mapped.arena());
}

TEST(MemoryClasses, AreLines) {
  MemoryEstimate m;
  m.parameters = 3 << 20;
  m.logits = 512;
  m.pinned = 2 << 20;
  EXPECT_EQ(memory_lines(m, 1 << 30),
            (std::vector<std::string>{"parameters    3.0 MiB", "logits        512 B",
                                      "total         3.0 MiB of 1.0 GiB",
                                      "snapshot      2.0 MiB, in memory of the host"}));
}

}  // namespace
}  // namespace moiety::app
