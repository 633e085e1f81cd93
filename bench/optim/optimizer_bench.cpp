// The optimizer's step against the copy ceiling: its parts on a flat segment, and whole steps of
// thread ranks that share one domain. The value counts every byte of memory that has to be read or
// written, of all ranks: main_grad as it is summed, the sum for statistics and update, masters and
// moments in and out, weights out, and as they are gathered. The ratio is to a copy by the same
// threads that reads and writes as many.
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "bench/ranks.h"
#include "moiety/base/copy.h"
#include "moiety/base/crc32c.h"
#include "moiety/comm/thread_group.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/optim/grad_norm.h"
#include "moiety/optim/initialize.h"
#include "moiety/quant/quantize.h"

namespace moiety::optim {
namespace {

constexpr double kTarget = 0.80;
constexpr uint8_t kPoison = 0xA5;

struct Settings {
  int64_t matrices = 16, rows = 2048, cols = 2048;
  int ranks = 0, repeat = 9, threads = core_count();
};

struct Case {
  const char* label;
  DType moments = DType::kFloat32;
  std::optional<QuantSpec> format = {};
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"bf16"},
      {"bf16, moments bf16", DType::kBFloat16},
      {"fp8_block", DType::kFloat32, QuantSpec::of(Format::kFp8Block128x128)},
      {"mxfp8", DType::kFloat32, QuantSpec::of(Format::kMxfp8)},
      {"mxfp8 tiles", DType::kFloat32, QuantSpec::of(Format::kMxfp8Tile32)},
      {"nvfp4 tiles", DType::kFloat32, QuantSpec::of(Format::kNvfp4Tile16)}};
  return all;
}

// ---- timing

// Runs the operation and, in two granularities, a copy that moves as many bytes, in turn on all
// ranks; `bytes`: of this rank. Prints the row on rank 0.
template <class Prepare, class Operation>
void measure(comm::Communicator& world, const Settings& settings, bench::Copies& copies,
             const std::string& name, const Case& c, double bytes, Prepare&& prepare,
             Operation&& operation) {
  const auto half = static_cast<int64_t>(bytes / 2);
  std::vector<double> times, fine, coarse;
  const auto time_of = [&](const auto& body) {
    world.barrier();
    return bench::milliseconds(body);
  };
  for (int i = 0; i <= settings.repeat; ++i) {
    prepare();
    const double t = time_of(operation);
    const double a = time_of([&] { copies.run(half); });
    const double b = time_of([&] { copies.run(half, int64_t{64} << 10); });
    if (i == 0) continue;  // pages are touched
    times.push_back(t);
    coarse.push_back(a);
    fine.push_back(b);
  }
  const bench::Timing time = bench::timing(bench::slowest(world, times));
  const double copy = std::min(bench::timing(bench::slowest(world, fine)).ms,
                               bench::timing(bench::slowest(world, coarse)).ms);
  if (world.rank() != 0) return;
  const double all = bytes * world.size();
  bench::print({.name = name,
                .label = text("P={} {} x [{}, {}] {}", world.size(), settings.matrices,
                              settings.rows, settings.cols, c.label),
                .value = bench::giga(all, time.ms),
                .time = time,
                .against = "copy",
                .ratio = copy / time.ms,
                .target = kTarget,
                .more = text(R"("threads": {}, "bytes": {:.0f}, "copy_gb_s": {:.2f})",
                             world.size() * thread_budget(), all, bench::giga(all, copy))});
}

// ---- the parts, on a flat segment

class Segment {
 public:
  Segment(int64_t n, const Case& c)
      : grad_(bench::random_tensor(DType::kFloat32, {n}, 1)),
        master_(bench::random_tensor(DType::kFloat32, {n}, 2)),
        exp_avg_(c.moments, {n}),
        exp_avg_sq_(c.moments, {n}),
        weight_(DType::kBFloat16, {n}) {
    std::memset(weight_.view().raw(), kPoison, static_cast<size_t>(weight_.view().bytes()));
    const std::vector<ElementRun> runs{{.begin = 0, .end = n, .tensor_id = 7}};
    const AdamWArgs args{grad_, master_, exp_avg_, exp_avg_sq_, weight_, runs};
    updates_ = AdamWTable({&args, 1}, Device{});
    const GradSegment gradient{grad_, runs};
    statistics_ = GradStatisticsTable({&gradient, 1}, Device{});
  }
  using Update = void (*)(const AdamW&, uint64_t, TensorView, const AdamWTable&, Stream);
  void update(Update with = adamw) {
    AdamWStep step{.s = 1e-3f, .k1 = 10, .k2 = 20, .lr = 1e-3f, .wd = 0.1f};
    with({}, 0, {&step, DType::kUInt8, {sizeof step}}, updates_, Stream());
  }
  using Statistics = void (*)(const GradStatisticsTable&, TensorView, Stream);
  GradStatistics statistics(Statistics of = grad_statistics) {
    GradStatistics out;
    of(statistics_, {&out, DType::kUInt8, {sizeof out}}, Stream());
    return out;
  }
  uint32_t checksum() const {
    uint32_t sum = 0;
    for (const Tensor* x : {&master_, &exp_avg_, &exp_avg_sq_, &weight_}) {
      sum = crc32c(x->view().raw(), static_cast<size_t>(x->view().bytes()), sum);
    }
    return sum;
  }

 private:
  Tensor grad_, master_, exp_avg_, exp_avg_sq_, weight_;
  AdamWTable updates_;
  GradStatisticsTable statistics_;
};

// Checks the parts against their references, on a small segment.
void check_parts(const Case& c) {
  Segment fast(100003, c), reference(100003, c);
  fast.update();
  reference.update(adamw_reference);
  MOIETY_CHECK(fast.checksum() == reference.checksum(),
               "optimizer bench: adamw of {} is not its reference", c.label);
  MOIETY_CHECK(fast.statistics().sumsq == reference.statistics(grad_statistics_reference).sumsq,
               "optimizer bench: statistics are not their reference");
}

void bench_parts(comm::Communicator& world, const Settings& settings, bench::Copies& copies) {
  const int64_t n = settings.matrices * settings.rows * settings.cols;
  for (size_t i = 0; i < 2; ++i) {
    const Case& c = cases()[i];
    check_parts(c);
    Segment segment(n, c);
    const auto bytes = static_cast<double>(n);
    const auto moments = static_cast<double>(byte_size(c.moments, 2));
    measure(
        world, settings, copies, "optim.adamw", c, bytes * (4 + 8 + 2 * moments + 2), [] {},
        [&] { segment.update(); });
    if (i > 0) continue;
    measure(
        world, settings, copies, "optim.statistics", c, bytes * 4, [] {},
        [&] { segment.statistics(); });
  }
}

// ---- whole steps

// The published weights of a case after its first step, which do not depend on the ranks.
class Checksums {
 public:
  void expect(const Case& c, uint32_t sum) {
    const std::lock_guard lock(mutex_);
    const uint32_t first = sums_.try_emplace(c.label, sum).first->second;
    MOIETY_CHECK(sum == first, "optimizer bench: weights in {} are not the same on all ranks",
                 c.label);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, uint32_t> sums_;
};

class Optimizer {
 public:
  Optimizer(comm::Communicator& world, const Settings& settings, const Case& c)
      : world_(world),
        settings_(settings),
        case_(c),
        groups_({.dp = world.size(), .edp = world.size()}, world),
        optimizer_(specs(settings, c), {.moments = c.moments, .compare_copies = 0}, groups_) {
    optimizer_.initialize(1, Stream());
    for (size_t p = 0; p < optimizer_.parameters().size(); ++p) fill_gradient(p);
  }

  // Gradients stay as they are.
  void prepare() {
    for (Parameter& p : optimizer_.parameters()) p.overwrite = false;
  }
  void step() {
    const int64_t tokens = world_.rank() == 0 ? 1000 : 0;
    const StepReport report = optimizer_.step(
        {.lr = 1e-3, .weight_decay = 0.1, .tokens = tokens, .losses = {1.0}}, Stream());
    MOIETY_CHECK(!report.skip && report.norm > 0, "optimizer bench: a step was skipped");
  }
  void publish() { optimizer_.publish(Stream()); }

  // Checks a step into poisoned weights.
  void check(Checksums& checksums) {
    for_weights([](const TensorView& x) { fill_bytes(x, kPoison, Stream()); });
    prepare();
    step();
    world_.barrier();
    uint32_t sum = 0;
    for_weights(
        [&](const TensorView& x) { sum = crc32c(x.raw(), static_cast<size_t>(x.bytes()), sum); });
    checksums.expect(case_, sum);
    if (world_.size() == 1) check_first_weight();
  }

  // Bytes that a step of this rank reads or writes, counted as the top of the file says.
  double step_bytes() {
    const auto P = static_cast<double>(world_.size()), n = elements() / P;
    const auto moments = static_cast<double>(byte_size(case_.moments, 2));
    const double sum = P > 1 ? 4 * elements() + 4 * n : 0;
    const double update = (4 + 8 + 2 * moments) * n;
    return sum + 4 * n + update + (case_.format ? 0 : 2 * n) + publish_bytes(false);
  }
  // Bytes that are cast and then gathered. `alone` leaves out the update, which writes bf16.
  double publish_bytes(bool alone) {
    const auto P = static_cast<double>(world_.size()), n = elements() / P;
    const double gathered = P > 1 ? 2 * weight_bytes() * (1 - 1 / P) : 0;
    if (!case_.format) return (alone ? 6 * n : 0) + gathered;
    return 8 * n + weight_bytes() / P + gathered;
  }

 private:
  static std::vector<ParamSpec> specs(const Settings& s, const Case& c) {
    std::vector<ParamSpec> out;
    for (int64_t i = 0; i < s.matrices; ++i) {
      ParamSpec p;
      p.name = text("layers.{}.weight", i);
      p.tensors = {{p.name, {s.rows, s.cols}}};
      p.row_map = {{0, 0, 0, s.rows}};
      p.rows = s.rows;
      p.row_elements = s.cols;
      p.shape = {s.rows, s.cols};
      p.init_std = 0.02f;
      p.format = c.format;
      out.push_back(std::move(p));
    }
    return out;
  }
  double elements() const {
    return static_cast<double>(settings_.matrices * settings_.rows * settings_.cols);
  }
  double weight_bytes() {  // only codes travel
    double bytes = 0;
    for (const Parameter& p : optimizer_.parameters()) {
      if (!case_.format) bytes += static_cast<double>(p.weight.bytes());
      for (const QuantizedView& q : p.quantized) {
        bytes += static_cast<double>(q.row_data.bytes() + q.col_data.bytes());
      }
    }
    return bytes;
  }

  // Each row is of one rank, so that sums do not depend on how many there are.
  void fill_gradient(size_t parameter) {
    const TensorView& grad = optimizer_.parameters()[parameter].grad;
    const Tensor random = bench::random_tensor(DType::kFloat32, {settings_.rows, settings_.cols},
                                               static_cast<uint32_t>(parameter));
    const auto row = static_cast<size_t>(4 * settings_.cols);
    for (int64_t r = 0; r < settings_.rows; ++r) {
      float* to = grad.data<float>() + r * settings_.cols;
      if (r % world_.size() == world_.rank()) {
        std::memcpy(to, random.data<float>() + r * settings_.cols, row);
      } else {
        std::memset(to, 0, row);
      }
    }
  }
  template <class F>
  void for_weights(F&& f) {
    for (const Parameter& p : optimizer_.parameters()) {
      if (!case_.format) f(p.weight);
      for (const QuantizedView& q : p.quantized) {
        for (const TensorView* x : {&q.row_data, &q.row_scales, &q.col_data, &q.col_scales}) {
          if (x->defined()) f(*x);
        }
      }
    }
  }
  // Compares with the result of the operations for whole tensors on the whole master.
  void check_first_weight() {
    const Parameter& p = optimizer_.parameters()[0];
    for (const StatePiece& piece : optimizer_.state_view()) {
      if (piece.slot != "weight" || piece.tensor != p.spec.name) continue;
      const TensorView master(piece.data, DType::kFloat32, {settings_.rows * settings_.cols});
      const Tensor bf16_weight(DType::kBFloat16, {settings_.rows, settings_.cols});
      round_weights(master, bf16_weight.view().reshape({master.numel()}), Stream());
      const auto expect = [&](const TensorView& got, const TensorView& want) {
        MOIETY_CHECK(
            !got.defined() ||
                (got.bytes() == want.bytes() &&
                 std::memcmp(got.raw(), want.raw(), static_cast<size_t>(got.bytes())) == 0),
            "optimizer bench: {} in {} is not its master, cast", piece.tensor, case_.label);
      };
      if (!case_.format) return expect(p.weight, bf16_weight);
      const QuantizedView& got = p.quantized[0];
      const QuantizedTensor whole(*case_.format, settings_.rows, settings_.cols,
                                  {true, got.col_data.defined()});
      quant::quantize(bf16_weight, whole.view(), {}, Stream());
      expect(got.row_data, whole.view().row_data);
      expect(got.row_scales, whole.view().row_scales);
      expect(got.col_data, whole.view().col_data);
      return expect(got.col_scales, whole.view().col_scales);
    }
    fail(ErrorKind::kInvalidArgument, "optimizer bench: no master of {}", p.spec.name);
  }

  comm::Communicator& world_;
  const Settings& settings_;
  const Case& case_;
  GridGroups groups_;
  DistributedOptimizer optimizer_;
};

void bench_steps(comm::Communicator& world, const Settings& settings, Checksums& checksums,
                 bench::Copies& copies) {
  for (const Case& c : cases()) {
    Optimizer optimizer(world, settings, c);
    optimizer.check(checksums);
    measure(
        world, settings, copies, "optim.step", c, optimizer.step_bytes(),
        [&] { optimizer.prepare(); }, [&] { optimizer.step(); });
    measure(
        world, settings, copies, "optim.publish", c, optimizer.publish_bytes(true), [] {},
        [&] { optimizer.publish(); });
  }
}

void run(bench::Options& options) {
  Settings settings;
  options.number("--ranks", settings.ranks, "of the domain, threads; without it 1, 2 and 4")
      .number("--matrices", settings.matrices, "weights")
      .number("--rows", settings.rows, "of a weight")
      .number("--cols", settings.cols, "of a weight, a multiple of 32", int64_t{32})
      .number("--threads", settings.threads, "that the ranks share")
      .number("--repeat", settings.repeat, "rounds");
  if (!options.parse()) return;
  settings.repeat = std::min(settings.repeat, 8192);  // times of a rank travel in 64 KiB
  Checksums checksums;
  for (const int ranks :
       settings.ranks > 0 ? std::vector<int>{settings.ranks} : std::vector<int>{1, 2, 4}) {
    comm::run_thread_ranks(ranks, {}, [&](comm::Communicator& world) {
      set_thread_budget(std::max(1, settings.threads / ranks));
      bench::Copies copies;
      if (ranks == 1) bench_parts(world, settings, copies);
      bench_steps(world, settings, checksums, copies);
    });
  }
}

}  // namespace
}  // namespace moiety::optim

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv,
                                 "The optimizer's step, its parts and its casts, against copies of "
                                 "as many bytes.",
                                 moiety::optim::run);
}
