// The executor's cost on the host, in generalized tensor parallelism: microseconds of a call beyond
// its transport's own, the slowest rank's (target: 5 us). It runs steps of a stack of equal
// weights, forward and backward of several micro-batches, among threads: planned, and on demand,
// where recording is part of a call.
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "bench/ranks.h"
#include "moiety/comm/thread_group.h"
#include "moiety/gtp/executor.h"

namespace moiety::gtp {
namespace {

constexpr double kTargetUs = 5;

struct Settings {
  int ranks = 2, bundles = 48, micro_batches = 2, steps = 200;
};

struct Case {
  const char* label;
  int members;
  int64_t rows, cols;
};

// A transport that knows how long it took.
class TimedTransport final : public Transport {
 public:
  explicit TimedTransport(comm::Communicator& comm)
      : Transport(comm, {}), inner_(make_transport(comm)) {}

  double us = 0;

  TransportKind kind() const override { return inner_->kind(); }
  bool gathers_alone() const override { return inner_->gathers_alone(); }
  SlotArena::Block allocate(const std::string& what, int64_t bytes) override {
    return inner_->allocate(what, bytes);
  }
  BundleSpec::Transfer reduce_transfer(const ReduceShape& shape) const override {
    return inner_->reduce_transfer(shape);
  }
  void gather(const GatherJob& job, const Stream& lane) override {
    timed([&] { inner_->gather(job, lane); });
  }
  void reduce(const ReduceJob& job, const Stream& lane) override {
    timed([&] { inner_->reduce(job, lane); });
  }
  void await_readers(bool expert, const Stream& stream) override {
    timed([&] { inner_->await_readers(expert, stream); });
  }
  void publish(int32_t bucket, const Stream& stream) override {
    timed([&] { inner_->publish(bucket, stream); });
  }
  void drain(const Stream& lane) override {
    timed([&] { inner_->drain(lane); });
  }
  void await_drained(const Stream& stream) override {
    timed([&] { inner_->await_drained(stream); });
  }

 private:
  void on_shared() override { inner_->share({bundles().begin(), bundles().end()}); }
  template <class Call>
  void timed(Call&& call) {
    us += 1e3 * bench::milliseconds(call);
  }

  std::unique_ptr<Transport> inner_;
};

// The optimizer's side, which costs nothing here.
class NoOptimizer final : public ParamSource, public GradSink {
 public:
  void ensure_ready(BundleId, const Stream&) override {}
  void on_grad_ready(WeightId, const Event&) override {}
  void on_grad_late(WeightId, const Stream&) override {}
};

// Host time of the calls of a step.
struct CallTimes {
  double us = 0;
  int64_t calls = 0;
  double mean() const { return us / static_cast<double>(calls); }
};
struct StepTimes {
  CallTimes consume, reduce, borders;  // grad_buffer and reduce; begin_step and flush
};

class Rank {
 public:
  Rank(comm::Communicator& world, const Settings& settings, const Case& c)
      : world_(world), settings_(settings), case_(c), transport_(world) {
    Layout layout{.rows = c.rows, .cols = c.cols};
    layout.gtp_size = world.size();
    layout.gtp_rank = world.rank();
    const int64_t shard = layout.shard_rows() * c.cols;
    shards_ = transport_.allocate("shards", 2 * shard * c.members * settings.bundles);
    auto* at = static_cast<bf16*>(shards_.memory.raw());
    std::vector<ShardedWeight> weights;
    std::vector<Bundle> bundles;
    for (BundleId b = 0; b < settings.bundles; ++b) {
      bundles.push_back({.name = text("layer {}", b), .members = {}, .expert = c.members > 1});
      for (int e = 0; e < c.members; ++e, at += shard) {
        ShardedWeight w;
        w.name = text("layer {}.{}", b, e);
        w.layout = layout;
        if (c.members > 1) w.expert = e;
        w.data = TensorView(at, DType::kBFloat16, {layout.shard_rows(), c.cols});
        for (int64_t i = 0; i < shard; ++i) at[i] = bf16(weight(b, e, world.rank() * shard + i));
        mains_.emplace_back(DType::kFloat32, std::initializer_list{layout.shard_rows(), c.cols});
        std::memset(mains_.back().view().raw(), 0xFF,
                    static_cast<size_t>(mains_.back().view().bytes()));
        w.main_grad = mains_.back();
        bundles.back().members.push_back(static_cast<WeightId>(weights.size()));
        weights.push_back(std::move(w));
      }
    }
    ExecutorOptions options;
    options.poison = false;
    options.policy.keep_bytes = 0;  // a gather for every consume
    executor_ = std::make_unique<Executor>(std::move(weights), std::move(bundles),
                                           std::vector<Transport*>{&transport_}, options,
                                           &world.bootstrap(), optimizer_, &optimizer_);
    transport_.publish(0, Stream());
  }

  // Runs forward and backward of every micro-batch; with `checked` it compares the data.
  StepTimes step(const StepKey& key, bool checked) {
    StepTimes out;
    std::optional<StepScope> scope;
    time(out.borders, [&] { scope.emplace(executor_->begin_step(key, Stream())); });
    for (int m = 0; m < settings_.micro_batches; ++m) {
      for (BundleId b = 0; b < settings_.bundles; ++b) {
        consume(out, b, Phase::kFwd, checked);
      }
      for (BundleId b = settings_.bundles - 1; b >= 0; --b) {
        consume(out, b, Phase::kBwd, checked);
        reduce(out, b, checked);
      }
    }
    time(out.borders, [&] { executor_->flush(Stream()); });
    out.consume.calls = int64_t{2} * settings_.micro_batches * settings_.bundles;
    out.reduce.calls = out.consume.calls / 2;
    out.borders.calls = 1;
    transport_.await_drained(Stream());
    if (checked) check_gradients();
    return out;
  }
  const StepCounts& counts() const { return executor_->counts().step; }

 private:
  // Element i of the whole weight; powers of two, so that sums are exact.
  static float weight(BundleId b, int e, int64_t i) {
    return std::ldexp(1.0f, static_cast<int>((b * 7 + e * 3 + i) % 16));
  }
  int64_t weight_size() const { return case_.rows * case_.cols; }

  template <class Call>
  void time(CallTimes& to, Call&& call) {
    const double before = transport_.us;
    const double ms = bench::milliseconds(call);
    to.us += 1e3 * ms - (transport_.us - before);
  }
  void consume(StepTimes& times, BundleId b, Phase phase, bool checked) {
    constexpr Work kWork{.flops = 1e11, .bytes = 0};  // the work of a large weight
    View view;
    time(times.consume, [&] { view = executor_->materialize(b, phase, kWork, Stream()); });
    if (!checked) return;
    MOIETY_CHECK(view.data.contiguous(), "executor bench: a view with gaps");
    for (int64_t i = 0; i < view.data.numel(); ++i) {
      const float expected = weight(b, int(i / weight_size()), i % weight_size());
      MOIETY_CHECK(static_cast<float>(view.data.data<bf16>()[i]) == expected,
                   "executor bench: element {} of bundle {} is not {}", i, b, expected);
    }
  }
  void reduce(StepTimes& times, BundleId b, bool checked) {
    View view;
    time(times.reduce, [&] { view = executor_->grad_buffer(b, Stream()); });
    for (int64_t i = 0; checked && i < view.data.numel(); ++i) {
      view.data.data<float>()[i] = static_cast<float>(world_.rank() + 1) *
                                   weight(b, int(i / weight_size()), i % weight_size());
    }
    time(times.reduce, [&] { executor_->reduce(b, Stream()); });
  }
  void check_gradients() const {
    const int G = world_.size();
    const auto factor = static_cast<float>(settings_.micro_batches * G * (G + 1) / 2);
    for (size_t w = 0; w < mains_.size(); ++w) {
      const auto b = static_cast<BundleId>(w / case_.members);
      const int64_t shard = mains_[w].view().numel();
      for (int64_t i = 0; i < shard; ++i) {
        const float expected =
            factor * weight(b, int(w % case_.members), world_.rank() * shard + i);
        MOIETY_CHECK(mains_[w].data<float>()[i] == expected,
                     "executor bench: gradient {} of bundle {} is not {}", i, b, expected);
      }
    }
  }

  comm::Communicator& world_;
  const Settings& settings_;
  const Case& case_;
  TimedTransport transport_;
  SlotArena::Block shards_;
  std::deque<Tensor> mains_;
  NoOptimizer optimizer_;
  std::unique_ptr<Executor> executor_;
};

// Measures one kind of step, in which one key names each of them or all.
void bench_steps(comm::Communicator& world, const Settings& settings, const Case& c, Rank& rank,
                 bool planned) {
  std::vector<double> consume, reduce, borders;
  for (int i = 0; i < settings.steps; ++i) {
    const StepTimes t = rank.step({planned ? "planned" : "new", planned ? 0 : i}, false);
    MOIETY_CHECK(rank.counts().planned == planned, "executor bench: step {} is of the other kind",
                 i);
    consume.push_back(t.consume.mean());
    reduce.push_back(t.reduce.mean());
    borders.push_back(t.borders.us);
  }
  const StepCounts::Moved& moved = c.members > 1 ? rank.counts().expert : rank.counts().dense;
  const auto report = [&](const char* name, std::vector<double> us, double target) {
    for (double& x : us) x /= 1e3;
    const bench::Timing t = bench::timing(bench::slowest(world, us));
    if (world.rank() != 0) return;
    bench::Row row{
        .name = name,
        .label = text("{} G={} threads {} {} x [{}, {}] bf16", planned ? "planned" : "on demand",
                      world.size(), c.label, c.members, c.rows, c.cols),
        .value = 1e3 * t.ms,
        .unit = "us",
        .time = t};
    if (planned && target > 0) {
      row.against = text("{} us", target);
      row.ratio = target / row.value;
      row.target = 1;
    }
    row.more = text(R"("bundles": {}, "gathers": {}, "reduces": {})", settings.bundles,
                    moved.gathers, moved.reduces);
    bench::print(row);
  };
  report("gtp.executor.consume", consume, kTargetUs);
  report("gtp.executor.reduce", reduce, kTargetUs);
  report("gtp.executor.begin_and_flush", borders, 0);
}

void bench_case(comm::Communicator& world, const Settings& settings, const Case& c) {
  Rank rank(world, settings, c);
  for (int i = 0; i < 2; ++i) rank.step({"planned", 0}, true);
  MOIETY_CHECK(rank.counts().planned, "executor bench: the second step is not planned");
  bench_steps(world, settings, c, rank, true);
  bench_steps(world, settings, c, rank, false);
}

void run(bench::Options& options) {
  Settings settings;
  options.number("--ranks", settings.ranks, "threads", 2)
      .number("--bundles", settings.bundles, "weights of the stack")
      .number("--micro-batches", settings.micro_batches, "of a step")
      .number("--steps", settings.steps, "that are timed, of each kind");
  if (!options.parse()) return;
  settings.steps = std::min(settings.steps, 8192);  // times of a rank travel in 64 KiB
  // Steps are measured with their data in the caches, and past them.
  const int64_t unit = 16 * settings.ranks;
  for (const Case& c : {Case{"dense", 1, 2 * unit, 64}, Case{"experts", 8, 2 * unit, 64},
                        Case{"dense", 1, 16 * unit, 1024}}) {
    comm::run_thread_ranks(settings.ranks, {},
                           [&](comm::Communicator& world) { bench_case(world, settings, c); });
  }
}

}  // namespace
}  // namespace moiety::gtp

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv,
                                 "Host time of the executor of generalized tensor parallelism, "
                                 "beyond its transport's own.",
                                 moiety::gtp::run);
}
