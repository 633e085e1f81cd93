// The optimizer's operations on a GPU against a device copy of the same bytes, timed beside them:
// many parameters of 1 GiB of masters in all, in buckets, and a thousand small ones. The value
// counts every byte of memory that has to be read or written.
#include <string>
#include <vector>

#include "bench/harness.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/optim/adamw.h"
#include "moiety/optim/grad_norm.h"
#include "moiety/optim/initialize.h"
#include "moiety/optim/step_rule.h"

namespace moiety::optim {
namespace {

constexpr double kTarget = 0.85;
constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16;

struct Case {
  std::string label;
  int64_t segments, elements;  // of a segment
  int64_t runs;                // of a segment, with equal lengths
};

class Bench {
 public:
  Bench(const Case& c, const std::string& only, const Stream& stream)
      : case_(c), only_(only), stream_(stream) {
    for (int64_t r = 0; r < c.runs; ++r) {
      const int64_t begin = r * (c.elements / c.runs), end = begin + c.elements / c.runs - 128;
      runs_.push_back({.begin = begin, .end = end, .tensor_id = static_cast<uint32_t>(r)});
      run_elements_ += c.segments * (end - begin);
    }
  }

  void run() {
    const std::vector<Tensor> grads = tensors(kF32, 1), masters = tensors(kF32, 2),
                              weights = tensors(kBf16, 0), narrow_grads = tensors(kBf16, 1);
    for (const DType moments : {kF32, kBf16}) {
      const std::vector<Tensor> exp_avg = tensors(moments, 3), exp_avg_sq = tensors(moments, 0);
      for (const auto* g : {&grads, &narrow_grads}) {
        std::vector<AdamWArgs> args;
        for (int64_t s = 0; s < case_.segments; ++s) {
          args.push_back({(*g)[s], masters[s], exp_avg[s], exp_avg_sq[s], weights[s], runs_});
        }
        const AdamWTable table(args, stream_.device());
        AdamWStep host{.s = 1e-3f, .k1 = 10, .k2 = 20, .lr = 1e-3f, .wd = 0.1f};
        const Tensor step = upload(&host, sizeof host);
        const DType grad = (*g)[0].view().dtype();
        print("optim.adamw",
              text("{}, grads {}, moments {}", case_.label, name(grad), name(moments)),
              byte_size(grad, 1) + 8 + 4 * byte_size(moments, 1) + 2,
              [&] { adamw({}, 7, step, table, stream_); });
      }
    }
    for (const auto* g : {&grads, &narrow_grads}) {
      std::vector<GradSegment> segments;
      for (const Tensor& x : *g) segments.push_back({x, runs_});
      const GradStatisticsTable table(segments, stream_.device());
      const Tensor out(DType::kUInt8, {sizeof(GradStatistics)}, stream_.device());
      const DType grad = (*g)[0].view().dtype();
      print("optim.statistics", text("{}, grads {}", case_.label, name(grad)), byte_size(grad, 1),
            [&] { grad_statistics(table, out, stream_); });
    }
    print("optim.round_weights", case_.label, 6, [&] {
      for (int64_t s = 0; s < case_.segments; ++s) round_weights(masters[s], weights[s], stream_);
    });
  }

 private:
  // The tensors of all segments; zeros if `id` is 0.
  std::vector<Tensor> tensors(DType dtype, uint32_t id) const {
    std::vector<Tensor> out;
    for (int64_t s = 0; s < case_.segments; ++s) {
      out.emplace_back(dtype, std::initializer_list<int64_t>{case_.elements}, stream_.device());
    }
    if (id == 0) return out;
    const Tensor host = bench::random_tensor(dtype, {case_.elements}, id);
    for (const Tensor& x : out) copy(x, host, stream_);
    stream_.synchronize();
    return out;
  }
  Tensor upload(void* bytes, int64_t n) const {
    Tensor out(DType::kUInt8, {n}, stream_.device());
    copy(out, {bytes, DType::kUInt8, {n}}, stream_);
    stream_.synchronize();
    return out;
  }

  template <class Operation>
  void print(const std::string& name, const std::string& label, int64_t element_bytes,
             Operation&& operation) const {
    if (!bench::wanted(name, only_)) return;
    const int64_t bytes = element_bytes * run_elements_, half = bytes / 2;
    const Tensor from(DType::kUInt8, {half}, stream_.device()),
        to(DType::kUInt8, {half}, stream_.device());
    const bench::Timing copied = bench::measure([&](int64_t) { copy(to, from, stream_); }, stream_);
    const bench::Timing time = bench::measure([&](int64_t) { operation(); }, stream_);
    bench::print({.name = name,
                  .label = label,
                  .value = bench::giga(static_cast<double>(bytes), time.ms),
                  .time = time,
                  .against = "copy",
                  .ratio = copied.ms / time.ms,
                  .target = kTarget,
                  .device = stream_.device()});
  }

  const Case& case_;
  const std::string& only_;
  Stream stream_;
  std::vector<ElementRun> runs_;
  int64_t run_elements_ = 0;
};

// The step rule moves no bytes to speak of; its time is the time that a step waits for it.
void bench_step_rule(const Stream& stream) {
  const Device device = stream.device();
  constexpr int64_t kLosses = 3;
  const Tensor statistics(DType::kUInt8, {sizeof(GradStatistics)}, device),
      input(DType::kFloat64, {input_word::kCount + kLosses}, device),
      words(DType::kFloat64, {1, rank_word::kCount + kLosses}, device),
      report(DType::kFloat64, {report_word::kCount + kLosses}, device),
      state(DType::kUInt8, {sizeof(StepState)}, device),
      step(DType::kUInt8, {sizeof(AdamWStep)}, device);
  // The state is that of a run of some length that watches for spikes.
  StepState host;
  host.set_losses(std::vector<double>(kSpikeWindow, 2.0));
  copy(state, {&host, DType::kUInt8, {sizeof host}}, stream);
  stream.synchronize();
  for (const double sigma : {0.0, 5.0}) {
    const bench::Timing time = bench::measure(
        [&](int64_t) {
          pack_words(statistics, input, words.view().select(0), stream);
          step_rule({.max_skips = 0, .spike_sigma = sigma}, input, words, state, step, report,
                    stream);
        },
        stream);
    bench::print({.name = "optim.step_rule",
                  .label = text("pack_words and step_rule, spike_sigma {}", sigma),
                  .value = 1e3 * time.ms,
                  .unit = "us",
                  .time = time,
                  .device = device});
  }
}

void run(bench::Options& options) {
  int64_t segments = 8;
  std::string only;
  options.number("--segments", segments, "buckets of 32 Mi parameters")
      .word("--only", only, bench::kOnlyHelp);
  if (!options.parse()) return;
  const Device gpu{DeviceType::kCuda, 0};
  require_device("optimizer_cuda_bench", gpu);
  const Stream stream = Stream::on(gpu);
  const Case large{text("{} buckets of 32 Mi", segments), segments, kBucketElements, 64};
  const Case small{"1000 parameters of 10112", 1, 1000 * 10240, 1000};
  for (const Case* c : {&large, &small}) Bench(*c, only, stream).run();
  if (only.empty()) bench_step_rule(stream);
}

}  // namespace
}  // namespace moiety::optim

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv,
                                 "The optimizer's operations on a GPU, against device copies of as "
                                 "many bytes.",
                                 moiety::optim::run);
}
