// The planner of generalized tensor parallelism on steps of large models: events planned in a
// second, against 10^5 in one.
#include "bench/harness.h"
#include "moiety/gtp/plan.h"

namespace moiety::gtp {
namespace {

struct Model {
  const char* label;
  int layers, micro_batches;
  bool recompute;
  int64_t slot_bytes;
};

// Attention, two expert linears and a router's worth of work in each layer; embedding and head.
class Step {
 public:
  explicit Step(const Model& model) {
    add("embed", int64_t{152000} * 4096, false);
    for (int l = 0; l < model.layers; ++l) {
      const std::string at = text("layers.{}.", l);
      add(at + "qkv", int64_t{6144} * 4096, false);
      add(at + "o", int64_t{4096} * 4096, false);
      add(at + "fc1", int64_t{16} * 3072 * 4096, true);
      add(at + "fc2", int64_t{16} * 1536 * 4096, true);
    }
    add("head", int64_t{152000} * 4096, false);
    call(Kind::kBegin, kNoBundle, 0);
    const auto last = static_cast<BundleId>(bundles_.size()) - 1;
    for (int m = 0; m < model.micro_batches; ++m) {
      for (BundleId b = 0; b <= last; ++b) call(Kind::kFwd, b, 2e5f);
      for (BundleId b = last; b >= 0; --b) {
        if (model.recompute && b > 0 && b < last && b % 4 == 0) {
          for (BundleId r = b - 3; r <= b; ++r) call(Kind::kRecompute, r, 2e5f);
        }
        if (b > 0) call(Kind::kBwd, b, 2e5f);
        call(Kind::kGradBuffer, b, 2e5f);
        call(Kind::kGrad, b, 0);
      }
    }
    call(Kind::kFlush, kNoBundle, 0);
  }
  std::span<const BundleSpec> bundles() const { return bundles_; }
  std::span<const TraceEvent> trace() const { return trace_; }

 private:
  void add(std::string name, int64_t elements, bool expert) {
    constexpr int64_t kRanks = 4;
    BundleSpec b;
    b.name = std::move(name);
    b.group = b.expert = expert;
    b.group_size = kRanks;
    const int64_t bytes = elements / 2 + elements / 256, received = bytes * (kRanks - 1) / kRanks;
    b.gather = {{{received, bytes, 0}, {received, bytes, bytes}, {received, 2 * bytes, 0}}};
    b.reduce = {4 * elements * (kRanks - 1) / kRanks, 4 * elements, 4 * elements};
    bundles_.push_back(std::move(b));
  }
  void call(Kind kind, BundleId b, float work_ns) { trace_.push_back({kind, b, false, work_ns}); }

  std::vector<BundleSpec> bundles_;
  std::vector<TraceEvent> trace_;
};

void bench_plan(const Model& model) {
  const Step step(model);
  Policy policy;
  policy.slot_bytes = model.slot_bytes;
  policy.keep_bytes = policy.send_bytes = model.slot_bytes / 2;
  Plan made;
  const auto time =
      bench::measure([&](int64_t) { made = plan(step.trace(), step.bundles(), policy); });
  const auto events = static_cast<double>(step.trace().size());
  bench::Row row{.name = "gtp.plan",
                 .label = text("{} {} events", model.label, step.trace().size()),
                 .value = events / time.ms / 1e3,
                 .unit = "Mevents/s",
                 .time = time,
                 .against = "10^5 events/s",
                 .ratio = events / time.ms / 100,
                 .target = 1};
  row.more = text(R"("slots": {}, "slot_bytes": {}, "merges": {}, "hidden": {:.4f})",
                  made.slots.size(), made.report.bytes, made.report.merges,
                  made.report.work_ns / (made.report.work_ns + made.report.gather_wait_ns +
                                         made.report.send_wait_ns + made.report.flush_wait_ns));
  bench::print(row);
  const auto check = bench::measure([&](int64_t) {
    const auto fault = check_plan(made, step.trace(), step.bundles(), policy);
    MOIETY_CHECK(!fault, "plan bench: {}", fault.value_or(""));
  });
  row.name = "gtp.check_plan";
  row.value = events / check.ms / 1e3;
  row.time = check;
  row.against.clear();
  row.more.clear();
  bench::print(row);
}

void run(bench::Options& options) {
  if (!options.parse()) return;
  constexpr int64_t kPlenty = int64_t{1} << 40, kTight = int64_t{9} << 30;
  for (const Model& model : {Model{"layers 48", 48, 1, false, kPlenty},
                             Model{"layers 96, recompute", 96, 52, true, kPlenty},
                             Model{"layers 96, recompute, tight", 96, 52, true, kTight}}) {
    bench_plan(model);
  }
}

}  // namespace
}  // namespace moiety::gtp

int main(int argc, char** argv) {
  return moiety::bench::run_main(
      argc, argv, "Plans of generalized tensor parallelism: events planned in a second.",
      moiety::gtp::run);
}
