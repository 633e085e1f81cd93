// A training step of the demo's model: forward, backward, clipping, AdamW on fp32 masters. The peer
// is bench/peers/train_step.py. Ranks are threads that share the experts (ep = ranks), the batch
// and the program's threads.
#include <memory>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "moiety/base/arena.h"
#include "moiety/base/parallel.h"
#include "moiety/comm/thread/thread_group.h"
#include "moiety/model/transformer.h"
#include "moiety/optim/distributed_optimizer.h"

namespace moiety {
namespace {

constexpr int64_t kBatch = 8, kSeqLen = 256, kVocab = 264;
constexpr int kBatches = 8;  // that the steps go through in turns
constexpr double kLearningRate = 1e-3, kWeightDecay = 0.1, kClip = 1.0;

struct Settings {
  int threads = core_count();
  int ranks = 1;
  int steps = 10;  // that are timed
  DType dtype = DType::kBFloat16;
};

model::Config demo_model() {
  model::Config config = model::preset("tiny");
  config.vocab = kVocab;
  config.d_ffn = 128;
  return config;
}

// Random bytes, the same for every number of ranks: sequence `b` of batch `n`.
void fill_sequence(int64_t n, int64_t b, int32_t* token, int32_t* target) {
  for (int64_t s = 0; s <= kSeqLen; ++s) {
    const PhiloxBlock block =
        philox(rng_key(2, RngDomain::kGeneration),
               {static_cast<uint32_t>(s), static_cast<uint32_t>(b), static_cast<uint32_t>(n), 0});
    const auto byte = static_cast<int32_t>(block[0] & 255);
    if (s < kSeqLen) token[s] = byte;
    if (s > 0) target[s - 1] = byte;
  }
}

class Rank {
 public:
  Rank(const Settings& settings, comm::Communicator& world)
      : sequences_(kBatch / world.size()),
        groups_({.dp = world.size(), .ep = world.size()}, world),
        group_(moe::EpGroup::create(
            world, moe::ExpertMap(static_cast<int>(demo_model().router.experts), world.size()),
            model::ep_limits(demo_model(), settings.dtype, sequences_ * kSeqLen), {})),
        model_(demo_model(), settings.dtype, {.experts = &group_, .world = &world}),
        optimizer_(model_.parameter_specs(), {.weights = settings.dtype}, groups_),
        capacity_(model_.moe_capacity(-1, sequences_ * kSeqLen)),
        sums_(model_.make_sums()) {
    optimizer_.initialize(1, Stream());
    model_.bind(optimizer_.parameters());
    for (int64_t n = 0; n < kBatches; ++n) {
      const Tensor& token = tokens_.emplace_back(ids());
      const Tensor& target = targets_.emplace_back(ids());
      for (int64_t b = 0; b < sequences_; ++b) {
        fill_sequence(n, world.rank() * sequences_ + b, token.data<int32_t>() + b * kSeqLen,
                      target.data<int32_t>() + b * kSeqLen);
      }
    }
  }

  // The mean loss before the update.
  double step() {
    const size_t n = steps_++ % kBatches;
    const model::Batch batch{tokens_[n], targets_[n], {}, {}};
    sums_.clear(Stream());
    {
      const ArenaScope scope(arena_);
      model_.forward(batch, capacity_, sums_, arena_, Stream());
      model_.backward(batch, Stream());
    }
    if (steps_ == 1) arena_.settle();
    const model::StepStats stats = sums_.read();
    const optim::StepReport report = optimizer_.step({.lr = kLearningRate,
                                                      .weight_decay = kWeightDecay,
                                                      .clip = kClip,
                                                      .tokens = stats.targets,
                                                      .losses = {stats.loss_sum}},
                                                     Stream());
    MOIETY_CHECK(!report.skip && report.tokens == kBatch * kSeqLen, "step {}: {} tokens, skip {}",
                 steps_, report.tokens, report.skip);
    return report.losses[0] / static_cast<double>(report.tokens);
  }

  void close() { group_.close(); }

 private:
  Tensor ids() const { return Tensor(DType::kInt32, {sequences_, kSeqLen}); }

  int64_t sequences_;
  optim::GridGroups groups_;
  moe::EpGroup group_;
  model::Transformer model_;
  optim::DistributedOptimizer optimizer_;
  int64_t capacity_;
  model::StepSums sums_;
  Arena arena_{"bench"};
  std::vector<Tensor> tokens_, targets_;
  int64_t steps_ = 0;
};

// Milliseconds of each timed step. Throws if the model does not learn its batches.
std::vector<double> measure(const Settings& settings, comm::Communicator& world) {
  set_thread_budget(std::max(1, settings.threads / world.size()));
  Rank rank(settings, world);
  const double first = rank.step();
  double last = first;
  for (int i = 0; i < 2; ++i) last = rank.step();
  std::vector<double> ms;
  for (int i = 0; i < settings.steps; ++i) {
    ms.push_back(bench::milliseconds([&] { last = rank.step(); }));
  }
  MOIETY_CHECK(last < first, "the loss went from {} to {}", first, last);
  rank.close();
  return ms;
}

void run(bench::Options& options) {
  Settings settings;
  std::string dtype = "bf16";
  options.number("--threads", settings.threads, "that the ranks share")
      .choice("--dtype", dtype, {"bf16", "fp32"}, "of weights and activations")
      .number("--ranks", settings.ranks, "that share the experts and the batch")
      .number("--steps", settings.steps, "that are timed");
  if (!options.parse()) return;
  settings.dtype = dtype == "bf16" ? DType::kBFloat16 : DType::kFloat32;
  MOIETY_CHECK(kBatch % settings.ranks == 0, "--ranks {} does not divide the batch of {}",
               settings.ranks, kBatch);
  std::vector<double> ms;
  comm::run_thread_ranks(settings.ranks, {}, [&](comm::Communicator& world) {
    std::vector<double> mine = measure(settings, world);
    if (world.rank() == 0) ms = std::move(mine);
  });
  const bench::Timing time = bench::timing(ms);
  const model::Config config = demo_model();
  bench::Row row{
      "train_step",
      text("d{}.l{}.e{}k{}f{}.b{}x{}.{}", config.d_model, config.layers, config.router.experts,
           config.router.top_k, config.d_ffn, kBatch, kSeqLen, dtype),
      kBatch * kSeqLen * 1e3 / time.ms, "bytes/s", time};
  row.more = text(R"("ranks": {}, "threads": {})", settings.ranks, settings.threads);
  bench::print(row);
}

}  // namespace
}  // namespace moiety

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "A training step of the demo's model.", moiety::run);
}
