// Optimizer and executor together: steps over gathered weights and reduced gradients give the bits
// of a run in which every rank has whole weights.
#include "moiety/optim/gtp_binding.h"

#include "moiety/gtp/executor.h"
#include "tests/optim/rank_harness.h"

namespace moiety::optim {
namespace {

using gtp::Axis;

constexpr int64_t kRows = 40;

std::vector<gtp::Layout> layouts_of(const Layout& grid, int rank) {
  const gtp::Layout dense{.rows = kRows,
                          .cols = kModel,
                          .gtp_rank = grid.place(Axis::kGtp, rank),
                          .gtp_size = grid.gtp,
                          .align = 16};
  gtp::Layout expert = dense;
  expert.rows = kExpertRows;
  expert.gtp_rank = grid.place(Axis::kEgtp, rank);
  expert.gtp_size = grid.egtp;
  return {{}, dense, dense, expert};
}

// A norm, two dense weights and grouped experts.
std::vector<ParamSpec> specs_of(const Layout& grid, int rank) {
  const auto layouts = layouts_of(grid, rank);
  const auto dense = [&](const char* name) {
    ParamSpec spec = shard_rows(matrix_spec(name, kRows, kModel), layouts[1]);
    if (grid.gtp > 1) spec.domain = {Axis::kTp, Axis::kDp};
    return spec;
  };
  const ParamSpec experts = experts_of("experts.weight", grid.place(Axis::kEp, rank), grid.ep);
  return {vector_spec("norm.weight", kModel), dense("a.weight"), dense("b.weight"),
          shard_rows(experts, layouts[3])};
}

Whole train(const Layout& grid, bool with_executor, gtp::TransportKind kind) {
  Whole whole;
  std::mutex mutex;
  comm::run_thread_ranks(ranks_of(grid), {Seconds(60)}, [&](Communicator& world) {
    const GridGroups groups(grid, world);
    std::unique_ptr<gtp::Transport> transports[2];
    ShardPeers peers[2];
    for (const bool expert : {false, true}) {
      Communicator& group = groups.of({expert ? Axis::kEgtp : Axis::kGtp});
      if (group.size() == 1) continue;
      transports[expert] = make_transport(group, {.name = group.name()}, kind);
      peers[expert] = shard_peers(transports[expert]);
    }
    OptimizerConfig config = small_buckets();
    DistributedOptimizer optimizer(specs_of(grid, world.rank()), config, groups, peers[0],
                                   peers[1]);
    GtpBinding binding(optimizer);
    const auto layouts = layouts_of(grid, world.rank());
    for (const int p : {1, 2, 3}) {
      const ParamSpec& spec = optimizer.parameters()[p].spec;
      EXPECT_EQ(binding.add(p, layouts[p], p == 3,
                            spec.expert ? grid.place(Axis::kEp, world.rank()) * 2 : 0),
                p - 1);
    }
    std::unique_ptr<gtp::Executor> executor;
    if (with_executor) {
      executor = std::make_unique<gtp::Executor>(
          binding.weights(), binding.bundles(),
          std::vector<gtp::Transport*>{transports[0].get(), transports[1].get()},
          gtp::ExecutorOptions{}, &world.bootstrap(), binding, &binding);
    }
    optimizer.initialize(kSeed, Stream());
    const auto is_mine = [&](int batch, const Parameter& p) {
      // Dense weights see the rank's own batches, experts those of the ranks with these experts.
      const Communicator& ranks =
          groups.of(p.spec.expert ? gtp::Axes{Axis::kEgtp, Axis::kEdp}
                                  : gtp::Axes{Axis::kTp, Axis::kGtp, Axis::kDp});
      return batch % ranks.size() == ranks.rank();
    };
    const auto consume = [&](int step, int p, int first, int last) {
      const Parameter& parameter = optimizer.parameters()[p];
      const LogicalTensor& tensor = parameter.spec.tensors[0];
      const gtp::View w = executor->materialize(p - 1, gtp::Phase::kFwd, {}, Stream());
      const int64_t members = parameter.spec.expert ? parameter.spec.shape[0] : 1;
      const int64_t rows = parameter.spec.expert ? kExpertRows : kRows;
      const int64_t first_row =
          parameter.spec.expert ? grid.place(Axis::kEp, world.rank()) * 2 * kExpertRows : 0;
      const auto at = [&](const TensorView& x, int64_t e, int64_t r, int64_t c) {
        const TensorView matrix = x.dims() == 3 ? x.select(e) : x;
        EXPECT_EQ(matrix.size(0), rows);
        return r * matrix.stride(0) + c + e * (x.dims() == 3 ? x.stride(0) : 0);
      };
      const auto logical = [&](int64_t e, int64_t r, int64_t c) {
        return (first_row + e * rows + r) * kModel + c;
      };
      const auto each = [&](const auto& f) {
        for (int64_t e = 0; e < members; ++e) {
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < kModel; ++c) f(e, r, c);
          }
        }
      };
      if (step == 0) {
        each([&](int64_t e, int64_t r, int64_t c) {
          const float x = 0.02f * init_normal(kSeed, tensor_id(tensor.name), logical(e, r, c));
          ASSERT_EQ(w.data.data<bf16>()[at(w.data, e, r, c)].bits, bf16(x).bits);
        });
      }
      const gtp::View g = executor->grad_buffer(p - 1, Stream());
      each([&](int64_t e, int64_t r, int64_t c) {
        float sum = 0;
        for (int batch = first; batch < last; ++batch) {
          if (is_mine(batch, parameter)) {
            sum += small_integer(tensor, logical(e, r, c), step, batch);
          }
        }
        float& to = g.data.data<float>()[at(g.data, e, r, c)];
        to = g.accumulate ? to + sum : sum;
      });
      executor->reduce(p - 1, Stream());
    };
    const auto plain = [&](int step, int p) {
      Parameter& parameter = optimizer.parameters()[p];
      for (int batch = 0; batch < kBatches; ++batch) {
        if (is_mine(batch, parameter)) Rank::contribute(parameter, step, batch, small_integer);
      }
    };
    for (int step = 0; step < 4; ++step) {
      plain(step, 0);
      if (executor) {
        const gtp::StepScope scope = executor->begin_step({"train", 1}, Stream());
        for (const int p : {1, 3, 2}) consume(step, p, 0, kBatches / 2);
        // The third step leaves the plan: more comes of `a` when it is complete.
        const int half = kBatches / 2, most = step == 2 ? 9 : kBatches;
        consume(step, 1, half, most);
        for (const int p : {3, 2}) consume(step, p, half, kBatches);
        if (step == 2) consume(step, 1, most, kBatches);
        executor->flush(Stream());
      } else {
        for (const int p : {1, 2, 3}) plain(step, p);
      }
      EXPECT_FALSE(optimizer.step(input(24 / world.size()), Stream()).skip);
    }
    if (executor) {
      EXPECT_EQ(executor->counts().steps, 4);
      EXPECT_GE(executor->counts().planned, 1);
    }
    const std::lock_guard lock(mutex);
    put_together(optimizer.state_view(), whole);
  });
  return whole;
}

TEST(GtpBinding, StepsAreThoseOfWholeWeights) {
  const Whole expected = train({}, false, {});
  for (const Layout& grid : {Layout{.dp = 2, .ep = 2}, Layout{.gtp = 2, .egtp = 2},
                             Layout{.gtp = 2, .dp = 2, .ep = 2, .egtp = 2},
                             Layout{.gtp = 4, .ep = 2, .egtp = 2}, Layout{.gtp = 3, .edp = 3}}) {
    for (const auto kind : {gtp::TransportKind::kMapped, gtp::TransportKind::kAllToAll}) {
      EXPECT_TRUE(same_bits(train(grid, true, kind), expected)) << grid_text(grid);
    }
  }
}

}  // namespace
}  // namespace moiety::optim
