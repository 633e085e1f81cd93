// A training step: forward, backward, clipping, AdamW on fp32 masters; train_step.py has the same
// models. On a CPU ranks share the batch and the experts. On a GPU a step is a graph, unless --groups
// times its parts. Ranks on GPUs are threads with a GPU each, and as many tokens each as one rank
// has; before them each GPU runs the same model by itself, all at once, and the slowest of these is
// what the rate of a GPU is compared with.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/harness.h"
#include "bench/ranks.h"
#include "moiety/base/arena.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/base/graph.h"
#include "moiety/base/parallel.h"
#include "moiety/base/step_ring.h"
#include "moiety/base/trace.h"
#include "moiety/comm/gpu_environment.h"
#include "moiety/comm/thread_group.h"
#include "moiety/model/step_input.h"
#include "moiety/model/transformer.h"
#include "moiety/optim/distributed_optimizer.h"

namespace moiety {
namespace {

constexpr int kBatches = 8;  // batches that the steps take in turn
constexpr double kLearningRate = 1e-3, kWeightDecay = 0.1, kClip = 1.0;
constexpr double kPeak = 989;  // TFLOP/s of an H100 or H200, dense bf16

struct Case {
  const char* name;
  int64_t d, layers, heads, kv_heads, head_dim, experts, top_k, ffn, vocab, sequences, seq_len;
  bool gpt_oss = false;  // its gate and biases, no norm of heads
};
constexpr Case kCases[] = {
    {"demo", 256, 4, 8, 2, 32, 8, 2, 128, 264, 8, 256},
    {"qwen3", 2048, 4, 32, 4, 128, 128, 8, 768, 151936, 2, 4096},
    {"small", 1024, 16, 16, 4, 64, 32, 4, 512, 50304, 4, 4096},
    {"gptoss", 2880, 2, 64, 8, 64, 32, 4, 2880, 201088, 2, 4096, true},
};

struct Settings {
  Case shape = kCases[0];
  moe::RowLayout layout = moe::RowLayout::kAuto;
  Device device;
  int threads = core_count();
  int ranks = 1;
  int steps = 10;               // timed steps
  int rounds = 1;               // of so many, on a GPU
  std::string parallel = "ep";  // what several ranks divide
  bool groups = false, eager = false;
  DType dtype = DType::kBFloat16;
};

model::Config config_of(const Settings& settings) {
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
  return config;
}

// Random bytes, the same for every number of ranks: sequence `b` of batch `n`.
void fill_sequence(int64_t n, int64_t b, int64_t seq_len, int32_t* token, int32_t* target) {
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
        group_(make_group(settings.dtype)),
        model_(config_, settings.dtype,
               {.experts = &group_,
                .tp = grid().tp > 1 ? &groups_.of({gtp::Axis::kTp}) : nullptr,
                .world = &world,
                .device = device_}),
        optimizer_(model_.parameter_specs(), {.weights = settings.dtype, .device = device_},
                   groups_),
        capacity_(model_.moe_capacity(-1, tokens() / grid().tp)),
        sums_(config_.moe_layers(), shape_.experts, device_),
        input_(byte_size(DType::kFloat64, model::kStepInputWords), 1, device_, "input"),
        batches_(2 * batch_bytes(), kBatches, device_, "batches"),
        report_(DType::kFloat64, {model::kStepReportWords}, device_),
        arena_("bench", device_) {
    optimizer_.initialize(1, stream_);
    model_.bind(optimizer_.parameters());
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
      model_.forward(batch, capacity_, sums_, arena_, stream_);
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
  // For how long the GPU stood, in the step of the last loss, at what travels beside computing.
  double stood_ms() const { return stood_ms_; }
  bool on_gpus() const { return device_.type == DeviceType::kCuda && groups_.world().size() > 1; }
  const Stream& stream() const { return stream_; }
  const model::Config& config() const { return config_; }
  const gemm::PathReport* expert_path() const { return model_.expert_path(); }
  void close() { group_.close(); }

 private:
  static gtp::Grid grid_of(const Settings& settings, int ranks) {
    if (settings.parallel == "tp") return {.tp = ranks, .edp = ranks};
    if (settings.parallel == "dp") return {.dp = ranks, .edp = ranks};
    return {.dp = ranks, .ep = ranks};
  }
  // Of a rank; ranks of a tp group have the same ones.
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
  moe::EpGroup make_group(DType dtype) const {
    if (on_gpus()) groups_.prepare(device_);
    return moe::EpGroup::create(
        groups_.of({gtp::Axis::kEp}), moe::ExpertMap(static_cast<int>(shape_.experts), grid().ep),
        model::ep_limits(config_, dtype, tokens() / grid().tp), {.device = device_});
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
  Arena arena_;
  double stood_ms_ = 0;
};

struct Result {
  std::vector<double> ms;                // of each timed step
  std::map<std::string, double> groups;  // ms of a step by operation
  double memory = 0;
  double stood_ms = 0;  // the GPU, at what travels beside computing, in one step
  std::string gpus;     // clocks and power of the GPUs while it ran
  std::string experts;  // the path that computes them, and why no better one does
};

// The time of the innermost spans of one step, by operation.
std::map<std::string, double> measure_groups(Rank& rank) {
  Trace trace;
  set_current_trace(&trace);
  trace.follow(rank.stream());
  rank.enqueue();
  trace.settle();
  set_current_trace(nullptr);
  std::map<std::string, double> groups;
  for (size_t i = 0; i < trace.events.size(); ++i) {
    const TraceEvent& e = trace.events[i];
    const bool inner = i + 1 == trace.events.size() || trace.events[i + 1].begin >= e.end;
    if (inner) groups[e.name] += 1e-6 * static_cast<double>(e.end - e.begin);
  }
  return groups;
}

// "1 1530 MHz 690 W; ..." of the visible GPUs, as nvidia-smi says.
std::string clocks_and_power() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string command =
      text("nvidia-smi --query-gpu=index,clocks.sm,power.draw --format=csv,noheader{} 2>/dev/null",
           visible ? text(" -i {}", visible) : "");
  std::string out;
  if (FILE* pipe = popen(command.c_str(), "r")) {
    for (char line[256]; std::fgets(line, sizeof(line), pipe);) {
      std::string one = line;
      std::erase(one, ',');
      while (!one.empty() && one.back() == '\n') one.pop_back();
      out += (out.empty() ? "" : "; ") + one;
    }
    pclose(pipe);
  }
  return out;
}

// Runs a setting. Throws if the model does not learn its batches.
Result measure(const Settings& settings, comm::Communicator& world) {
  const bool gpu = settings.device.type == DeviceType::kCuda;
  set_thread_budget(std::max(1, settings.threads / world.size()));
  const int64_t free = gpu ? gpu_free_memory(settings.device.index) : 0;
  Rank rank(settings, world);
  const double first = rank.first();
  world.barrier();
  world.run_alone(false);
  Graph graph;
  if (gpu && !settings.eager) graph = Graph(rank.stream(), [&] { rank.enqueue(); });
  const auto step = [&] { gpu && !settings.eager ? graph.launch(rank.stream()) : rank.enqueue(); };
  Result result;
  if (rank.expert_path()) result.experts = rank.expert_path()->describe();
  world.barrier();
  for (int i = 0; i < 2; ++i) step();
  rank.loss();
  world.barrier();
  if (gpu) {
    for (int round = 0; round < settings.rounds; ++round) {
      const double all = bench::milliseconds([&] {
        for (int i = 0; i < settings.steps; ++i) step();
        if (round == settings.rounds / 2 && settings.device.index == 0) {
          result.gpus = clocks_and_power();
        }
        Event end;
        end.record(rank.stream());
        world.wait(end);
      });
      result.ms.push_back(all / settings.steps);
    }
    result.memory = static_cast<double>(free - gpu_free_memory(settings.device.index));
    if (settings.groups) result.groups = measure_groups(rank);
  } else {
    for (int i = 0; i < settings.steps; ++i) result.ms.push_back(bench::milliseconds(step));
  }
  const double last = rank.loss();
  MOIETY_CHECK(last < first, "the loss went from {} to {}", first, last);
  result.stood_ms = rank.stood_ms();
  result.ms = bench::slowest(world, result.ms);
  graph = {};
  world.barrier();
  rank.close();
  return result;
}

Settings of_rank(Settings settings, int rank) {
  if (settings.device.type == DeviceType::kCuda) settings.device.index += rank;
  return settings;
}

// Milliseconds of a step that a GPU runs by itself, all of them at once; the slowest one's.
double slowest_alone(const Settings& settings) {
  std::vector<double> ms(settings.ranks);
  std::vector<std::exception_ptr> errors(settings.ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < settings.ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        comm::run_thread_ranks(1, {}, [&](comm::Communicator& one) {
          ms[r] = bench::timing(measure(of_rank(settings, r), one).ms).ms;
        });
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::exception_ptr& e : errors) {
    if (e) std::rethrow_exception(e);
  }
  return *std::max_element(ms.begin(), ms.end());
}

void print_groups(const std::string& name, const Result& result) {
  double all = 0;
  for (const auto& [group, ms] : result.groups) all += ms;
  for (const auto& [group, ms] : result.groups) {
    bench::Row row{"train_step." + group, name, 100 * ms / all, "% of groups", {.ms = ms}};
    row.device = {DeviceType::kCuda, 0};
    bench::print(row);
  }
}

void run(bench::Options& options) {
  Settings settings;
  std::string dtype = "bf16", device = "cpu", model = "demo", layout = "auto";
  options.number("--threads", settings.threads, "that the ranks share")
      .choice("--layout", layout, {"auto", "expert", "rank"}, "moe.layout")
      .choice("--dtype", dtype, {"bf16", "fp32"}, "of weights and activations")
      .choice("--device", device, {"cpu", "cuda"}, "")
      .choice(
          "--model", model, {"demo", "qwen3", "small", "gptoss"},
          "the demo's; Qwen3-30B-A3B cut to 4 layers; 1 B parameters; GPT-OSS 20B cut to 2 layers")
      .flag("--groups", settings.groups, "on a GPU: the time of a step by operation")
      .flag("--eager", settings.eager, "on a GPU: not captured")
      .number("--ranks", settings.ranks, "threads; on GPUs each has one")
      .choice("--parallel", settings.parallel, {"dp", "tp", "ep"}, "what ranks on GPUs divide")
      .number("--rounds", settings.rounds, "of as many steps, on a GPU")
      .number("--steps", settings.steps, "that are timed");
  if (!options.parse()) return;
  settings.dtype = dtype == "bf16" ? DType::kBFloat16 : DType::kFloat32;
  if (device == "cuda") settings.device = {DeviceType::kCuda, 0};
  for (const Case& c : kCases) {
    if (model == c.name) settings.shape = c;
  }
  for (const auto wanted : {moe::RowLayout::kExpert, moe::RowLayout::kRank}) {
    if (layout == moe::name(wanted)) settings.layout = wanted;
  }
  const Case& c = settings.shape;
  const bool ranks_on_gpus = device == "cuda" && settings.ranks > 1;
  MOIETY_CHECK(device == "cuda" || (settings.parallel == "ep" && c.sequences % settings.ranks == 0),
               "on a CPU --ranks {} share experts and divide the batch of {}", settings.ranks,
               c.sequences);
  if (ranks_on_gpus) comm::prepare_gpu_environment();
  MOIETY_CHECK(!ranks_on_gpus || settings.ranks <= gpu_status().count, "--ranks {} of {} GPUs",
               settings.ranks, gpu_status().count);
  const double alone = ranks_on_gpus ? slowest_alone(settings) : 0;
  Result result;
  comm::run_thread_ranks(settings.ranks, {}, [&](comm::Communicator& world) {
    Result mine = measure(of_rank(settings, world.rank()), world);
    if (world.rank() == 0) result = std::move(mine);
  });
  const bench::Timing time = bench::timing(result.ms);
  const double tokens = static_cast<double>(c.sequences * c.seq_len);  // of a GPU
  bench::Row row{"train_step",
                 text("d{}.l{}.e{}k{}f{}.b{}x{}.{}", c.d, c.layers, c.experts, c.top_k, c.ffn,
                      c.sequences, c.seq_len, dtype),
                 tokens * 1e3 / time.ms, ranks_on_gpus ? "tokens/s a GPU" : "tokens/s", time};
  row.more = text(R"("ranks": {}, "threads": {})", settings.ranks, settings.threads);
  if (device == "cuda") {
    const double tflops =
        model::flops_per_token(config_of(settings), c.seq_len, true) * tokens / time.ms * 1e-9;
    row.device = settings.device;
    row.more = text(R"("tflops": {:.1f}, "mfu": {:.1f}, "memory": {:.0f})", tflops,
                    100 * tflops / kPeak, result.memory);
  }
  if (ranks_on_gpus) {
    row.label += text(".{}{}", settings.parallel, settings.ranks);
    row.against = "one GPU, the slower of them";
    row.ratio = alone / time.ms;
    row.more += text(R"(, "ranks": {}, "alone_ms": {:.3f}, "stood_ms": {:.3f}, "gpus": "{}")",
                     settings.ranks, alone, result.stood_ms, result.gpus);
  }
  row.more += text(R"(, "experts": "{}")", result.experts);
  bench::print(row);
  print_groups(row.label, result);
}

}  // namespace
}  // namespace moiety

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "A training step.", moiety::run);
}
