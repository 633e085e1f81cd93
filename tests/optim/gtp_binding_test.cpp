// Optimizer and executor together: steps over gathered weights and reduced gradients give the bits
// of a run in which every rank has whole weights, whatever steps came to nothing in between.
#include "moiety/optim/gtp_binding.h"

#include <chrono>
#include <optional>
#include <thread>

#include "moiety/base/error.h"
#include "tests/optim/gtp_harness.h"
#include "tests/optim/rank_harness.h"

namespace moiety::optim {
namespace {

using gtp::Axis;

constexpr int64_t kRows = 40;
enum : int { kNorm, kA, kB, kMoe };  // parameters

// A norm, two dense weights and grouped experts.
std::vector<ParamSpec> specs_of(const Layout& grid, int rank) {
  const gtp::Layout dense{.rows = kRows,
                          .cols = kModel,
                          .gtp_rank = grid.place(Axis::kGtp, rank),
                          .gtp_size = grid.gtp,
                          .align = 16};
  gtp::Layout expert = dense;
  expert.rows = kExpertRows;
  expert.gtp_rank = grid.place(Axis::kEgtp, rank);
  expert.gtp_size = grid.egtp;
  const auto shard = [&](const ParamSpec& whole, const gtp::Layout& layout) {
    ParamSpec spec = shard_rows(whole, layout);
    if (!spec.expert && grid.gtp > 1) spec.domain = {Axis::kTp, Axis::kDp};
    spec.layout = layout;
    return spec;
  };
  return {vector_spec("norm.weight", kModel), shard(matrix_spec("a.weight", kRows, kModel), dense),
          shard(matrix_spec("b.weight", kRows, kModel), dense),
          shard(experts_of("experts.weight", grid.place(Axis::kEp, rank), grid.ep), expert)};
}

GtpOptions options_of(gtp::TransportKind kind) {
  return {.kind = kind, .optimizer = small_buckets()};
}

struct Thrown {};

class Training {
 public:
  Training(Communicator& world, const Layout& grid, const GtpOptions& options)
      : grid_(grid), rank_(world, grid, specs_of(grid, world.rank()), options), world_(world) {
    rank_.optimizer().initialize(kSeed, Stream());
  }

  GtpRank& rank() { return rank_; }

  // One step's gradients; `late`: more comes of `a` when the plan has it complete. Throws Thrown
  // before call `stop` of the executor.
  void backward(int step, bool late = false, int stop = -1) {
    calls_left_ = stop;
    const gtp::StepScope scope = rank_.executor().begin_step({"train", 1}, Stream());
    plain(step, kNorm);
    for (const int p : {kA, kMoe, kB}) consume(step, p, 0, kBatches / 2);
    const int most = late ? 9 : kBatches;
    consume(step, kA, kBatches / 2, most);
    for (const int p : {kMoe, kB}) consume(step, p, kBatches / 2, kBatches);
    if (late) consume(step, kA, most, kBatches);
    before_call();
    rank_.executor().flush(Stream());
  }
  static constexpr int kCalls = 19;  // of a step that is not late

  StepReport update() { return rank_.optimizer().step(input(24 / world_.size()), Stream()); }

  // Every rank has whole weights and adds up gradients itself.
  void plain_step(int step) {
    for (const int p : {kNorm, kA, kB, kMoe}) plain(step, p);
    update();
  }

 private:
  void before_call() {
    if (calls_left_-- == 0) throw Thrown{};
  }
  // Dense weights see the rank's own batches, experts those of the ranks with these experts.
  bool is_mine(int batch, const Parameter& p) const {
    const Communicator& ranks =
        rank_.groups().of(p.spec.expert ? gtp::Axes{Axis::kEgtp, Axis::kEdp}
                                        : gtp::Axes{Axis::kTp, Axis::kGtp, Axis::kDp});
    return batch % ranks.size() == ranks.rank();
  }
  void plain(int step, int p) {
    Parameter& parameter = rank_.optimizer().parameters()[p];
    for (int batch = 0; batch < kBatches; ++batch) {
      if (is_mine(batch, parameter)) Rank::contribute(parameter, step, batch, small_integer);
    }
  }

  void consume(int step, int p, int first, int last) {
    const Parameter& parameter = rank_.optimizer().parameters()[p];
    const LogicalTensor& tensor = parameter.spec.tensors[0];
    const bool expert = parameter.spec.expert;
    const int64_t members = expert ? parameter.spec.shape[0] : 1;
    const int64_t rows = expert ? kExpertRows : kRows;
    const int64_t first_row =
        expert ? grid_.place(Axis::kEp, world_.rank()) * members * kExpertRows : 0;
    // f(index in x, logical index) of each element.
    const auto each = [&](const TensorView& x, const auto& f) {
      for (int64_t e = 0; e < members; ++e) {
        const TensorView matrix = x.dims() == 3 ? x.select(e) : x;
        ASSERT_EQ(matrix.size(0), rows);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < kModel; ++c) {
            f(e * (x.dims() == 3 ? x.stride(0) : 0) + r * matrix.stride(0) + c,
              (first_row + e * rows + r) * kModel + c);
          }
        }
      }
    };
    gtp::Executor& executor = rank_.executor();
    before_call();
    const gtp::View w = executor.materialize(parameter.bundle, gtp::Phase::kFwd, {}, Stream());
    if (rank_.optimizer().step_state().t == 0) {
      each(w.data, [&](int64_t at, int64_t i) {
        const float x = 0.02f * init_normal(kSeed, tensor_id(tensor.name), i);
        ASSERT_EQ(w.data.data<bf16>()[at].bits, bf16(x).bits);
      });
    }
    before_call();
    const gtp::View g = executor.grad_buffer(parameter.bundle, Stream());
    each(g.data, [&](int64_t at, int64_t i) {
      float sum = 0;
      for (int batch = first; batch < last; ++batch) {
        if (is_mine(batch, parameter)) sum += small_integer(tensor, i, step, batch);
      }
      float& to = g.data.data<float>()[at];
      to = g.accumulate ? to + sum : sum;
    });
    before_call();
    executor.reduce(parameter.bundle, Stream());
  }

  const Layout grid_;
  GtpRank rank_;
  Communicator& world_;
  int calls_left_ = -1;
};

// The whole state after `body` ran on every rank.
Whole train(const Layout& grid, gtp::TransportKind kind,
            const std::function<void(Training&)>& body) {
  Whole whole;
  std::mutex mutex;
  comm::run_thread_ranks(ranks_of(grid), {Seconds(60)}, [&](Communicator& world) {
    Training training(world, grid, options_of(kind));
    body(training);
    const std::lock_guard lock(mutex);
    put_together(training.rank().optimizer().state_view(), whole);
  });
  return whole;
}
Whole train_plainly(int steps) {
  return train({}, {}, [&](Training& t) {
    for (int step = 0; step < steps; ++step) t.plain_step(step);
  });
}

TEST(GtpBinding, StepsAreThoseOfWholeWeights) {
  const Whole expected = train_plainly(4);
  for (const Layout& grid : {Layout{.dp = 2, .ep = 2}, Layout{.gtp = 2, .egtp = 2},
                             Layout{.gtp = 2, .dp = 2, .ep = 2, .egtp = 2},
                             Layout{.gtp = 4, .ep = 2, .egtp = 2}, Layout{.gtp = 3, .edp = 3}}) {
    for (const auto kind : {gtp::TransportKind::kMapped, gtp::TransportKind::kAllToAll}) {
      const Whole whole = train(grid, kind, [](Training& t) {
        for (int step = 0; step < 4; ++step) {
          t.backward(step, step == 2);
          EXPECT_FALSE(t.update().skip);
        }
        EXPECT_EQ(t.rank().executor().counts().steps, 4);
        EXPECT_GE(t.rank().executor().counts().planned, 1);
      });
      EXPECT_TRUE(same_bits(whole, expected)) << grid_text(grid);
    }
  }
}

// The exception comes between any two calls, of a step on demand and of a planned one. Reports,
// sums over dp and the norm so far leave no trace.
TEST(GtpBinding, AStepThatThrowsLeavesNoGradients) {
  const Whole expected = train_plainly(Training::kCalls + 1);
  for (const Layout& grid :
       {Layout{.gtp = 2, .dp = 2, .egtp = 2, .edp = 2}, Layout{.dp = 3, .egtp = 3}}) {
    for (const auto kind : {gtp::TransportKind::kMapped, gtp::TransportKind::kAllToAll}) {
      const Whole whole = train(grid, kind, [](Training& t) {
        for (int stop = 0; stop < Training::kCalls; ++stop) {
          EXPECT_THROW(t.backward(1000 + stop, false, stop), Thrown);
          t.backward(stop);
          EXPECT_FALSE(t.update().skip);
        }
        t.backward(Training::kCalls);
        EXPECT_EQ(t.update().t, Training::kCalls + 1);
        EXPECT_EQ(t.rank().executor().counts().abandoned, Training::kCalls);
        EXPECT_EQ(t.rank().executor().counts().planned, Training::kCalls);
      });
      EXPECT_TRUE(same_bits(whole, expected)) << grid_text(grid);
    }
  }
}

// The same without an executor's step behind it: by hand.
TEST(GtpBinding, GradientsBeginAnewByHand) {
  const Whole whole = train({.dp = 2, .ep = 2}, gtp::TransportKind::kMapped, [](Training& t) {
    EXPECT_THROW(t.backward(1000, false, 17), Thrown);
    t.rank().optimizer().begin_gradients();
    t.plain_step(0);
  });
  EXPECT_TRUE(same_bits(whole, train_plainly(1)));
}

// ---- a rank that dies

std::vector<std::string> state_bytes(DistributedOptimizer& optimizer) {
  std::vector<std::string> out;
  for (const Parameter& p : optimizer.parameters()) {
    out.emplace_back(static_cast<const char*>(p.weight.raw()), p.weight.bytes());
  }
  for (const StatePiece& piece : optimizer.state_view()) {
    int64_t n = 1;
    for (int d = 0; d < piece.box.rank; ++d) n *= piece.box.size[d];
    out.emplace_back(static_cast<const char*>(piece.data), byte_size(piece.dtype, n));
  }
  return out;
}

// Rank 2 stops before any call of a step: the others hear of it in time, and nothing that they own
// has changed.
TEST(GtpBinding, ADeadPeerLeavesWeightsAsTheyWere) {
  using Clock = std::chrono::steady_clock;
  constexpr double kDeadline = 0.3;
  constexpr int kDead = 2;
  for (const auto kind : {gtp::TransportKind::kMapped, gtp::TransportKind::kAllToAll}) {
    for (const int stop : {2, 9, 18, Training::kCalls}) {
      SCOPED_TRACE(text("{}, call {}", name(kind), stop));
      struct Outcome {
        std::string error;
        double seconds = 0;
        bool unchanged = false;
      };
      std::vector<Outcome> outcomes(3);
      comm::run_thread_ranks(3, {Seconds(kDeadline)}, [&](Communicator& world) {
        GtpOptions options = options_of(kind);
        options.deadline = Seconds(kDeadline);
        Training training(world, {.gtp = 3, .egtp = 3}, options);
        for (int step = 0; step < 2; ++step) {
          training.backward(step);
          training.update();
        }
        const auto before = state_bytes(training.rank().optimizer());
        const auto start = Clock::now();
        if (world.rank() == kDead) {
          try {
            training.backward(2, false, stop);
          } catch (const Thrown&) {
          }
          std::this_thread::sleep_for(Seconds(3 * kDeadline));
          return;
        }
        Outcome& outcome = outcomes[world.rank()];
        try {
          training.backward(2);
          training.update();
        } catch (const Error& e) {
          EXPECT_EQ(e.kind(), ErrorKind::kComm);
          outcome.error = e.what();
        }
        outcome.seconds = Seconds(Clock::now() - start).count();
        outcome.unchanged = state_bytes(training.rank().optimizer()) == before;
      });
      for (const int r : {0, 1}) {
        EXPECT_NE(outcomes[r].error.find("rank 2"), std::string::npos) << outcomes[r].error;
        EXPECT_LT(outcomes[r].seconds, kDeadline + 1);
        EXPECT_TRUE(outcomes[r].unchanged) << outcomes[r].error;
      }
    }
  }
}

}  // namespace
}  // namespace moiety::optim
