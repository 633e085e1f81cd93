// Threads that train with every way in which tokens may travel: losses and norms are the same bits.
// Processes do the same in tests/train_mpi.
#include "moiety/base/parallel.h"
#include "moiety/comm/thread_group.h"
#include "moiety/train/rank_model.h"
#include "tests/data/data_helpers.h"
#include "tests/train/exchange_cases.h"

namespace moiety::train {
namespace {

std::vector<double> losses_on_threads(const TrainConfig& config, bool again = true) {
  std::vector<double> losses;
  comm::run_thread_ranks(int(config.run.ranks), {}, [&](comm::Communicator& world) {
    set_thread_budget(1);
    const std::vector<double> mine = losses_of(config, world, again);
    if (world.rank() == 0) losses = mine;
  });
  return losses;
}

void expect_equal_losses(moe::Reduction combine) {
  const TemporaryDirectory dir;
  std::vector<double> expected;
  for (const ExchangeCase& x : exchange_cases()) {
    TrainConfig config = exchange_config(dir / x.describe(), 2, combine);
    set(config, x);
    const std::vector<double> losses = losses_on_threads(config);
    if (expected.empty()) expected = losses;
    EXPECT_EQ(losses, expected) << x.describe();
  }
  EXPECT_EQ(expected.size(), 2u * 4 + 3);
}

TEST(Exchange, LossesAreTheSameBits) { expect_equal_losses(moe::Reduction::kRank); }

// The memory of rows that peers reach follows the capacity, and serves the arena.
TEST(Exchange, RowsAreInMemoryThatPeersReach) {
  const TemporaryDirectory dir;
  TrainConfig config = exchange_config(dir / "r", 2, moe::Reduction::kToken);
  comm::run_thread_ranks(2, {}, [&](comm::Communicator& world) {
    const auto make = [&](moe::ZeroCopy zero_copy) {
      TrainConfig mine = config;
      mine.ep.zero_copy = zero_copy;
      return std::make_unique<RankModel>(mine, make_plan(mine).grid, mine.pass_tokens(), world);
    };
    Arena arena("rows");
    const auto off = make(moe::ZeroCopy::kOff);
    off->share_rows(100, arena);
    const int64_t bytes = off->expert_parallel_bytes();
    off->close();
    const auto direct = make(moe::ZeroCopy::kAuto);
    EXPECT_EQ(direct->expert_parallel_bytes(), bytes);
    direct->share_rows(100, arena);
    const int64_t row = 32 * 2, all = 3 * 100 * row;  // of two layers, and the outputs of one
    EXPECT_EQ(direct->expert_parallel_bytes(), bytes + all);
    {
      const ArenaScope scope(arena);
      for (int i = 0; i < 3; ++i) arena.lent_tensor(DType::kBFloat16, {100, 32});
      EXPECT_EQ(arena.in_use(), 0);
      arena.lent_tensor(DType::kBFloat16, {100, 32});
      EXPECT_EQ(arena.in_use(), 100 * row);
    }
    direct->share_rows(50, arena);
    EXPECT_EQ(direct->expert_parallel_bytes(), bytes + all);
    direct->share_rows(200, arena);
    EXPECT_EQ(direct->expert_parallel_bytes(), bytes + 2 * all);
    arena.lend({});
    direct->close();
  });
}

// Micro-batches that take turns under every way of cutting; also tables that are cut, and one that
// is both embedding and head.
TEST(Exchange, TurnsAreTheSameBitsUnderEveryLayout) {
  struct Layout {
    const char* name;
    ParallelSettings parallel;
  };
  const Layout layouts[] = {
      {"dp2.ep2", {.dp = 2, .ep = 2}},   {"dp4.ep2", {.dp = 4, .ep = 2}},
      {"tp2.ep2", {.tp = 2, .ep = 2}},   {"tp2.dp2.ep4", {.dp = 2, .tp = 2, .ep = 4}},
      {"gtp2.ep2", {.gtp = 2, .ep = 2}}, {"gtp4.ep2.egtp2", {.gtp = 4, .ep = 2, .egtp = 2}}};
  const TemporaryDirectory dir;
  for (const Layout& layout : layouts) {
    for (const model::Recompute recompute : {model::Recompute::kNone, model::Recompute::kFull}) {
      std::vector<double> expected;
      for (const moe::Overlap overlap : {moe::Overlap::kNone, moe::Overlap::kMicroBatch}) {
        const std::string name = text("{} {} {}", layout.name, int(recompute), int(overlap));
        const ParallelSettings& p = layout.parallel;
        const int ranks = int(p.tp * p.gtp * std::max<int64_t>(p.dp, 1));
        TrainConfig config = exchange_config(dir / name, ranks, moe::Reduction::kRank);
        config.parallel = p;
        config.train.micro_batch = p.tp > 1 ? 4 : 2;
        config.train.global_batch = 6 * ranks;
        config.train.steps = 3;
        config.model.tie_embeddings = recompute == model::Recompute::kFull;
        config.model.recompute = recompute;
        config.model.overlap = overlap;
        config.model.delay_wgrad = p.gtp == 4;
        const std::vector<double> losses = losses_on_threads(config, false);
        if (expected.empty()) expected = losses;
        EXPECT_EQ(losses, expected) << name;
      }
    }
  }
}

// A probe sees the micro-batches one after the other, and finds the same.
TEST(Exchange, TurnsUnderAProbeAreTheSameBits) {
  const TemporaryDirectory dir;
  TrainConfig config = exchange_config(dir / "r", 2, moe::Reduction::kRank);
  const std::vector<double> expected = losses_on_threads(config);
  config.run.dir = dir / "s";
  config.model.overlap = moe::Overlap::kMicroBatch;
  config.guard.nan = optim::NanGuard::kTensor;
  EXPECT_EQ(losses_on_threads(config), expected);
}

TEST(Exchange, LossesInTokenOrderAreTheSameBits) { expect_equal_losses(moe::Reduction::kToken); }

}  // namespace
}  // namespace moiety::train
