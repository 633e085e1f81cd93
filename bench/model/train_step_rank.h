// A rank of train_step_bench: the model, its optimizer, its batches, and a step of them.
#pragma once

#include <string>
#include <vector>

#include "bench/harness.h"
#include "moiety/base/arena.h"
#include "moiety/base/copy.h"
#include "moiety/base/parallel.h"
#include "moiety/base/step_ring.h"
#include "moiety/comm/communicator.h"
#include "moiety/comm/gpu_waits.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/model/step_input.h"
#include "moiety/model/transformer.h"
#include "moiety/moe/gpu_exchange.h"
#include "moiety/optim/distributed_optimizer.h"

namespace moiety {

inline constexpr int kBatches = 8;  // batches that the steps take in turn
inline constexpr double kLearningRate = 1e-3, kWeightDecay = 0.1, kClip = 1.0;
inline constexpr double kPeak = 989;  // TFLOP/s of an H100 or H200, dense bf16

struct Case {
  const char* name;
  int64_t d, layers, heads, kv_heads, head_dim, experts, top_k, ffn, vocab, sequences, seq_len;
  bool gpt_oss = false;  // its gate and biases, no norm of heads
};
inline constexpr Case kCases[] = {
    {"demo", 256, 4, 8, 2, 32, 8, 2, 128, 264, 8, 256},
    {"qwen3", 2048, 4, 32, 4, 128, 128, 8, 768, 151936, 2, 4096},
    {"small", 1024, 16, 16, 4, 64, 32, 4, 512, 50304, 4, 4096},
    {"gptoss", 2880, 2, 64, 8, 64, 32, 4, 2880, 201088, 2, 4096, true},
};

struct Settings {
  Case shape = kCases[0];
  moe::RowLayout layout = moe::RowLayout::kAuto;
  moe::Overlap overlap = moe::Overlap::kAuto;
  Device device;
  int threads = core_count();
  int ranks = 1;
  int steps = 10;               // timed steps
  int rounds = 1;               // of so many, on a GPU
  std::string parallel = "ep";  // what several ranks divide
  bool groups = false, eager = false;
  // Routing is uniform, whatever the scores are (router.force_balance). Experts are dealt out to ranks
  // in turn, so that tokens have some on all ranks, as if they had chosen by lot.
  bool balanced = false;
  bool delay_wgrad = false;
  bool zero_copy = false;  // ep.zero_copy = auto
  int comm_sms = 0;        // ep.comm_sms
  DType dtype = DType::kBFloat16;
};

inline model::Config config_of(const Settings& settings) {
  const Case& c = settings.shape;
  model::Config config = model::preset("tiny");
  config.vocab = c.vocab;
  config.d_model = c.d;
  config.layers = c.layers;
  config.heads = c.heads;
  config.kv_heads = c.kv_heads;
  config.head_dim = c.head_dim;
  config.router.experts = c.experts;
  config.router.top_k = c.top_k;
  config.d_ffn = c.ffn;
  if (c.gpt_oss) {  // configs/gpt-oss-20b-experts.toml
    config.qk_norm = false;
    config.activation = gemm::qgeglu(1.702f, 7, 1);
    config.expert_bias = true;
  }
  config.row_layout = settings.layout;
  config.overlap = settings.overlap;
  config.delay_wgrad = settings.delay_wgrad;
  config.router.force_balance = settings.balanced;
  return config;
}

// Random bytes, the same for every number of ranks: sequence `b` of batch `n`.
inline void fill_sequence(int64_t n, int64_t b, int64_t seq_len, int32_t* token, int32_t* target) {
  for (int64_t s = 0; s <= seq_len; ++s) {
    const PhiloxBlock block =
        philox(rng_key(2, RngDomain::kGeneration),
               {static_cast<uint32_t>(s), static_cast<uint32_t>(b), static_cast<uint32_t>(n), 0});
    const auto byte = static_cast<int32_t>(block[0] & 255);
    if (s < seq_len) token[s] = byte;
    if (s > 0) target[s - 1] = byte;
  }
}

class Rank {
 public:
  Rank(const Settings& settings, comm::Communicator& world)
      : shape_(settings.shape),
        config_(config_of(settings)),
        device_(settings.device),
        stream_(Stream::on(device_)),
        sequences_(sequences_of(settings, world.size())),
        groups_(grid_of(settings, world.size()), prepared(world, device_)),
        group_(make_group(settings)),
        model_(config_, settings.dtype,
               {.experts = &group_,
                .tp = grid().tp > 1 ? &groups_.of({gtp::Axis::kTp}) : nullptr,
                .world = &world,
                .device = device_}),
        optimizer_(model_.parameter_specs(),
                   {.weights = settings.dtype, .device = device_, .late_weights = true}, groups_),
        capacity_(model_.moe_capacity(-1, tokens() / grid().tp)),
        sums_(config_.moe_layers(), shape_.experts, device_),
        input_(byte_size(DType::kFloat64, model::kStepInputWords), 1, device_, "input"),
        batches_(2 * batch_bytes(), kBatches, device_, "batches"),
        report_(DType::kFloat64, {model::kStepReportWords}, device_),
        arena_("bench", device_) {
    optimizer_.initialize(1, stream_);
    model_.bind(optimizer_.parameters());
    if (settings.zero_copy && on_gpus()) share_rows(settings);
    auto* words = reinterpret_cast<double*>(input_.slot(0));
    words[optim::input_word::kLr] = kLearningRate;
    words[optim::input_word::kWeightDecay] = kWeightDecay;
    words[optim::input_word::kClip] = kClip;
    for (int64_t n = 0; n < kBatches; ++n) {
      auto* token = reinterpret_cast<int32_t*>(batches_.slot(n));
      auto* target = reinterpret_cast<int32_t*>(batches_.slot(n) + batch_bytes());
      for (int64_t b = 0; b < sequences_; ++b) {
        fill_sequence(n, world.rank() / grid().tp * sequences_ + b, shape_.seq_len,
                      token + b * shape_.seq_len, target + b * shape_.seq_len);
      }
    }
  }

  // The first step finds out how much memory the others need.
  double first() {
    enqueue();
    const double loss = this->loss();
    arena_.settle();
    return loss;
  }
  void enqueue() {
    optimizer_.begin_forward(stream_);
    sums_.clear(stream_);
    batches_.fetch(stream_);
    input_.fetch(stream_);
    auto* bytes = static_cast<std::byte*>(batches_.block().raw());
    const auto ids = [&](int64_t at) {
      return TensorView(bytes + at, DType::kInt32, {sequences_, shape_.seq_len}, device_);
    };
    model::Batch batch;
    batch.token_BS = ids(0);
    batch.target_BS = ids(batch_bytes());
    {
      const ArenaScope scope(arena_);
      model_.forward(batch, capacity_, sums_, arena_, stream_,
                     [&](int end) { optimizer_.await_weights(end, stream_); });
      model::Transformer::GradientsReady ready;
      if (on_gpus()) ready = [&](int first) { optimizer_.on_grads_ready(first, stream_); };
      model_.backward(batch, stream_, ready);
    }
    const TensorView input(input_.block().raw(), DType::kFloat64, {model::kStepInputWords},
                           device_);
    model::set_step_input(sums_, true, input, stream_);
    optimizer_.enqueue(input, report_, stream_);
  }
  // The loss of the last step, before its update.
  double loss() {
    Event end;
    end.record(stream_);
    groups_.world().wait(end);
    const optim::StepReport report = optimizer_.read_report(to_host(report_, stream_));
    MOIETY_CHECK(!report.skip, "a step is skipped; overflow {}", report.overflow);
    stood_ms_ = 1e-6 * static_cast<double>(report.stood_ns);
    return report.losses[0] / static_cast<double>(report.tokens);
  }
  // For how long the GPU has waited for peers of its tp or ep group so far.
  double waited_ms() const {
    TensorView word = moe::waited_ns(group_);
    if (grid().tp > 1) {
      const uint64_t* const ns = comm::waited_word(groups_.of({gtp::Axis::kTp}));
      if (ns) word = TensorView(const_cast<uint64_t*>(ns), DType::kInt64, {1}, device_);
    }
    if (!word.defined()) return 0;
    return 1e-6 * static_cast<double>(*to_host(word, stream_).data<int64_t>());
  }
  // The rows of the rank that has most, mean over the layers of the last step, as a multiple of
  // those of a rank.
  double fullest() const {
    const model::StepStats stats = sums_.read(stream_);
    double rows = 0;
    for (const model::MoeLayerStats& layer : stats.moe) rows += double(layer.required);
    return rows / double(stats.moe.size() * shape_.top_k * tokens() / grid().tp);
  }
  // For how long the GPU stood, in the step of the last loss, at what travels beside computing.
  double stood_ms() const { return stood_ms_; }
  bool on_gpus() const { return device_.type == DeviceType::kCuda && groups_.world().size() > 1; }
  const Stream& stream() const { return stream_; }
  const model::Config& config() const { return config_; }
  const gemm::PathReport* expert_path() const { return model_.expert_path(); }
  void close() {
    group_.close();
    if (shared_rows_) shared_rows_.close();
  }

 private:
  static gtp::Grid grid_of(const Settings& settings, int ranks) {
    if (settings.parallel == "tp") return {.tp = ranks, .edp = ranks};
    if (settings.parallel == "dp") return {.dp = ranks, .edp = ranks};
    return {.dp = ranks, .ep = ranks};
  }
  // How many a rank has; ranks of a tp group have the same ones.
  static int64_t sequences_of(const Settings& settings, int ranks) {
    const int64_t all = settings.shape.sequences;
    if (settings.device.type == DeviceType::kCpu) return all / ranks;
    return all * grid_of(settings, ranks).tp;
  }
  // Operations run alone until a step's addresses are settled.
  static comm::Communicator& prepared(comm::Communicator& world, Device device) {
    if (device.type == DeviceType::kCuda && world.size() > 1) {
      world.run_alone(true);
      world.prepare(device);
    }
    return world;
  }
  moe::EpGroup make_group(const Settings& settings) const {
    if (on_gpus()) groups_.prepare(device_);
    const int ranks = grid().ep, experts = static_cast<int>(shape_.experts);
    std::vector<int32_t> in_turn;
    for (int e = 0; e < experts; ++e) in_turn.push_back(e % ranks);
    return moe::EpGroup::create(
        groups_.of({gtp::Axis::kEp}),
        settings.balanced ? moe::ExpertMap(in_turn, ranks) : moe::ExpertMap(experts, ranks),
        model::ep_limits(config_, settings.dtype, tokens() / grid().tp),
        {.zero_copy = settings.zero_copy ? moe::ZeroCopy::kAuto : moe::ZeroCopy::kOff,
         .comm_sms = settings.comm_sms,
         .device = device_});
  }
  // Rows that peers reach, as the trainer lends them.
  void share_rows(const Settings& settings) {
    comm::Communicator& ranks = groups_.of({gtp::Axis::kEp});
    const int64_t bytes = model::lent_bytes(config_, settings.dtype, capacity_, false);
    shared_rows_ = comm::SymmetricBuffer::create(ranks, "expert rows", bytes, device_);
    group_.attach(shared_rows_);
    arena_.lend({shared_rows_.local(), static_cast<size_t>(bytes)});
  }
  const gtp::Grid& grid() const { return groups_.grid(); }
  int64_t tokens() const { return sequences_ * shape_.seq_len; }
  int64_t batch_bytes() const { return byte_size(DType::kInt32, tokens()); }

  Case shape_;
  model::Config config_;
  Device device_;
  Stream stream_;
  int64_t sequences_;
  optim::GridGroups groups_;
  moe::EpGroup group_;
  model::Transformer model_;
  optim::DistributedOptimizer optimizer_;
  int64_t capacity_;
  model::StepSums sums_;
  InboundRing input_, batches_;
  Tensor report_;
  comm::SymmetricBuffer shared_rows_;
  Arena arena_;
  double stood_ms_ = 0;
};

}  // namespace moiety
