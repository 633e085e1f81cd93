// A training step: forward, backward, clipping, AdamW on fp32 masters; train_step.py has the same
// models. On a CPU ranks share the batch and the experts. On a GPU a step is a graph, unless --groups
// times its parts. Ranks on GPUs are threads with a GPU each, and as many tokens each as one rank
// has; before them each GPU runs the same model by itself, all at once, and the slowest of these is
// what the rate of a GPU is compared with.
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "bench/harness.h"
#include "bench/model/train_step_rank.h"
#include "bench/ranks.h"
#include "moiety/base/gpu.h"
#include "moiety/base/graph.h"
#include "moiety/base/trace.h"
#include "moiety/comm/gpu_environment.h"
#include "moiety/comm/thread_group.h"

namespace moiety {
namespace {

struct Result {
  std::vector<double> ms;                // of each timed step
  std::map<std::string, double> groups;  // ms of a step by operation
  double memory = 0;
  double stood_ms = 0;   // the GPU, at what travels beside computing, in one step
  double waited_ms = 0;  // for peers of tp or ep, in one step
  double fullest = 0;    // rows of experts on the rank that has most, of the mean
  std::string gpus;      // clocks and power of the GPUs while it ran
  std::string experts;   // the path that computes them, and why no better one does
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
  const double waited = gpu ? rank.waited_ms() : 0;
  if (gpu) {
    for (int round = 0; round < settings.rounds; ++round) {
      const double all = bench::milliseconds([&] {
        for (int i = 0; i < settings.steps; ++i) step();
        if (round == settings.rounds / 2 && settings.device.index == 0) {
          result.gpus = bench::clocks_and_power();
        }
        Event end;
        end.record(rank.stream());
        world.wait(end);
      });
      result.ms.push_back(all / settings.steps);
    }
    result.waited_ms = (rank.waited_ms() - waited) / (settings.rounds * settings.steps);
    result.memory = static_cast<double>(free - gpu_free_memory(settings.device.index));
    if (settings.groups) result.groups = measure_groups(rank);
  } else {
    for (int i = 0; i < settings.steps; ++i) result.ms.push_back(bench::milliseconds(step));
  }
  const double last = rank.loss();
  MOIETY_CHECK(last < first, "the loss went from {} to {}", first, last);
  result.stood_ms = rank.stood_ms();
  if (gpu && world.size() > 1) result.fullest = rank.fullest();
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

// What a row of several ranks says besides.
void add_ranks(const Settings& settings, double alone, const Result& result, bench::Row& row) {
  row.label += text(".{}{}", settings.parallel, settings.ranks);
  if (settings.balanced) row.label += ".balanced";
  if (settings.delay_wgrad) row.label += ".delayed";
  if (settings.overlap == moe::Overlap::kNone) row.label += ".none";
  if (settings.overlap == moe::Overlap::kWgrad) row.label += ".wgrad";
  if (settings.overlap == moe::Overlap::kShared) row.label += ".shared";
  if (settings.zero_copy) row.label += ".direct";
  if (settings.comm_sms > 0) row.label += text(".sms{}", settings.comm_sms);
  if (settings.layout != moe::RowLayout::kAuto) row.label += text(".{}", name(settings.layout));
  row.against = "one GPU, the slower of them";
  row.ratio = alone / row.time.ms;
  row.more += text(
      R"(, "ranks": {}, "alone_ms": {:.3f}, "stood_ms": {:.3f}, "waited_ms": {:.3f}, "fullest": {:.3f}, "gpus": "{}")",
      settings.ranks, alone, result.stood_ms, result.waited_ms, result.fullest, result.gpus);
}

void run(bench::Options& options) {
  Settings settings;
  std::string dtype = "bf16", device = "cpu", model = "demo", layout = "auto", overlap = "auto";
  options.number("--threads", settings.threads, "that the ranks share")
      .choice("--layout", layout, {"auto", "expert", "rank"}, "moe.layout")
      .choice("--overlap", overlap, {"auto", "none", "wgrad", "shared"}, "ep.overlap")
      .choice("--dtype", dtype, {"bf16", "fp32"}, "of weights and activations")
      .choice("--device", device, {"cpu", "cuda"}, "where")
      .choice(
          "--model", model, {"demo", "qwen3", "small", "gptoss"},
          "the demo's; Qwen3-30B-A3B cut to 4 layers; 1 B parameters; GPT-OSS 20B cut to 2 layers")
      .flag("--balanced", settings.balanced, "uniform routing, whatever the routers' scores are")
      .flag("--delay-wgrad", settings.delay_wgrad, "moe.delay_wgrad")
      .flag("--zero-copy", settings.zero_copy, "ep.zero_copy = auto")
      .number("--comm-sms", settings.comm_sms, "ep.comm_sms")
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
  if (overlap == "none") settings.overlap = moe::Overlap::kNone;
  if (overlap == "wgrad") settings.overlap = moe::Overlap::kWgrad;
  if (overlap == "shared") settings.overlap = moe::Overlap::kShared;
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
  if (ranks_on_gpus) add_ranks(settings, alone, result, row);
  row.more += text(R"(, "experts": "{}")", result.experts);
  bench::print(row);
  print_groups(row.label, result);
}

}  // namespace
}  // namespace moiety

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "A training step.", moiety::run);
}
