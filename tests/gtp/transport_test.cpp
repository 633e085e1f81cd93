// Transports among threads: what they move, what they wait for, and how they fail.
#include "moiety/gtp/transport.h"

#include <chrono>
#include <random>
#include <thread>

#include "moiety/comm/thread_group.h"
#include "tests/gtp/transport_cases.h"

namespace moiety::gtp {
namespace {

using Clock = std::chrono::steady_clock;

TEST(Transport, MappedGathersAreTheQuantizedWhole) {
  for (const int ranks : {1, 2, 3, 4, 8})
    expect_gathers(run_threads, ranks, TransportKind::kMapped);
}
TEST(Transport, CollectiveGathersAreTheQuantizedWhole) {
  for (const int ranks : {1, 2, 3, 4}) expect_gathers(run_threads, ranks, TransportKind::kAllToAll);
  expect_gathers(run_threads, 2, TransportKind::kRing);
}
TEST(Transport, MappedReducesAreTheReference) {
  for (const int ranks : {2, 3, 4}) expect_reduces(run_threads, ranks, TransportKind::kMapped);
}
TEST(Transport, AllToAllReducesAreTheReference) {
  for (const int ranks : {2, 3, 4}) expect_reduces(run_threads, ranks, TransportKind::kAllToAll);
}
TEST(Transport, RingReducesAreWithinTheirBound) {
  for (const int ranks : {2, 4}) expect_reduces(run_threads, ranks, TransportKind::kRing);
}

TEST(Transport, IsChosenByWhatTheRanksCan) {
  for (const bool map : {true, false}) {
    comm::run_thread_ranks(2, {.deadline = Seconds(60), .map_memory = map},
                           [&](comm::Communicator& world) {
                             EXPECT_EQ(make_transport(world)->kind(),
                                       map ? TransportKind::kMapped : TransportKind::kAllToAll);
                           });
  }
}

// One bf16 weight on every rank, whose elements say rank, member and step.
class Numbered {
 public:
  static constexpr int64_t kRows = 16, kCols = 24;

  Numbered(Transport& transport, int bundles, int members = 2)
      : ranks_(transport.ranks()), rank_(transport.rank()), members_(members) {
    const int64_t shard = byte_size(DType::kBFloat16, kRows * kCols);
    memory_ = transport.allocate("weights", bundles * members * shard);
    auto* at = static_cast<std::byte*>(memory_.memory.raw());
    std::vector<SharedBundle> shared;
    for (int b = 0; b < bundles; ++b) {
      SharedBundle& bundle = shared.emplace_back(SharedBundle{
          .id = b, .name = text("layer {}", b), .expert = b % 2 == 1, .bucket = b, .members = {}});
      for (int e = 0; e < members; ++e, at += shard) {
        bundle.members.push_back({TensorView(at, DType::kBFloat16, {kRows, kCols})});
      }
    }
    bundles_ = shared;
    transport.share(shared);
    const GatherLayout layout =
        gather_layout({Codec(), kRows, kCols, ranks_, members}, Payload::kRow, kRowView);
    slot_ = Buffer(layout.slot_bytes, "slot", kSlotAlignment);
    landing_.emplace(layout, slot_.view(DType::kUInt8, {layout.slot_bytes}), TensorView());
  }

  // Shards of bundle b at `step`; negative: poison.
  void write(int b, int step) {
    for (int e = 0; e < members_; ++e) fill(bundles_[b].members[e][0], value(b, rank_, e, step));
  }
  static float value(int b, int rank, int e, int step) {
    return step < 0 ? std::nanf("")
                    : static_cast<float>(64 * (step % 4) + 16 * (b % 4) + 4 * rank + e);
  }
  const Landing& landing() const { return *landing_; }
  void poison_landing() { std::memset(slot_.data(), 0xFF, static_cast<size_t>(slot_.bytes())); }
  // Elements of what landed that are not those of bundle b at `step`.
  int64_t faults(int b, int step) const {
    int64_t out = 0;
    for (int e = 0; e < members_; ++e) {
      const bf16* x = landing_->data(e).data<bf16>();
      for (int64_t i = 0; i < ranks_ * kRows * kCols; ++i) {
        const int g = static_cast<int>(i / (kRows * kCols));
        out += static_cast<float>(x[i]) != value(b, g, e, step);
      }
    }
    return out;
  }

 private:
  static void fill(const TensorView& x, float v) {
    std::fill_n(x.data<bf16>(), x.numel(), bf16(v));
  }

  int ranks_, rank_, members_;
  SlotArena::Block memory_;
  std::vector<SharedBundle> bundles_;
  Buffer slot_;
  std::optional<Landing> landing_;
};

// Ranks are late in turn, and poison their shards before they write them: nothing is read before
// it is published, nothing overwritten before it has been read.
TEST(Transport, WaitsForWhatIsNotPublished) {
  constexpr int kBundles = 3, kSteps = 12;
  run_threads(3, [&](comm::Communicator& world) {
    const auto transport = make_transport(world);
    Numbered weights(*transport, kBundles);
    std::mt19937 random(static_cast<uint32_t>(world.rank()));
    const auto dawdle = [&] {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3 * 500));
    };
    for (int step = 0; step < kSteps; ++step) {
      transport->await_drained(Stream());
      for (int b = 0; b < kBundles; ++b) weights.write(b, -1);
      dawdle();
      for (int b = 0; b < kBundles; ++b) {
        weights.write(b, step);
        transport->publish(b, Stream());
        dawdle();
      }
      // Every rank gathers other bundles, some of them never.
      for (int i = 0; i < world.rank() + step % 2; ++i) {
        const int b = static_cast<int>(random() % kBundles);
        weights.poison_landing();
        transport->gather({b, &weights.landing()}, Stream());
        ASSERT_EQ(weights.faults(b, step), 0) << "step " << step;
      }
      transport->drain(Stream());
    }
  });
}

TEST(Transport, DeferredLanesKeepTheOrder) {
  for (const TransportKind kind : {TransportKind::kMapped, TransportKind::kAllToAll}) {
    run_threads(3, [&](comm::Communicator& world) {
      const auto transport = make_transport(world, {}, kind);
      Numbered weights(*transport, 2);
      const Stream optimizer = Stream::deferred(), lane = Stream::deferred();
      for (int step = 0; step < 3; ++step) {
        for (int b = 0; b < 2; ++b) {
          optimizer.run([&, b, step] { weights.write(b, step); });
          transport->publish(b, optimizer);
        }
        Event published, ready;
        published.record(optimizer);
        lane.wait(published);
        weights.poison_landing();
        transport->gather({1, &weights.landing()}, lane);
        ready.record(lane);
        EXPECT_GT(weights.faults(1, step), 0);
        ready.wait();
        EXPECT_EQ(weights.faults(1, step), 0);
        transport->drain(lane);
        Event drained;
        drained.record(lane);
        optimizer.wait(drained);
        transport->await_drained(optimizer);
        if (kind != TransportKind::kMapped) world.barrier();
      }
      lane.synchronize();
      optimizer.synchronize();
    });
  }
}

// ---- failures

constexpr double kDeadline = 0.3;

// The errors of the ranks of a group, all of which run `act` except the last; they must come in
// time.
std::vector<std::string> errors_of(int ranks, TransportKind kind,
                                   const std::function<void(Transport&, Numbered&)>& act) {
  std::vector<std::string> out(static_cast<size_t>(ranks));
  comm::run_thread_ranks(ranks, {.deadline = Seconds(kDeadline)}, [&](comm::Communicator& world) {
    const int me = world.rank();
    const auto transport =
        make_transport(world, {.name = "dense", .deadline = Seconds(kDeadline)}, kind);
    Numbered weights(*transport, 2);
    for (int b = 0; b < 2; ++b) weights.write(b, 1);
    if (me == ranks - 1) {
      std::this_thread::sleep_for(Seconds(3 * kDeadline));
      return;
    }
    const auto start = Clock::now();
    out[me] = kind_and_error_of([&] { act(*transport, weights); });
    EXPECT_LT(Seconds(Clock::now() - start).count(), kDeadline + 1);
    EXPECT_EQ(kind_and_error_of([&] { transport->check(); }), out[me]);
    const auto later = Clock::now();
    EXPECT_EQ(kind_and_error_of([&] {
                transport->gather({1, &weights.landing()}, Stream());
              }),
              out[me]);
    EXPECT_LT(Seconds(Clock::now() - later).count(), kDeadline / 2);
  });
  return out;
}

// Each rank waited itself, or was stopped by one that did; at least one did.
void expect_texts(const std::vector<std::string>& got, const std::string& operation, int dead,
                  const std::string& counter) {
  bool waited = false;
  for (int r = 0; r < dead; ++r) {
    const std::string late =
        text("communication: gtp \"dense\", {}: rank {} waited {} s for rank {} ({})", operation, r,
             kDeadline, dead, counter);
    bool known = got[r] == late;
    waited |= known;
    for (int origin = 0; origin < dead; ++origin) {
      known |= got[r] ==
               text(
                   "communication: gtp \"dense\", {}: rank {} was stopped by rank {}, which waited "
                   "for rank {}",
                   operation, r, origin, dead);
    }
    EXPECT_TRUE(known) << got[r] << "\nexpected\n" << late;
  }
  EXPECT_TRUE(waited);
}

TEST(TransportFailure, APeerThatNeverPublishes) {
  const auto errors = errors_of(3, TransportKind::kMapped, [](Transport& t, Numbered& w) {
    for (int b = 0; b < 2; ++b) t.publish(b, Stream());
    w.poison_landing();
    try {
      t.gather({1, &w.landing()}, Stream());
    } catch (const Error&) {
      EXPECT_EQ(w.faults(1, -1), 3 * 2 * w.kRows * w.kCols) << "something landed";
      throw;
    }
  });
  expect_texts(errors, "E1 of gather 1 on lane \"expert gather\", bundle \"layer 1\"", 2,
               "published of bucket 1 at 0, expected 1");
}

TEST(TransportFailure, APeerThatNeverDrains) {
  const auto errors = errors_of(3, TransportKind::kMapped, [](Transport& t, Numbered& w) {
    t.drain(Stream());
    t.await_drained(Stream());
    w.write(0, 2);  // never
    ADD_FAILURE();
  });
  expect_texts(errors, "E7 of drain", 2, "drained at 0, expected 1");
}

const ReduceShape kNumberedGrad{2, Numbered::kRows, Numbered::kCols};

TEST(TransportFailure, APeerThatNeverReduces) {
  for (const TransportKind kind : {TransportKind::kMapped, TransportKind::kAllToAll}) {
    const Gradients x(kNumberedGrad, 3, 3 * Numbered::kRows, 1);
    comm::run_thread_ranks(3, {.deadline = Seconds(kDeadline)}, [&](comm::Communicator& world) {
      const int me = world.rank();
      const auto t = make_transport(world, {.name = "dense", .deadline = Seconds(kDeadline)}, kind);
      Numbered weights(*t, 1);
      Reducer reducer(*t, 0, kNumberedGrad);
      std::vector<Tensor> got = poisoned_mains(kNumberedGrad), want = poisoned_mains(kNumberedGrad);
      reducer.reduce(x, got, true);
      x.add_to(want, me, true);
      t->await_readers(false, Stream());
      if (me == 2) {
        std::this_thread::sleep_for(Seconds(3 * kDeadline));
        return;
      }
      const std::string error = kind_and_error_of([&] { reducer.reduce(x, got, false); });
      EXPECT_EQ(difference_of(got, want), "") << "the failed reduce added something";
      if (kind == TransportKind::kMapped) {
        const std::string where =
            "communication: gtp \"dense\", E4 of reduce 2 on lane \"dense reduce\", "
            "bundle \"layer 0\": rank ";
        EXPECT_TRUE(
            error == where + text("{} waited 0.3 s for rank 2 (produced at 1, expected 2)", me) ||
            error == where + text("{} was stopped by rank {}, which waited for rank 2", me, 1 - me))
            << error;
      } else {
        const std::string where =
            "communication: gtp \"dense\", reduce 2 on lane \"dense reduce\", bundle "
            "\"layer 0\": communicator \"world\", operation ";
        EXPECT_EQ(error.substr(0, where.size()), where) << error;
        EXPECT_NE(error.find("rank 2"), std::string::npos) << error;
      }
      EXPECT_EQ(kind_and_error_of([&] { reducer.reduce(x, got, false); }), error);
    });
  }
}

TEST(TransportFailure, RanksThatReduceOtherBundles) {
  for (const TransportKind kind :
       {TransportKind::kMapped, TransportKind::kAllToAll, TransportKind::kRing}) {
    for (const int ranks : {2, 3}) expect_disagreements(run_threads, ranks, kind);
  }
}

// Over collectives gathers have an order too; over mapped memory every rank has what it asked for.
TEST(TransportFailure, RanksThatGatherOtherBundles) {
  for (const TransportKind kind :
       {TransportKind::kMapped, TransportKind::kAllToAll, TransportKind::kRing}) {
    run_threads(3, [&](comm::Communicator& world) {
      const auto t = make_transport(world, {.name = "dense"}, kind);
      Numbered weights(*t, 3);
      for (int b = 0; b < 3; ++b) {
        weights.write(b, 1);
        t->publish(b, Stream());
      }
      const int mine = world.rank() == 2 ? 2 : 0;
      const std::string error = kind_and_error_of([&] {
        t->gather({mine, &weights.landing()}, Stream());
      });
      if (kind == TransportKind::kMapped) {
        EXPECT_EQ(error, "no error");
        EXPECT_EQ(weights.faults(mine, 1), 0);
      } else {
        EXPECT_EQ(
            error,
            "communication: gtp \"dense\", operation 1: rank 0 gathers the row view of bundle "
            "\"layer 0\", 1536 bytes; rank 2 gathers the row view of bundle \"layer 2\", 1536 "
            "bytes; expected the same on all ranks");
      }
    });
  }
}

// Planes of the same size: rows on one rank, columns on the other.
TEST(TransportFailure, RanksThatGatherOtherViews) {
  const GatherShape shape{Codec(QuantSpec::of(Format::kMxfp8)), 32, 32, 2};
  const gtp::Weights whole(shape);
  run_threads(2, [&](comm::Communicator& world) {
    const auto t = make_transport(world, {.name = "dense"}, TransportKind::kAllToAll);
    std::vector<SlotArena::Block> owners;
    t->share({place_shards(*t, whole, 0, owners)});
    const bool columns = world.rank() == 1;
    const GatherLayout layout = gather_layout(shape, columns ? Payload::kCol : Payload::kRow,
                                              columns ? kColView : kRowView);
    const Poisoned slot(layout.slot_bytes), scratch(layout.scratch_bytes);
    const Landing landing(layout, slot.view(), scratch.view());
    EXPECT_EQ(
        kind_and_error_of([&] {
          t->gather({0, &landing}, Stream());
        }),
        "communication: gtp \"dense\", operation 1: rank 0 gathers the row view of bundle "
        "\"bundle 0\", 1056 bytes; rank 1 gathers the column view of bundle \"bundle 0\", 1056 "
        "bytes; expected the same on all ranks");
  });
}

TEST(TransportFailure, AnAbortEndsWaits) {
  std::string seen;
  const auto start = Clock::now();
  const std::string thrown = kind_and_error_of([&] {
    run_threads(2, [&](comm::Communicator& world) {
      const auto t = make_transport(world);
      Numbered weights(*t, 1);
      if (world.rank() == 1) fail(ErrorKind::kIo, "the disk is full");
      t->publish(0, Stream());
      seen = kind_and_error_of([&] { t->gather({0, &weights.landing()}, Stream()); });
    });
  });
  EXPECT_EQ(thrown, "io: the disk is full");
  EXPECT_NE(seen.find("E1 of gather 1 on lane \"dense gather\", bundle \"layer 0\": rank 0 stopped "
                      "waiting for rank 1: "),
            std::string::npos)
      << seen;
  EXPECT_NE(seen.find("the disk is full"), std::string::npos) << seen;
  EXPECT_LT(Seconds(Clock::now() - start).count(), 5);
}

TEST(TransportFailure, RanksThatShareDifferentBundles) {
  run_threads(3, [](comm::Communicator& world) {
    const auto t = make_transport(world, {.name = "dense"});
    const int mine = world.rank() == 2 ? 3 : 2;
    EXPECT_EQ(
        kind_and_error_of([&] {
          t->share({bundle_without_shards(0, 1, false), bundle_without_shards(4, mine, false)});
        }),
        "invalid argument: gtp \"dense\": ranks 0 and 2 share different bundles, from "
        "\"bundle 4\" on: ids, names, shapes, buckets or places differ");
    Tensor elsewhere(DType::kBFloat16, {16, 16});
    SharedBundle bundle = bundle_without_shards(1, 1, false);
    bundle.members[0][0] = elsewhere;
    const auto other = make_transport(world, {.name = "dense"});
    EXPECT_EQ(
        kind_and_error_of([&] { other->share({bundle}); }),
        "invalid argument: gtp \"dense\": bundle \"bundle 1\" is not in memory that peers map");
  });
}

TEST(TransportFailure, Arguments) {
  run_threads(2, [](comm::Communicator& world) {
    const auto t = make_transport(world, {.name = "dense"});
    Numbered weights(*t, 1);
    EXPECT_EQ(kind_and_error_of([&] {
                t->gather({7, &weights.landing()}, Stream());
              }),
              "invalid argument: gtp \"dense\": bundle 7 is not among the 1 shared ones");
    const GatherLayout layout = gather_layout({Codec(), 32, 24, 2, 2}, Payload::kRow, kRowView);
    const Poisoned slot(layout.slot_bytes);
    const Landing landing(layout, slot.view(), {});
    EXPECT_EQ(kind_and_error_of([&] {
                t->gather({0, &landing}, Stream());
              }),
              "invalid argument: gtp gather: array 0 of bundle \"layer 0\" is bfloat16[16, 24], "
              "expected 1536 bytes");
    Tensor send(DType::kFloat32, {2, 32, 24}), main(DType::kFloat32, {16, 24});
    EXPECT_EQ(
        kind_and_error_of([&] {
          t->reduce({.bundle = 0,
                     .send = send,
                     .scratch = {},
                     .main_grads = {main, main},
                     .valid_rows = 16,
                     .first = true},
                    Stream());
        }),
        "invalid argument: gtp \"dense\": the send slot of bundle \"layer 0\" is not in memory "
        "that peers map");
    const auto ring = make_transport(world, {.name = "dense"}, TransportKind::kRing);
    EXPECT_EQ(kind_and_error_of([&] {
                ring->reduce_transfer({1, 16, 24, DType::kBFloat16, DType::kFloat32});
              }),
              "invalid argument: gtp \"dense\": a ring cannot send bfloat16 for a main_grad in "
              "float32: it rounds every sum");
  });
}

}  // namespace
}  // namespace moiety::gtp
