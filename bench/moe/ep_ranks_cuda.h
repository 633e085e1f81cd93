// Expert parallelism of several ranks, which are threads of this process with a GPU each (or share
// one, where there are fewer): every operation from its first kernel to its last on the slower
// rank, behind a barrier of the GPUs; eager and captured. The value of an operation that moves rows
// is the rate of the bytes that a rank stores at its peers, from the first store to the last
// chunk's arrival; beside it stand copies of as many bytes by the copy engines.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "bench/harness.h"
#include "bench/moe/ep_shapes.h"
#include "bench/ranks.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/thread_group.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/dispatch.h"
#include "moiety/moe/ep_group.h"
#include "moiety/moe/exchange.h"
#include "moiety/moe/peers/peer_exchange.h"
#include "moiety/moe/prepare_dispatch.h"

namespace moiety::bench {

// What is asked of a run beside the shapes.
struct RanksRun {
  int repeat = 50;
  int shape = 0;                      // of kRanksShapes, from 1; 0: all
  int comm_sms = 0, chunk_rows = 16;  // EpOptions
};

class RanksMeasured {
 public:
  RanksMeasured(const RanksShape& s, comm::Communicator& world, Device gpu, const RanksRun& run)
      : s_(s),
        world_(world),
        gpu_(gpu),
        repeat_(run.repeat),
        stream_(Stream::on(gpu)),
        map_(s.experts, world.size()),
        tokens_(tokens_of(s, world.rank(), world.size())),
        // A rank may have the rows of all choices, if some are hot.
        capacity_(moe::capacity_for(s.routing == RanksRouting::kUniform ? 1.25 : world.size(),
                                    s.tokens * world.size(), s.topk, world.size(),
                                    map_.local_count(world.rank()), s.alignment)),
        // Of few tokens a chunk is a row, so that many blocks have some.
        options_{.chunk_rows = s.tokens <= moe::kFewTokens ? 1 : run.chunk_rows,
                 .comm_sms = run.comm_sms,
                 .device = gpu},
        group_(moe::EpGroup::create(world, map_, limits(), options_)),
        idx_(DType::kInt32, {tokens_, s.topk}, gpu),
        x_(DType::kBFloat16, {tokens_, s.model}, gpu),
        out_(DType::kBFloat16, {tokens_, s.model}, gpu),
        rows_(DType::kBFloat16, {capacity_, s.model}, gpu),
        gy_(DType::kBFloat16, {capacity_, s.model}, gpu),
        w_(DType::kFloat32, {tokens_, s.topk}, gpu),
        gw_(DType::kFloat32, {tokens_, s.topk}, gpu),
        slot_w_(DType::kFloat32, {capacity_}, gpu),
        g_slot_w_(DType::kFloat32, {capacity_}, gpu),
        args_{.idx_TK = idx_, .alignment = s.alignment, .capacity = capacity_},
        memory_(DType::kUInt8, {moe::plan_bytes(map_, group_.limits(), args_)}, gpu),
        word_(DType::kFloat32, {1}, gpu),
        copied_(comm::SymmetricBuffer::create(world, "copies", 2 * wire_bytes_most(), gpu)) {
    fill();
    world_.barrier();
    check();
  }

  void run() {
    if (uniform()) copies();
    const auto make = [&] { plan_ = prepare(group_, args_, memory_, stream_); };
    const auto send = [&] {
      dispatch(group_, plan_, {.x_TD = x_, .w_TK = w_, .rows_CD = rows_, .slot_w = slot_w_},
               stream_);
    };
    const auto sum = [&] {
      combine(group_, plan_, {.y_CD = rows_, .slot_w = slot_w_, .out_TD = out_}, stream_);
    };
    const auto send_back = [&] {
      combine_backward(
          group_, plan_,
          {.g_TD = x_, .slot_w = slot_w_, .y_CD = rows_, .gy_CD = gy_, .g_slot_w = g_slot_w_},
          stream_);
    };
    const auto sum_back = [&] {
      dispatch_backward(group_, plan_,
                        {.g_rows_CD = rows_, .g_slot_w = g_slot_w_, .gx_TD = out_, .gw_TK = gw_},
                        stream_);
    };
    time("ep.prepare", false, make);
    time("ep.dispatch_weights", true, send);
    time("ep.combine_weights", true, sum);
    if (uniform()) {
      time("ep.combine_backward_weights", true, send_back);
      time("ep.dispatch_backward", true, sum_back);
    }
    time("ep.prepare_dispatch_combine", false, [&] {
      make();
      send();
      sum();
    });
    if (s_.tokens <= moe::kFewTokens) {
      time("ep.prepare_dispatch", false, [&] {
        plan_ = prepare_dispatch(group_, args_,
                                 {.x_TD = x_, .w_TK = w_, .rows_CD = rows_, .slot_w = slot_w_},
                                 memory_, stream_);
      });
    }
    print_memory("ep.memory");
    group_.check(group_.epoch());
    group_.close();
    copied_.close();
    if (uniform()) run_direct();
  }

 private:
  bool uniform() const { return s_.routing == RanksRouting::kUniform; }
  moe::EpLimits limits() const { return {.tokens = s_.tokens, .model = s_.model, .topk = s_.topk}; }
  int64_t wire_bytes_most() const { return s_.tokens * (world_.size() - 1) * 2 * s_.model; }
  uint32_t random_word(int64_t i) const {
    return philox(rng_key(1, RngDomain::kGeneration),
                  {static_cast<uint32_t>(i), static_cast<uint32_t>(world_.rank()), 0, 0})[0];
  }

  void fill() {
    const Tensor idx(DType::kInt32, {tokens_, s_.topk}), w(DType::kFloat32, {tokens_, s_.topk});
    choose_experts(s_, map_, idx, [&](int64_t i) { return random_word(i); });
    for (int64_t i = 0; i < tokens_ * s_.topk; ++i) w.data<float>()[i] = 0.125f;
    for (int r = 0; r < world_.size(); ++r) sent_rows_ += r == world_.rank() ? 0 : rows_for(idx, r);
    most_rows_ = slowest(world_, {double(sent_rows_)})[0];
    host_x_ = Tensor(DType::kBFloat16, {tokens_, s_.model});
    for (int64_t i = 0; i < tokens_ * s_.model; ++i) {
      host_x_.data<bf16>()[i] = bf16(static_cast<float>(random_word(i) % 15) - 7.0f);
    }
    copy(idx_, idx, stream_);
    copy(w_, w, stream_);
    copy(x_, host_x_, stream_);
    for (const Tensor* x : {&rows_, &gy_, &out_, &slot_w_, &g_slot_w_, &gw_, &word_}) {
      fill_bytes(*x, 0, stream_);
    }
    stream_.synchronize();
  }
  int64_t rows_for(const Tensor& idx, int rank) const {
    int64_t rows = 0;
    for (int64_t t = 0; t < tokens_; ++t) {
      bool any = false;
      for (int k = 0; k < s_.topk; ++k) {
        any = any || map_.owner(idx.data<int32_t>()[t * s_.topk + k]) == rank;
      }
      rows += any;
    }
    return rows;
  }
  // Sums of small integers are exact: every token comes back K times, K weights of 1/8 large.
  void check() {
    plan_ = prepare(group_, args_, memory_, stream_);
    dispatch(group_, plan_, {.x_TD = x_, .w_TK = w_, .rows_CD = rows_, .slot_w = slot_w_}, stream_);
    combine(group_, plan_, {.y_CD = rows_, .slot_w = slot_w_, .out_TD = out_}, stream_);
    const Tensor out(DType::kBFloat16, {tokens_, s_.model});
    copy(out, out_, stream_);
    world_.synchronize(stream_);
    group_.check(plan_.epoch);
    for (int64_t i = 0; i < tokens_ * s_.model; ++i) {
      const float expected = static_cast<float>(s_.topk) * 0.125f * float(host_x_.data<bf16>()[i]);
      MOIETY_CHECK(float(out.data<bf16>()[i]) == expected, "ep bench: element {} is {}, not {}", i,
                   float(out.data<bf16>()[i]), expected);
    }
  }

  // With memory for rows that peers reach, and none for rows on their way.
  void run_direct() {
    moe::EpLimits direct = limits();
    direct.staged = false, options_.zero_copy = moe::ZeroCopy::kAuto;
    group_ = moe::EpGroup::create(world_, map_, direct, options_);
    auto buffer = comm::SymmetricBuffer::create(world_, "rows", 2 * capacity_ * s_.model, gpu_);
    group_.attach(buffer);
    const TensorView rows(buffer.local(), DType::kBFloat16, {capacity_, s_.model}, gpu_);
    plan_ = prepare(group_, args_, memory_, stream_);
    const moe::DispatchArgs args{.x_TD = x_, .w_TK = w_, .rows_CD = rows, .slot_w = slot_w_};
    time("ep.dispatch_weights_direct", true, [&] { dispatch(group_, plan_, args, stream_); });
    print_memory("ep.memory_direct");
    group_.check(group_.epoch());
    group_.close();
    buffer.close();
  }

  struct Times {
    Timing whole;
    double wire_ms = 0;  // the median time of rows under way
  };
  template <class Run>
  Times times_of(bool captured, Run&& run) {
    run();
    world_.synchronize(stream_);
    world_.barrier();
    Graph graph;
    if (captured) graph = Graph(stream_, run);
    Event begin = Event::timed(), end = Event::timed();
    world_.barrier();
    std::vector<double> whole, wire;
    for (int i = 0; i < repeat_ + 2; ++i) {
      world_.all_reduce(word_, comm::ReduceOp::kMax, stream_).wait();  // the GPUs begin together
      begin.record(stream_);
      captured ? graph.launch(stream_) : run();
      end.record(stream_);
      world_.synchronize(stream_);
      world_.barrier();
      if (i < 2) continue;
      whole.push_back(elapsed_ms(begin, end));
      wire.push_back(double(group_.impl()->peers->last_rows_ns()) * 1e-6);
    }
    graph = {};
    world_.barrier();
    return {timing(slowest(world_, whole)), timing(slowest(world_, wire)).ms};
  }
  template <class Run>
  void time(const char* name, bool rows, Run&& run) {
    for (const bool captured : {false, true}) {
      const Times times = times_of(captured, run);
      Row row{name, label(captured), times.whole.ms * 1e3, "us", times.whole};
      if (rows) {
        row.value = giga(most_rows_ * 2 * double(s_.model), times.wire_ms);
        row.unit = "GB/s";
        row.more = text(R"("wire_ms": {:.4f})", times.wire_ms);
      }
      say(row);
    }
  }
  // The copy engines bring the bytes of a dispatch to the next rank, or from it.
  void copies() {
    const int64_t bytes = sent_rows_ * 2 * s_.model;
    std::byte* const there = copied_.peer((world_.rank() + 1) % world_.size());
    const auto part = [&](std::byte* base, int64_t half) {
      return TensorView(base + half * wire_bytes_most(), DType::kUInt8, {bytes}, gpu_);
    };
    for (const bool push : {true, false}) {
      const Times times = times_of(true, [&] {
        push ? copy(part(there, 1), part(copied_.local(), 0), stream_)
             : copy(part(copied_.local(), 1), part(there, 0), stream_);
      });
      say({push ? "copy.push" : "copy.pull", label(true), giga(double(bytes), times.whole.ms),
           "GB/s", times.whole});
    }
  }
  void print_memory(const char* name) {
    const moe::EpBytes bytes = group_.bytes();
    MOIETY_CHECK(group_.impl()->peers->memory().bytes() == bytes.total,
                 "ep bench: {} bytes of memory, EpGroup::bytes says {}",
                 group_.impl()->peers->memory().bytes(), bytes.total);
    say({name, label(true), double(bytes.total) / (1 << 20), "MiB", {}});
  }
  std::string label(bool captured) const {
    return text("R{} {}, {}", world_.size(), describe(s_), captured ? "captured" : "eager");
  }
  void say(Row row) const {
    if (world_.rank() != 0) return;
    row.device = gpu_;
    print(row);
  }

  RanksShape s_;
  comm::Communicator& world_;
  Device gpu_;
  int repeat_;
  Stream stream_;
  moe::ExpertMap map_;
  int64_t tokens_, capacity_, sent_rows_ = 0;
  double most_rows_ = 0;  // of a rank
  moe::EpOptions options_;
  moe::EpGroup group_;
  Tensor idx_, x_, out_, rows_, gy_, w_, gw_, slot_w_, g_slot_w_;
  moe::PrepareArgs args_;
  Tensor memory_, word_, host_x_;
  comm::SymmetricBuffer copied_;
  moe::EpPlan plan_;
};

inline void run_ranks(int ranks, const RanksRun& run) {
  const int gpus = std::min(ranks, gpu_status().count);
  comm::run_thread_ranks(ranks, {.deadline = Seconds(30)}, [&](comm::Communicator& world) {
    const Device gpu{DeviceType::kCuda, world.rank() % gpus};
    world.prepare(gpu, {});
    for (int i = 1; i <= std::ssize(kRanksShapes); ++i) {
      const RanksShape& s = kRanksShapes[i - 1];
      if (run.shape == 0 || run.shape == i) RanksMeasured(s, world, gpu, run).run();
    }
  });
}

}  // namespace moiety::bench
