// Expert parallelism on the CPU: prepare, dispatch, combine and their backward passes, with ranks
// as threads (spec ep, 9). Prints rows (design.md, Measuring). The value of a data operation is the
// rate of the bytes of all pairs' rows, and its ratio is to a copy of as many bytes in the same
// run.
//
//   ep_bench [--ranks N] [--tokens T] [--model D] [--topk K] [--experts E] [--repeat N]
//
// Without shape options, a table of shapes on 1 and 2 ranks.
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
#include "moiety/comm/thread/thread_group.h"
#include "moiety/formats/bf16.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/dispatch.h"

namespace moiety::moe {
namespace {

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
  Rank(const Shape& shape, comm::Communicator& world)
      : shape_(shape),
        map_(shape.experts, shape.ranks),
        capacity_(capacity_for(1.5, shape.tokens * shape.ranks, shape.topk, shape.ranks,
                               map_.local_count(world.rank()), kAlignment)),
        group_(EpGroup::create(
            world, map_, {.tokens = shape.tokens, .model = shape.model, .topk = shape.topk}, {})),
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

Result measure(const Shape& shape, int repeat) {
  constexpr size_t kCount = std::size(kOperations) + 1;
  std::vector<std::vector<std::vector<double>>> times(shape.ranks,
                                                      std::vector<std::vector<double>>(kCount));
  std::vector<int64_t> bytes(shape.ranks);
  comm::run_thread_ranks(shape.ranks, {}, [&](comm::Communicator& world) {
    Rank rank(shape, world);
    rank.check();
    bytes[world.rank()] = rank.row_bytes();
    for (int i = 0; i < repeat; ++i) {
      for (size_t op = 0; op < kCount; ++op) {
        world.barrier();
        const auto start = std::chrono::steady_clock::now();
        (rank.*(op == 0 ? kCopy : kOperations[op - 1]).run)();
        const std::chrono::duration<double, std::milli> took =
            std::chrono::steady_clock::now() - start;
        times[world.rank()][op].push_back(took.count());
      }
    }
    world.barrier();
    rank.close();
  });
  Result out{std::vector<double>(kCount), 0};
  for (const int64_t n : bytes) out.bytes += n;
  for (size_t op = 0; op < kCount; ++op) {
    std::vector<double> slowest(repeat);
    for (const auto& rank : times) {
      for (int i = 0; i < repeat; ++i) slowest[i] = std::max(slowest[i], rank[op][i]);
    }
    std::nth_element(slowest.begin(), slowest.begin() + repeat / 2, slowest.end());
    out.ms[op] = slowest[repeat / 2];
  }
  return out;
}

void print(const Shape& shape, const Result& result) {
  for (size_t i = 0; i < std::size(kOperations); ++i) {
    const double ms = result.ms[i + 1];
    std::string value = text("\"value\": {:.1f}, \"unit\": \"us\"", 1000 * ms);
    if (i > 0) {
      value = text("\"value\": {:.2f}, \"unit\": \"GB/s\"", double(result.bytes) / ms / 1e6);
    }
    std::string ratio;
    if (i > 0) ratio = text(", \"ratio\": {:.3f}, \"against\": \"copy\"", result.ms[0] / ms);
    std::puts(text("{{\"name\": \"{}\", \"case\": \"R={} T={} D={} K={} E={} bf16\", \"device\": "
                   "\"cpu\", {}, \"ms\": {:.4f}{}}}",
                   kOperations[i].name, shape.ranks, shape.tokens, shape.model, shape.topk,
                   shape.experts, value, ms, ratio)
                  .c_str());
  }
}

int run(int argc, char** argv) {
  Shape one{0, 1024, 2048, 8, 64};
  int repeat = 21;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    MOIETY_CHECK(i + 1 < argc, "{} needs a value", key);
    const int value = std::atoi(argv[i + 1]);
    MOIETY_CHECK(value > 0, "{} {} is not a positive number", key, argv[i + 1]);
    if (key == "--repeat") {
      repeat = value;
      continue;
    }
    if (one.ranks == 0) one.ranks = 1;
    if (key == "--ranks") {
      one.ranks = value;
    } else if (key == "--tokens") {
      one.tokens = value;
    } else if (key == "--model") {
      one.model = value;
    } else if (key == "--topk") {
      one.topk = value;
    } else if (key == "--experts") {
      one.experts = value;
    } else {
      MOIETY_CHECK(false, "unknown option {}", key);
    }
  }
  std::vector<Shape> shapes{one};
  if (one.ranks == 0) {
    shapes = {{1, 2048, 256, 2, 8},
              {2, 1024, 256, 2, 8},  // the demo's model
              {1, 1024, 2048, 8, 64},
              {2, 512, 2048, 8, 64},
              {2, 512, 7168, 8, 256}};
  }
  for (const Shape& shape : shapes) print(shape, measure(shape, repeat));
  return 0;
}

}  // namespace
}  // namespace moiety::moe

int main(int argc, char** argv) {
  try {
    return moiety::moe::run(argc, argv);
  } catch (const moiety::Error& e) {
    std::fprintf(stderr, "ep_bench: %s\n", e.what());
    return 2;
  }
}
