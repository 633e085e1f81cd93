// The memory of a rank against the program's estimate before a run (memory_estimate.h), in a dozen
// layouts, and with experts that copy their rows or read them through maps: by class, as the parts of
// a rank count it, and as a whole, by the resident memory of a process after two training steps, less
// the memory before. Every case is a process of its own.
#include <cstdio>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "apps/moiety/config/train_options.h"
#include "bench/harness.h"
#include "moiety/comm/thread_group.h"
#include "moiety/data/batch_loader.h"
#include "moiety/train/cpu_peak.h"
#include "moiety/train/evaluation.h"
#include "moiety/train/expert_capacity.h"
#include "moiety/train/gathering.h"
#include "moiety/train/memory_estimate.h"
#include "moiety/train/precision.h"
#include "moiety/train/rank_model.h"
#include "moiety/train/step/step_feed.h"

namespace moiety::app {
namespace {

using namespace train;

constexpr int kMicroBatches = 2;  // the number for which a plan needs most

using Arguments = std::vector<std::string>;

struct Preset {
  const char* name;
  Arguments arguments;
};
const std::vector<Preset>& presets() {
  static const std::vector<Preset> all{
      {"demo", {"--moe.d_ffn=128", "--data.seq_len=256", "--train.micro_batch=4"}},
      {"mid",
       {"--model.d_model=512", "--model.layers=4", "--model.vocab=8192", "--moe.d_ffn=512",
        "--data.seq_len=256", "--train.micro_batch=4"}}};
  return all;
}

struct Layout {
  int ranks, tp, gtp, ep, egtp;
  const char* recipe = "bf16";
  const char* rows = "auto";  // moe.layout
};
constexpr Layout kLayouts[] = {{1, 1, 1, 1, 1},
                               {2, 1, 1, 1, 1},
                               {4, 1, 1, 4, 1},
                               {2, 2, 1, 1, 1},
                               {2, 1, 2, 1, 2},
                               {4, 1, 4, 1, 4},
                               {4, 1, 2, 1, 4},
                               {4, 1, 2, 2, 2},
                               {4, 2, 2, 2, 2},
                               {4, 1, 4, 4, 1},
                               {8, 1, 8, 4, 2},
                               {8, 2, 2, 2, 2},
                               {4, 1, 4, 1, 4, "mxfp8"},
                               {4, 1, 4, 1, 4, "nvfp4"},
                               {4, 1, 4, 1, 4, "fp8_block"},
                               {1, 1, 1, 1, 1, "bf16", "expert"},
                               {1, 1, 1, 1, 1, "bf16", "rank"},
                               {4, 1, 1, 4, 1, "bf16", "expert"},
                               {4, 1, 1, 4, 1, "bf16", "rank"}};

// The bytes that the parts of a rank report, averaged over the ranks.
struct Counted {
  double parameters = 0, main_grad = 0, master = 0, moments = 0, gathered = 0, arena = 0;

  // Adds a share of another count.
  void add(const Counted& o, double share) {
    for (double Counted::*x : {&Counted::parameters, &Counted::main_grad, &Counted::master,
                               &Counted::moments, &Counted::gathered, &Counted::arena}) {
      this->*x += share * o.*x;
    }
  }
};

double bytes_of(const optim::StatePiece& p) {
  return static_cast<double>(
      byte_size(p.dtype, std::accumulate(p.box.size.begin(), p.box.size.begin() + p.box.rank,
                                         int64_t{1}, std::multiplies<>())));
}

// Counts the optimizer's memory: weights, gradients and their sums, state.
Counted count(optim::DistributedOptimizer& optimizer, const optim::GridGroups& groups) {
  Counted out;
  std::vector<std::string> summed;  // tensors whose gradients are summed over ranks
  for (const optim::Parameter& p : optimizer.parameters()) {
    out.parameters += static_cast<double>(p.weight.bytes());
    out.main_grad += static_cast<double>(p.grad.bytes());
    for (const QuantizedView& q : p.quantized) {
      for (const TensorView* x : {&q.row_data, &q.row_scales, &q.col_data, &q.col_scales}) {
        out.parameters += static_cast<double>(x->bytes());
      }
    }
    if (groups.of(p.spec.domain).size() == 1) continue;
    for (const optim::LogicalTensor& t : p.spec.tensors) summed.push_back(t.name);
  }
  for (const optim::StatePiece& p : optimizer.state_view()) {
    const double bytes = bytes_of(p);
    if (p.slot != "weight") {
      out.moments += bytes;
      continue;
    }
    out.master += bytes;
    if (std::find(summed.begin(), summed.end(), p.tensor) != summed.end()) out.main_grad += bytes;
  }
  return out;
}

// Two training steps of a rank; `when_done` is called while all of its memory is there.
void train(const TrainConfig& o, const Grid& grid, comm::Communicator& world,
           const std::function<void(const Counted&)>& when_done) {
  const int64_t tokens = o.pass_tokens();
  RankModel model(o, grid, tokens, world);
  WeightGathering gathering(o, model.groups(), int64_t{1} << 33);
  optim::OptimizerConfig optimizer_config;
  optimizer_config.weights = storage_dtype(o);
  optim::DistributedOptimizer optimizer(training_specs(o, model.transformer(), grid, world.rank()),
                                        optimizer_config, model.groups(), gathering.peers(false),
                                        gathering.peers(true));
  model.transformer().bind(optimizer.parameters(), gathering.bind(optimizer));
  optimizer.initialize(1, Stream());
  const auto source = data::synthetic_source("uniform", o.data.seq_len, uint32_t(o.model.vocab), 1);
  data::BatchBuffer batch(o.train.micro_batch, o.data.seq_len, {});
  BatchFeed feed(o.train.micro_batch, o.data.seq_len, {}, 1, {});
  ExpertCapacity capacity(o, model.transformer(), tokens / grid.tp);
  Arena arena("activations");
  model.share_rows(capacity.rows(), arena);
  for (int step = 0; step < 2; ++step) {
    const model::StepSums sums = model.transformer().make_sums();
    const auto gathers = gathering.begin_step("train", kMicroBatches);
    for (int m = 0; m < kMicroBatches; ++m) {
      std::vector<data::SampleRef> samples;
      for (int64_t i = 0; i < o.train.micro_batch; ++i) {
        samples.push_back({0, uint64_t(data_rank(grid, world.rank()) * o.train.micro_batch + i)});
      }
      batch.fill(*source, samples);
      feed.put(batch.batch(), 0);
      const model::Batch pass = feed.fetch(Stream());
      const ArenaScope scope(arena);
      model.transformer().forward(pass, capacity.rows(), sums, arena, Stream());
      model.transformer().backward(pass, Stream());
    }
    gathering.flush();
    const model::StepStats stats = sums.read();
    optimizer.step({.lr = 1e-3, .clip = 1, .tokens = stats.targets, .losses = {stats.loss_sum}},
                   Stream());
    arena.settle();
  }
  Counted counted = count(optimizer, model.groups());
  counted.arena = static_cast<double>(arena.peak());
  if (const gtp::Executor* executor = gathering.executor()) {
    counted.gathered = static_cast<double>(executor->counts().arena_bytes);
  }
  world.barrier();
  when_done(counted);
  world.barrier();
  model.close();
}

std::string members(const char* name, const Counted& c) {
  return text(R"("{}": {{"parameters": {:.0f}, "main_grad": {:.0f}, "master": {:.0f}, )"
              R"("moments": {:.0f}, "gathered": {:.0f}, "arena": {:.0f}}})",
              name, c.parameters, c.main_grad, c.master, c.moments, c.gathered, c.arena);
}

void measure(const Preset& preset, const Layout& l) {
  Arguments arguments = preset.arguments;
  for (const auto& [key, degree] : {std::pair("tp", l.tp), std::pair("gtp", l.gtp),
                                    std::pair("ep", l.ep), std::pair("egtp", l.egtp)}) {
    arguments.push_back(text("--parallel.{}={}", key, degree));
  }
  arguments.push_back(text("--precision.recipe={}", l.recipe));
  arguments.push_back(text("--moe.layout={}", l.rows));
  arguments.push_back(text("--run.ranks={}", l.ranks));
  arguments.push_back("--checkpoint.async=false");
  const TrainConfig config = train_config(load_config({}, arguments).options);
  const Grid grid = check_layout(config);
  const MemoryEstimate m = estimate_memory(config, grid);
  Counted mean;
  std::mutex mutex;
  const double before = resident_bytes();
  double resident = 0;
  comm::run_thread_ranks(l.ranks, {}, [&](comm::Communicator& world) {
    train(config, grid, world, [&](const Counted& counted) {
      const std::lock_guard lock(mutex);
      mean.add(counted, 1.0 / l.ranks);
      if (world.rank() == 0) resident = resident_bytes() - before;
    });
  });
  const double real = resident / l.ranks;
  const Counted formula{double(m.parameters), double(m.main_grad), double(m.master),
                        double(m.moments),    double(m.gathered),  double(m.arena())};
  bench::print(
      {.name = "memory",
       .label = text("{} {} {}", preset.name, describe_layout(grid), l.recipe) +
                (l.rows == std::string_view("auto") ? "" : text(", rows {}", l.rows)),
       .value = real / (1 << 20),
       .unit = "MiB",
       .time = {},
       .against = "estimate",
       .ratio = static_cast<double>(m.total()) / real,
       .more = text(R"("estimate": {}, "expert_parallel": {}, {}, {})", m.total(),
                    m.expert_parallel, members("formula", formula), members("counted", mean))});
}

// Measures in a process of its own, so that memory that was released does not count.
void measure_apart(const Preset& preset, const Layout& layout) {
  const pid_t child = ::fork();
  MOIETY_CHECK(child >= 0, "memory bench: no process for a case");
  if (child == 0) {
    int code = 0;
    try {
      measure(preset, layout);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "memory_bench: %s, %d ranks: %s\n", preset.name, layout.ranks, e.what());
      code = 1;
    }
    ::_exit(code);
  }
  int status = 0;
  MOIETY_CHECK(::waitpid(child, &status, 0) == child && status == 0,
               "memory bench: the case of {}, {} ranks, has failed", preset.name, layout.ranks);
}

void run(bench::Options& options) {
  std::string only;
  options.choice("--preset", only, {"demo", "mid"}, "without it both");
  if (!options.parse()) return;
  for (const Preset& preset : presets()) {
    if (!only.empty() && only != preset.name) continue;
    for (const Layout& layout : kLayouts) measure_apart(preset, layout);
  }
}

}  // namespace
}  // namespace moiety::app

int main(int argc, char** argv) {
  return moiety::bench::run_main(
      argc, argv, "The memory of a rank against what the program says that it needs.",
      moiety::app::run);
}
