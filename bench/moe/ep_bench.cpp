// Expert parallelism on the CPU: prepare, dispatch, combine and their backward passes, with ranks
// as threads or processes, mapped or over collectives (spec ep, 9). Prints rows (design.md,
// Measuring). The value of a data operation is the rate of the bytes of all pairs' rows, and its
// ratio is to a copy of as many bytes in the same run.
//
//   ep_bench [--ranks N] [--tokens T] [--model D] [--topk K] [--experts E] [--repeat N]
//            [--transport mapped|collectives]
//   mpirun -np N ep_bench --launcher mpi [...]
//
// Without shape options, a table of shapes on 1 and 2 ranks, or on those of the launcher; without a
// transport, both.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/base/rng.h"
#include "moiety/comm/mpi/mpi_group.h"
#include "moiety/comm/thread/thread_group.h"
#include "moiety/formats/bf16.h"
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
      // Distinct experts: a random start and a random stride.
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
  // The yardstick.
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
  // Of the pairs that this rank's experts have.
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

// Milliseconds of each operation: the median of the slowest rank's. The copy comes first.
struct Result {
  std::vector<double> ms;
  int64_t bytes = 0;  // of all ranks
};

// Collective; the same on all ranks.
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
      const auto start = std::chrono::steady_clock::now();
      (rank.*(op == 0 ? kCopy : kOperations[op - 1]).run)();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      mine[1 + op * repeat + i] = took.count();
    }
  }
  rank.close();

  std::vector<double> slowest(mine.size());
  Result out{std::vector<double>(kCount), 0};
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
    std::nth_element(begin, begin + repeat / 2, begin + repeat);
    out.ms[op] = begin[repeat / 2];
  }
  return out;
}

void print(const Shape& shape, const std::string& how, const Result& result) {
  for (size_t i = 0; i < std::size(kOperations); ++i) {
    const double ms = result.ms[i + 1];
    std::string value = text("\"value\": {:.1f}, \"unit\": \"us\"", 1000 * ms);
    if (i > 0) {
      value = text("\"value\": {:.2f}, \"unit\": \"GB/s\"", double(result.bytes) / ms / 1e6);
    }
    std::string ratio;
    if (i > 0) ratio = text(", \"ratio\": {:.3f}, \"against\": \"copy\"", result.ms[0] / ms);
    std::puts(
        text("{{\"name\": \"{}\", \"case\": \"R={} T={} D={} K={} E={} bf16 {}\", \"device\": "
             "\"cpu\", {}, \"ms\": {:.4f}{}}}",
             kOperations[i].name, shape.ranks, shape.tokens, shape.model, shape.topk, shape.experts,
             how, value, ms, ratio)
            .c_str());
  }
}

struct Options {
  Launcher launcher = Launcher::kThreads;
  std::vector<EpTransport> transports{EpTransport::kMapped, EpTransport::kCollectives};
  Shape shape{0, 1024, 2048, 8, 64};  // 0 ranks: a table
  int repeat = 21;
};

// All transports of a shape, on every rank of `world`.
void run_shape(const Options& options, const Shape& shape, comm::Communicator& world) {
  for (const EpTransport transport : options.transports) {
    if (shape.ranks == 1 && transport == EpTransport::kCollectives) continue;
    const Result result = measure(shape, transport, options.repeat, world);
    const std::string how = text("{} {}", options.launcher == Launcher::kMpi ? "mpi" : "threads",
                                 transport == EpTransport::kMapped ? "mapped" : "collectives");
    if (world.rank() == 0) print(shape, how, result);
  }
}

std::vector<Shape> shapes(const Options& options, int ranks) {
  if (options.shape.ranks > 0) return {options.shape};
  if (options.launcher == Launcher::kMpi) {
    return {{ranks, 1024, 256, 2, 8}, {ranks, 512, 2048, 8, 64}, {ranks, 512, 7168, 8, 256}};
  }
  return {{1, 2048, 256, 2, 8},
          {2, 1024, 256, 2, 8},  // the demo's model
          {1, 1024, 2048, 8, 64},
          {2, 512, 2048, 8, 64},
          {2, 512, 7168, 8, 256}};
}

Options parse(int argc, char** argv) {
  Options out;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    MOIETY_CHECK(i + 1 < argc, "{} needs a value", key);
    const std::string value = argv[i + 1];
    const int number = std::atoi(value.c_str());
    if (key == "--launcher") {
      MOIETY_CHECK(value == "threads" || value == "mpi", "{} is threads or mpi", key);
      out.launcher = value == "mpi" ? Launcher::kMpi : Launcher::kThreads;
      continue;
    }
    if (key == "--transport") {
      MOIETY_CHECK(value == "mapped" || value == "collectives", "{} is mapped or collectives", key);
      out.transports = {value == "mapped" ? EpTransport::kMapped : EpTransport::kCollectives};
      continue;
    }
    MOIETY_CHECK(number > 0, "{} {} is not a positive number", key, value);
    if (key == "--repeat") {
      out.repeat = number;
      continue;
    }
    if (out.shape.ranks == 0) out.shape.ranks = 1;
    if (key == "--ranks") {
      out.shape.ranks = number;
    } else if (key == "--tokens") {
      out.shape.tokens = number;
    } else if (key == "--model") {
      out.shape.model = number;
    } else if (key == "--topk") {
      out.shape.topk = number;
    } else if (key == "--experts") {
      out.shape.experts = number;
    } else {
      MOIETY_CHECK(false, "unknown option {}", key);
    }
  }
  return out;
}

void run(int argc, char** argv) {
  Options options = parse(argc, argv);
  if (options.launcher == Launcher::kMpi) {
    comm::run_mpi_rank({}, [&](comm::Communicator& world) {
      if (options.shape.ranks > 0) options.shape.ranks = world.size();
      for (const Shape& shape : shapes(options, world.size())) run_shape(options, shape, world);
    });
    return;
  }
  for (const Shape& shape : shapes(options, 0)) {
    comm::run_thread_ranks(shape.ranks, {},
                           [&](comm::Communicator& world) { run_shape(options, shape, world); });
  }
}

}  // namespace
}  // namespace moiety::moe

int main(int argc, char** argv) {
  try {
    moiety::moe::run(argc, argv);
  } catch (const moiety::Error& e) {
    std::fprintf(stderr, "ep_bench: %s\n", e.what());
    moiety::comm::mpi::end_process(2);
  }
  return 0;
}
