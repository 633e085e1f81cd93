// A training step of the demo's model: forward, backward, clipping, AdamW on fp32 masters. Prints
// one row (design.md, Measuring); the peer is bench/peers/train_step.py.
//
//   train_step_bench [--threads N] [--dtype bf16|fp32] [--ranks N] [--steps N]
//
// Ranks are threads that share the experts (ep = ranks), the batch and the N threads.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "moiety/base/arena.h"
#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/base/rng.h"
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
        copies_(world.split(world.rank(), 0, "edp")),
        group_(moe::EpGroup::create(
            world, moe::ExpertMap(static_cast<int>(demo_model().router.experts), world.size()),
            model::ep_limits(demo_model(), settings.dtype, sequences_ * kSeqLen), {})),
        model_(demo_model(), settings.dtype, {.experts = &group_, .data = &world}),
        optimizer_(model_.parameter_specs(), {.weights = settings.dtype}, world, *copies_),
        capacity_(model_.moe_capacity(-1, sequences_ * kSeqLen)) {
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
    model::StepStats stats;
    {
      const ArenaScope scope(arena_);
      model_.forward(batch, capacity_, stats, arena_, Stream());
      model_.backward(batch, Stream());
    }
    if (steps_ == 1) arena_.settle();
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
  std::unique_ptr<comm::Communicator> copies_;  // ranks that hold the same experts: itself
  moe::EpGroup group_;
  model::Transformer model_;
  optim::DistributedOptimizer optimizer_;
  int64_t capacity_;
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
    const auto start = std::chrono::steady_clock::now();
    last = rank.step();
    ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
                     .count());
  }
  MOIETY_CHECK(last < first, "the loss went from {} to {}", first, last);
  rank.close();
  return ms;
}

Settings parse(int argc, char** argv) {
  Settings s;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    MOIETY_CHECK(i + 1 < argc, "{} needs a value", key);
    const std::string value = argv[i + 1];
    if (key == "--dtype") {
      MOIETY_CHECK(value == "bf16" || value == "fp32", "--dtype {} is not bf16 or fp32", value);
      s.dtype = value == "bf16" ? DType::kBFloat16 : DType::kFloat32;
      continue;
    }
    int* number = key == "--threads" ? &s.threads
                  : key == "--ranks" ? &s.ranks
                  : key == "--steps" ? &s.steps
                                     : nullptr;
    MOIETY_CHECK(number != nullptr, "unknown option {}", key);
    *number = std::atoi(value.c_str());
    MOIETY_CHECK(*number >= 1, "{} is {}", key, value);
  }
  MOIETY_CHECK(kBatch % s.ranks == 0, "--ranks {} does not divide the batch of {}", s.ranks,
               kBatch);
  return s;
}

void run(const Settings& settings) {
  std::vector<double> ms;
  comm::run_thread_ranks(settings.ranks, {}, [&](comm::Communicator& world) {
    std::vector<double> mine = measure(settings, world);
    if (world.rank() == 0) ms = std::move(mine);
  });
  std::nth_element(ms.begin(), ms.begin() + ms.size() / 2, ms.end());
  const double median = ms[ms.size() / 2];
  const model::Config config = demo_model();
  const std::string row =
      text(R"({{"name": "train_step", "case": "d{}.l{}.e{}k{}f{}.b{}x{}.{}", "device": "cpu", )"
           R"("value": {:.1f}, "unit": "bytes/s", "ms": {:.3f}, "ranks": {}, "threads": {}}})",
           config.d_model, config.layers, config.router.experts, config.router.top_k, config.d_ffn,
           kBatch, kSeqLen, settings.dtype == DType::kBFloat16 ? "bf16" : "fp32",
           kBatch * kSeqLen * 1e3 / median, median, settings.ranks, settings.threads);
  std::puts(row.c_str());
}

}  // namespace
}  // namespace moiety

int main(int argc, char** argv) {
  try {
    moiety::run(moiety::parse(argc, argv));
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "train_step_bench: %s\n", e.what());
    return 1;
  }
}
