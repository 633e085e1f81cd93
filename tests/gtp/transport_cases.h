// The contract of every transport, on ranks that are threads or processes.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/parallel.h"
#include "moiety/comm/communicator.h"
#include "moiety/comm/thread_group.h"
#include "moiety/gtp/accumulate_job.h"
#include "moiety/gtp/transport.h"
#include "tests/gtp/quantized_weights.h"

namespace moiety::gtp {

using RankBody = std::function<void(comm::Communicator& world)>;
// Runs the body on so many ranks.
using RunRanks = std::function<void(int ranks, const RankBody& body)>;

// Threads; what fails on one stops the others.
inline void run_threads(int ranks, const RankBody& body) {
  comm::run_thread_ranks(ranks, {.deadline = Seconds(60)}, [&](comm::Communicator& world) {
    body(world);
    if (::testing::Test::HasFatalFailure()) fail(ErrorKind::kComm, "a rank failed");
  });
}

inline constexpr int64_t kSlotAlignment = 256;
inline int64_t aligned(int64_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// One rank's shards of a bundle in the transport's memory, which `owners` keep.
inline SharedBundle place_shards(Transport& transport, const Weights& weights, BundleId id,
                                 std::vector<SlotArena::Block>& owners) {
  const std::vector<QuantizedTensor>& mine = weights.shards[transport.rank()];
  SharedBundle out{.id = id, .name = text("bundle {}", id), .bucket = id % 3, .members = {}};
  int64_t bytes = 0;
  for (const QuantizedTensor& member : mine) {
    for (int a = 0; a < 4; ++a) {
      bytes += aligned(array_of(member.view(), static_cast<Array>(a)).bytes());
    }
  }
  owners.push_back(transport.allocate("shards", bytes));
  auto* at = static_cast<std::byte*>(owners.back().memory.raw());
  for (const QuantizedTensor& member : mine) {
    auto& arrays = out.members.emplace_back();
    for (int a = 0; a < 4; ++a) {
      const TensorView& x = array_of(member.view(), static_cast<Array>(a));
      if (!x.defined()) continue;
      std::memcpy(at, x.raw(), static_cast<size_t>(x.bytes()));
      arrays[a] = TensorView(at, x.dtype(), x.sizes());
      at += aligned(x.bytes());
    }
  }
  return out;
}

// Every codec and column count; rows and members take turns.
inline std::vector<GatherShape> gather_cases(int ranks) {
  std::vector<GatherShape> out;
  size_t turn = static_cast<size_t>(ranks);
  for (const CodecCase& c : codec_cases()) {
    for (const int64_t cols : {16, 40, 48, 64, 96, 128, 2880}) {
      if (cols == 2880 && ranks > 2) continue;
      int64_t rows = std::vector<int64_t>{16, 32, 48, 128}[turn % 4];
      if (rows % c.codec.align() != 0) rows = 128;
      out.push_back({c.codec, rows, cols, ranks, turn % 3 == 0 ? 3 : 1});
      ++turn;
    }
  }
  return out;
}

// Gathered shards are the quantized whole.
inline void expect_gathers(const RunRanks& run, int ranks, TransportKind kind) {
  const ThreadBudget budget(1);
  const std::vector<GatherShape> cases = gather_cases(ranks);
  std::vector<Weights> weights(cases.begin(), cases.end());
  run(ranks, [&](comm::Communicator& world) {
    const auto transport = make_transport(world, {}, kind);
    ASSERT_EQ(transport->kind(), kind);
    std::vector<SharedBundle> bundles;
    std::vector<SlotArena::Block> owners;
    for (size_t i = 0; i < cases.size(); ++i) {
      bundles.push_back(place_shards(*transport, weights[i], static_cast<BundleId>(2 * i), owners));
    }
    transport->share(bundles);
    for (int32_t bucket = 0; bucket < 3; ++bucket) transport->publish(bucket, Stream());
    int64_t bytes = 0;
    for (size_t i = 0; i < cases.size(); ++i) {
      for (const auto& [payload, views] : gathers_of(cases[i].codec)) {
        const GatherLayout layout = gather_layout(cases[i], payload, views);
        const Poisoned slot(layout.slot_bytes), scratch(layout.scratch_bytes);
        const Landing landing(layout, slot.view(), scratch.view());
        transport->gather({bundles[i].id, &landing}, Stream());
        landing.finish(Stream());
        bytes += layout.received();
        for (int e = 0; e < cases[i].members; ++e) {
          ASSERT_EQ(fault_of(landing, weights[i].whole[e], e), "")
              << name(kind) << " " << cases[i].codec.name() << " K " << cases[i].cols << " s "
              << cases[i].shard_rows << " G " << ranks << " member " << e << " views "
              << int{views};
        }
        ASSERT_TRUE(slot.guard_intact() && scratch.guard_intact());
      }
    }
    EXPECT_EQ(transport->received().gathered, bytes);
    transport->drain(Stream());
    transport->await_drained(Stream());
  });
}

// A gradient of every rank, [members, ranks * s, K], whose rows from `real` on are NaN.
struct Gradients {
  ReduceShape shape;
  int ranks;
  int64_t real;
  std::vector<Tensor> of_rank;

  Gradients(const ReduceShape& s, int G, int64_t real_rows, uint32_t seed)
      : shape(s), ranks(G), real(real_rows) {
    const int64_t M = s.shard_rows * G, E = s.members;
    for (int r = 0; r < G; ++r) {
      Tensor& x = of_rank.emplace_back(s.wire, std::initializer_list<int64_t>{E, M, s.cols});
      quant::fill(x.view().reshape({E * M, s.cols}), quant::Data::kNormal, 100 * seed + r);
      for (int64_t e = 0; e < E; ++e) {
        const TensorView tail = x.view().select(e).slice(0, real, M);
        if (tail.numel() > 0) std::memset(tail.raw(), 0xFF, static_cast<size_t>(tail.bytes()));
      }
    }
  }
  int64_t valid(int g) const {
    return std::clamp<int64_t>(real - g * shape.shard_rows, 0, shape.shard_rows);
  }
  // Member e of what rank r sends to rank g, [1, s, K].
  TensorView chunk(int r, int g, int e) const {
    const int64_t s = shape.shard_rows;
    return of_rank[r].view().select(e).slice(0, g * s, (g + 1) * s).reshape({1, s, shape.cols});
  }
  // Adds them to rank g's main_grads by the reference.
  void add_to(std::vector<Tensor>& mains, int g, bool first) const {
    for (int e = 0; e < shape.members; ++e) {
      std::vector<TensorView> chunks;
      for (int r = 0; r < ranks; ++r) chunks.push_back(chunk(r, g, e));
      const TensorView main = mains[e].view().reshape({1, shape.shard_rows, shape.cols});
      accumulate_reference({chunks, main, valid(g), first});
    }
  }
};

inline std::vector<Tensor> poisoned_mains(const ReduceShape& s) {
  std::vector<Tensor> out;
  for (int e = 0; e < s.members; ++e) {
    Tensor& x = out.emplace_back(s.main, std::initializer_list<int64_t>{s.shard_rows, s.cols});
    std::memset(x.view().raw(), 0xFF, static_cast<size_t>(x.view().bytes()));
  }
  return out;
}

// One rank's end of a reduce: a send slot which lies at another offset on every rank, and scratch.
class Reducer {
 public:
  // `room`: bytes of the slot, if it is larger than it need be.
  Reducer(Transport& transport, BundleId id, const ReduceShape& shape, int64_t room = 0)
      : transport_(transport),
        id_(id),
        transfer_(transport.reduce_transfer(shape)),
        memory_(transport.allocate("send", std::max(room, transfer_.slot) + 4 * kSlotAlignment)),
        scratch_(transfer_.scratch + 1) {}

  void reduce(const Gradients& x, std::vector<Tensor>& mains, bool first, Stream lane = {}) {
    const int me = transport_.rank();
    const int64_t offset = me * kSlotAlignment;
    const TensorView slot = memory_.memory.slice(0, offset, offset + transfer_.slot);
    const TensorView& mine = x.of_rank[me].view();
    std::memcpy(slot.raw(), mine.raw(), static_cast<size_t>(mine.bytes()));
    ReduceJob job{.bundle = id_,
                  .send = TensorView(slot.raw(), mine.dtype(), mine.sizes()),
                  .scratch = scratch_.view(DType::kUInt8, {transfer_.scratch}),
                  .main_grads = {mains.begin(), mains.end()},
                  .valid_rows = x.valid(me),
                  .first = first};
    transport_.reduce(job, lane);
  }
  const BundleSpec::Transfer& transfer() const { return transfer_; }

 private:
  Transport& transport_;
  BundleId id_;
  BundleSpec::Transfer transfer_;
  SlotArena::Block memory_;
  Buffer scratch_;
};

// A bundle for reduces, whose shards nobody reads.
inline SharedBundle bundle_without_shards(BundleId id, int members, bool expert) {
  return {.id = id,
          .name = text("bundle {}", id),
          .expert = expert,
          .members = std::vector<std::array<TensorView, 4>>(static_cast<size_t>(members))};
}

inline std::string difference_of(const std::vector<Tensor>& got, const std::vector<Tensor>& want) {
  std::string out;
  for (size_t e = 0; e < got.size(); ++e) out += difference("main_grad", got[e], want[e]);
  return out;
}

// The ring's rounding: (G - 1) u sum |c_j|.
inline void expect_within_ring_bound(const Gradients& x, const std::vector<Tensor>& mains, int g) {
  const ReduceShape& s = x.shape;
  const double u = s.wire == DType::kBFloat16 ? 0x1p-8 : 0x1p-24;
  const auto at = [](const TensorView& v, int64_t i) {
    return v.dtype() == DType::kBFloat16 ? double(float(v.data<bf16>()[i]))
                                         : double(v.data<float>()[i]);
  };
  for (int e = 0; e < s.members; ++e) {
    for (int64_t i = 0; i < x.valid(g) * s.cols; ++i) {
      double exact = 0, size = 0;
      for (int r = 0; r < x.ranks; ++r) {
        exact += at(x.chunk(r, g, e), i);
        size += std::abs(at(x.chunk(r, g, e), i));
      }
      ASSERT_LE(std::abs(at(mains[e], i) - exact), (x.ranks - 1) * u * size) << "element " << i;
    }
  }
}

struct ReduceTypes {
  DType wire, main;
};

// The error of a rank when its last peer makes another operation than all others: the same
// everywhere.
struct Disagreement {
  std::string what;
  // Runs on a transport with bundles 0 and 1, of the same shape, and 2, of another; `odd`: of the
  // last rank.
  std::function<void(Transport& transport, bool odd)> act;
  std::string operation, of_all, of_odd;
};

inline constexpr ReduceShape kSmallGrad{1, 16, 40};

// Reduces bundle `id`, which has so many members.
inline void reduce_once(Transport& transport, BundleId id, int members = 1,
                        DType wire = DType::kFloat32) {
  ReduceShape shape = kSmallGrad;
  shape.members = members;
  shape.wire = shape.main = wire;
  const Gradients x(shape, transport.ranks(), 16 * transport.ranks(), 1);
  Reducer reducer(transport, id, shape, 1 << 16);
  std::vector<Tensor> got = poisoned_mains(shape);
  const std::vector<Tensor> before = poisoned_mains(shape);
  try {
    reducer.reduce(x, got, true);
  } catch (const Error&) {
    EXPECT_EQ(difference_of(got, before), "") << "the failed reduce added something";
    throw;
  }
}

inline std::vector<Disagreement> disagreements(TransportKind kind, int ranks) {
  const bool mapped = kind == TransportKind::kMapped;
  const int64_t bytes = ranks * 16 * 40 * 4;
  const auto reduces = [&](int b, int64_t sent, const char* dtype = "float32") {
    return text("reduces bundle \"bundle {}\", {} bytes in {}", b, sent, dtype);
  };
  const std::string first = mapped ? "reduce 1 on lane \"dense reduce\"" : "operation 1";
  const std::string second = mapped ? "reduce 2 on lane \"dense reduce\"" : "operation 2";
  return {{"another order of equal shapes",
           [](Transport& t, bool odd) {
             reduce_once(t, odd ? 1 : 0);
             reduce_once(t, odd ? 0 : 1);
           },
           first, reduces(0, bytes), reduces(1, bytes)},
          {"another order of other shapes",
           [](Transport& t, bool odd) {
             reduce_once(t, 1);
             odd ? reduce_once(t, 2, 3) : reduce_once(t, 0);
           },
           second, reduces(0, bytes), reduces(2, 3 * bytes)},
          {"another dtype",
           [](Transport& t, bool odd) {
             reduce_once(t, 0, 1, odd ? DType::kBFloat16 : DType::kFloat32);
           },
           first, reduces(0, bytes), reduces(0, bytes / 2, "bfloat16")}};
}

// Without `of_shapes` only the first: collectives of other sizes end the world of the processes.
inline void expect_disagreements(const RunRanks& run, int ranks, TransportKind kind,
                                 bool of_shapes = true) {
  const ThreadBudget budget(1);
  std::vector<Disagreement> all = disagreements(kind, ranks);
  if (!of_shapes) all.resize(1);
  for (const Disagreement& d : all) {
    SCOPED_TRACE(text("{} G {}: {}", name(kind), ranks, d.what));
    run(ranks, [&](comm::Communicator& world) {
      const auto t = make_transport(world, {.name = "moe"}, kind);
      t->share({bundle_without_shards(0, 1, false), bundle_without_shards(1, 1, false),
                bundle_without_shards(2, 3, false)});
      const bool odd = world.rank() == ranks - 1;
      const std::string want = text(
          "communication: gtp \"moe\", {}: rank 0 {}; rank {} {}; expected the same on all "
          "ranks",
          d.operation, d.of_all, ranks - 1, d.of_odd);
      EXPECT_EQ(kind_and_error_of([&] { d.act(*t, odd); }), want);
      EXPECT_EQ(kind_and_error_of([&] { t->check(); }), want);
    });
  }
}

// Reduces of dense and expert bundles, one upon the other: the reference's bits, or, on a ring,
// those of a ring.
inline void expect_reduces(const RunRanks& run, int ranks, TransportKind kind) {
  const ThreadBudget budget(1);
  for (const ReduceTypes& types : {ReduceTypes{DType::kFloat32, DType::kFloat32},
                                   ReduceTypes{DType::kBFloat16, DType::kFloat32},
                                   ReduceTypes{DType::kBFloat16, DType::kBFloat16}}) {
    const bool ring = kind == TransportKind::kRing;
    if (ring && types.wire != types.main) continue;
    const ReduceShape dense{1, 16, 40, types.wire, types.main};
    const ReduceShape expert{3, 32, 24, types.wire, types.main};
    // The last rank has a part of its rows, or none.
    const Gradients a(dense, ranks, 16 * ranks - 21, 1), b(expert, ranks, 32 * ranks - 3, 2),
        c(dense, ranks, 16 * ranks - 21, 3), d(expert, ranks, 32 * ranks - 3, 4);
    run(ranks, [&](comm::Communicator& world) {
      const int me = world.rank();
      const auto transport = make_transport(world, {}, kind);
      transport->share({bundle_without_shards(0, 1, false), bundle_without_shards(1, 3, true)});
      Reducer dense_reducer(*transport, 0, dense), expert_reducer(*transport, 1, expert);
      std::vector<Tensor> got = poisoned_mains(dense), want = poisoned_mains(dense);
      std::vector<Tensor> got_expert = poisoned_mains(expert), want_expert = poisoned_mains(expert);
      const std::string what =
          text("{} G {} {} {}", name(kind), ranks, name(types.wire), name(types.main));

      dense_reducer.reduce(a, got, true);
      expert_reducer.reduce(b, got_expert, true);
      a.add_to(want, me, true);
      b.add_to(want_expert, me, true);
      if (ring) expect_within_ring_bound(a, got, me);
      if (ring) expect_within_ring_bound(b, got_expert, me);
      transport->await_readers(false, Stream());
      transport->await_readers(true, Stream());
      dense_reducer.reduce(c, got, false);
      expert_reducer.reduce(d, got_expert, false);
      c.add_to(want, me, false);
      d.add_to(want_expert, me, false);
      if (!ring || (ranks == 2 && types.wire == DType::kFloat32)) {
        EXPECT_EQ(difference_of(got, want), "") << what;
        EXPECT_EQ(difference_of(got_expert, want_expert), "") << what;
      } else if (types.wire == DType::kBFloat16 && a.valid(me) > 0) {
        EXPECT_NE(difference_of(got, want), "") << what << ": the ring did not run";
      }
      EXPECT_EQ(transport->received().reduced,
                2 * (dense_reducer.transfer().received + expert_reducer.transfer().received));
      transport->await_readers(false, Stream());
      transport->await_readers(true, Stream());
    });
  }
}

}  // namespace moiety::gtp
