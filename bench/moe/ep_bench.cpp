// Expert parallelism on the CPU: prepare, dispatch, combine and their backward passes, with ranks
// as threads or processes, mapped or over collectives. The value of a data operation is the rate of
// the bytes of all pairs' rows, and its ratio is to a copy of as many bytes in the same run.
#include <cstring>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "moiety/base/parallel.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/comm/thread_group.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/dispatch.h"

namespace moiety::moe {
namespace {

enum class Launcher { kThreads, kMpi };

struct Shape {
  int ranks;
  int64_t tokens, model;  // of a rank
  int topk, experts;
};

uint32_t random_word(int rank, int64_t i) {
  return philox(rng_key(1, RngDomain::kGeneration),
                {static_cast<uint32_t>(i), static_cast<uint32_t>(rank), 0, 0})[0];
}

// One rank: its tensors, and the operations to be timed.
class Rank {
 public:
  Rank(const Shape& shape, EpTransport transport, comm::Communicator& world)
      : shape_(shape),
        map_(shape.experts, shape.ranks),
        capacity_(capacity_for(1.5, shape.tokens * shape.ranks, shape.topk, shape.ranks,
                               map_.local_count(world.rank()), kAlignment)),
        group_(EpGroup::create(world, map_,
                               {.tokens = shape.tokens, .model = shape.model, .topk = shape.topk},
                               {.transport = transport})),
        idx_(DType::kInt32, {shape.tokens, shape.topk}),
        x_(DType::kBFloat16, {shape.tokens, shape.model}),
        out_(DType::kBFloat16, {shape.tokens, shape.model}),
        rows_(DType::kBFloat16, {capacity_, shape.model}),
        from_(rows_.view().bytes()),
        to_(rows_.view().bytes()),
        args_{.idx_TK = idx_, .alignment = kAlignment, .capacity = capacity_},
        memory_(plan_bytes(map_, group_.limits(), args_)) {
    for (int64_t t = 0; t < shape.tokens; ++t) {
      // The experts are distinct: a random start and a random stride.
      const uint32_t word = random_word(world.rank(), t);
      const int stride = 1 + static_cast<int>(word >> 16) % (shape.experts / shape.topk);
      for (int k = 0; k < shape.topk; ++k) {
        idx_.data<int32_t>()[t * shape.topk + k] =
            static_cast<int32_t>((word % 65536 + k * stride) % shape.experts);
      }
    }
    for (int64_t i = 0; i < x_.view().numel(); ++i) {
      x_.data<bf16>()[i] = bf16(static_cast<float>(random_word(world.rank(), i) % 15) - 7.0f);
    }
    std::memset(rows_.view().raw(), 0xFF, rows_.view().bytes());
    std::memset(out_.view().raw(), 0xFF, out_.view().bytes());
  }

  void prepare_plan() {
    plan_ = prepare(group_, args_, memory_.view(DType::kUInt8, {memory_.bytes()}), {});
  }
  void forward_copy() { dispatch(group_, plan_, {.x_TD = x_, .rows_CD = rows_}, {}); }
  void forward_sum() { combine(group_, plan_, {.y_CD = rows_, .out_TD = out_}, {}); }
  void backward_copy() { combine_backward(group_, plan_, {.g_TD = x_, .gy_CD = rows_}, {}); }
  void backward_sum() { dispatch_backward(group_, plan_, {.g_rows_CD = rows_, .gx_TD = out_}, {}); }
  // The copy that the others are measured against.
  void plain_copy() {
    parallel_for(row_bytes(), 64 << 10, [&](int64_t begin, int64_t end) {
      std::memcpy(to_.data() + begin, from_.data() + begin, end - begin);
    });
  }

  // Sums of small integers are exact: every token comes back K times.
  void check() {
    prepare_plan();
    forward_copy();
    forward_sum();
    group_.check(plan_.epoch);
    for (int64_t i = 0; i < out_.view().numel(); ++i) {
      const float expected = static_cast<float>(shape_.topk) * float(x_.data<bf16>()[i]);
      MOIETY_CHECK(float(out_.data<bf16>()[i]) == expected, "ep bench: element {} is {}, not {}", i,
                   float(out_.data<bf16>()[i]), expected);
    }
  }
  // Bytes of the pairs that this rank's experts have.
  int64_t row_bytes() const { return plan_.info.data<int64_t>()[kInfoKept] * 2 * shape_.model; }
  void close() { group_.close(); }

 private:
  static constexpr int64_t kAlignment = 16;
  Shape shape_;
  ExpertMap map_;
  int64_t capacity_;
  EpGroup group_;
  Tensor idx_, x_, out_, rows_;
  Buffer from_, to_;
  PrepareArgs args_;
  Buffer memory_;
  EpPlan plan_;
};

struct Operation {
  const char* name;
  void (Rank::*run)();
};
constexpr Operation kCopy{"copy", &Rank::plain_copy};
constexpr Operation kOperations[] = {{"ep.prepare", &Rank::prepare_plan},
                                     {"ep.dispatch", &Rank::forward_copy},
                                     {"ep.combine", &Rank::forward_sum},
                                     {"ep.combine_backward", &Rank::backward_copy},
                                     {"ep.dispatch_backward", &Rank::backward_sum}};

// The times of each operation, the slowest rank's. The copy comes first.
struct Result {
  std::vector<bench::Timing> times;
  int64_t bytes = 0;  // of all ranks
};

// Measures one shape. Collective; the same result on all ranks.
Result measure(const Shape& shape, EpTransport transport, int repeat, comm::Communicator& world) {
  constexpr size_t kCount = std::size(kOperations) + 1;
  Rank rank(shape, transport, world);
  rank.check();
  // This rank's row bytes, then its times by operation.
  std::vector<double> mine{double(rank.row_bytes())};
  mine.resize(1 + kCount * repeat);
  for (int i = 0; i < repeat; ++i) {
    for (size_t op = 0; op < kCount; ++op) {
      world.barrier();
      mine[1 + op * repeat + i] =
          bench::milliseconds([&] { (rank.*(op == 0 ? kCopy : kOperations[op - 1]).run)(); });
    }
  }
  rank.close();

  std::vector<double> slowest(mine.size());
  Result out;
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()),
                               mine.size() * sizeof(double));
  for (const std::string& all : world.bootstrap().all_gather(bytes)) {
    std::vector<double> theirs(mine.size());
    std::memcpy(theirs.data(), all.data(), all.size());
    out.bytes += static_cast<int64_t>(theirs[0]);
    for (size_t i = 1; i < theirs.size(); ++i) slowest[i] = std::max(slowest[i], theirs[i]);
  }
  for (size_t op = 0; op < kCount; ++op) {
    const auto begin = slowest.begin() + 1 + op * repeat;
    out.times.push_back(bench::timing({begin, begin + repeat}));
  }
  return out;
}

void print(const Shape& shape, const std::string& how, const Result& result) {
  for (size_t i = 0; i < std::size(kOperations); ++i) {
    const bench::Timing& time = result.times[i + 1];
    bench::Row row{kOperations[i].name,
                   text("R={} T={} D={} K={} E={} bf16 {}", shape.ranks, shape.tokens, shape.model,
                        shape.topk, shape.experts, how),
                   1000 * time.ms, "us", time};
    if (i > 0) {
      row.value = bench::giga(double(result.bytes), time.ms);
      row.unit = "GB/s";
      row.against = "copy";
      row.ratio = result.times[0].ms / time.ms;
    }
    bench::print(row);
  }
}

struct Settings {
  Launcher launcher = Launcher::kThreads;
  std::vector<EpTransport> transports{EpTransport::kMapped, EpTransport::kCollectives};
  Shape shape{0, 0, 0, 0, 0};  // 0 ranks: a table
  int repeat = 21;
};

// Runs all transports of a shape, on every rank of `world`.
void run_shape(const Settings& settings, const Shape& shape, comm::Communicator& world) {
  for (const EpTransport transport : settings.transports) {
    if (shape.ranks == 1 && transport == EpTransport::kCollectives) continue;
    const Result result = measure(shape, transport, settings.repeat, world);
    const std::string how = text("{} {}", settings.launcher == Launcher::kMpi ? "mpi" : "threads",
                                 transport == EpTransport::kMapped ? "mapped" : "collectives");
    if (world.rank() == 0) print(shape, how, result);
  }
}

std::vector<Shape> shapes(const Settings& settings, int ranks) {
  if (settings.shape.ranks > 0) return {settings.shape};
  if (settings.launcher == Launcher::kMpi) {
    return {{ranks, 1024, 256, 2, 8}, {ranks, 512, 2048, 8, 64}, {ranks, 512, 7168, 8, 256}};
  }
  return {{1, 2048, 256, 2, 8},
          {2, 1024, 256, 2, 8},  // the demo's model
          {1, 1024, 2048, 8, 64},
          {2, 512, 2048, 8, 64},
          {2, 512, 7168, 8, 256}};
}

// Parses the arguments. Parts of a shape that are not given are those of the table's third; false
// if help was printed.
bool parse(bench::Options& options, Settings& settings) {
  std::string launcher = "threads", transport;
  Shape& shape = settings.shape;
  options.choice("--launcher", launcher, {"threads", "mpi"}, "ranks are")
      .choice("--transport", transport, {"mapped", "collectives"}, "this one alone")
      .number("--ranks", shape.ranks, "threads; without shape options a table of shapes")
      .number("--tokens", shape.tokens, "of a rank")
      .number("--model", shape.model, "columns")
      .number("--topk", shape.topk, "experts of a token")
      .number("--experts", shape.experts, "of all ranks")
      .number("--repeat", settings.repeat, "rounds");
  if (!options.parse()) return false;
  settings.launcher = launcher == "mpi" ? Launcher::kMpi : Launcher::kThreads;
  if (!transport.empty()) {
    settings.transports = {transport == "mapped" ? EpTransport::kMapped
                                                 : EpTransport::kCollectives};
  }
  if (shape.ranks > 0 || shape.tokens > 0 || shape.model > 0 || shape.topk > 0 ||
      shape.experts > 0) {
    const auto or_else = [](auto& value, auto usual) {
      if (value == 0) value = usual;
    };
    or_else(shape.ranks, 1);
    or_else(shape.tokens, 1024);
    or_else(shape.model, 2048);
    or_else(shape.topk, 8);
    or_else(shape.experts, 64);
  }
  return true;
}

void run(bench::Options& options) {
  Settings settings;
  if (!parse(options, settings)) return;
  if (settings.launcher == Launcher::kMpi) {
    comm::run_mpi_rank({}, [&](comm::Communicator& world) {
      if (settings.shape.ranks > 0) settings.shape.ranks = world.size();
      for (const Shape& shape : shapes(settings, world.size())) run_shape(settings, shape, world);
    });
    return;
  }
  for (const Shape& shape : shapes(settings, 0)) {
    comm::run_thread_ranks(shape.ranks, {},
                           [&](comm::Communicator& world) { run_shape(settings, shape, world); });
  }
}

}  // namespace
}  // namespace moiety::moe

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv,
                                 "Expert parallelism on the CPU, ranks as threads or processes "
                                 "(mpirun -np N ep_bench --launcher mpi).",
                                 moiety::moe::run, moiety::comm::mpi::end_process);
}
