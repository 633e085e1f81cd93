// Signatures and the texts of faults.
#include <set>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "moiety/comm/mapped/fault_text.h"
#include "moiety/comm/mapped/plan.h"

namespace moiety::comm::mapped {
namespace {

PairCall call_of(Collective kind, DType dtype, int64_t elements, ReduceOp op = ReduceOp::kSum) {
  return pair_call({.kind = kind, .dtype = dtype, .op = op, .elements = elements}, 0);
}

TEST(MappedWords, HoldCountAndSignature) {
  const uint64_t word = make_word((uint64_t{1} << 43) + 5, 0xABCDE);
  EXPECT_EQ(count_of(word), (uint64_t{1} << 43) + 5);
  EXPECT_EQ(signature_of(word), 0xABCDEu);
  EXPECT_NE(parity(5), parity(6));
}

TEST(MappedWords, SignaturesTellCallsApart) {
  std::set<uint32_t> seen;
  int calls = 0;
  const auto add = [&](const PairCall& call) {
    ++calls;
    seen.insert(signature(call));
    EXPECT_LT(signature(call), 1u << kSignatureBits);
  };
  for (int kind = 0; kind < 5; ++kind) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kUInt8}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
        for (int64_t n = 0; n < 8; ++n) add(call_of(Collective(kind), dtype, n, op));
      }
    }
  }
  for (int64_t up = 1; up < 6; ++up) {
    for (int64_t down = 1; down < 6; ++down) {
      PairCall call = call_of(Collective::kAllToAll, DType::kFloat32, 8);
      call.up = up;
      call.down = down;
      add(call);
    }
  }
  EXPECT_EQ(seen.size(), size_t(calls));
}

TEST(MappedWords, PlacesDoNotOverlap) {
  for (const int ranks : {2, 3, 16, 17, 64}) {
    const Places p = places_of(ranks, {.staging_bytes = 3 << 20, .beside_compute = true});
    EXPECT_LE(p.control + int64_t(sizeof(Control)), p.posts);
    EXPECT_LE(post_at(p, ranks - 1, 1) + int64_t(sizeof(Post)), p.poison);
    EXPECT_LE(p.poison + 8, p.faults);
    EXPECT_LE(p.faults + ranks * int64_t(sizeof(Fault)), p.exchange);
    EXPECT_LE(exchange_at(p, ranks - 1, 1) + p.small, p.staging);
    EXPECT_LE(p.staging + 2 * p.half, p.landing);
    EXPECT_LE(p.landing + p.half, p.bytes);
  }
  EXPECT_THROW(places_of(65, {}), Error);
  EXPECT_THROW(places_of(2, {.staging_bytes = 1000}), Error);
}

TEST(MappedWords, FaultsSayWhoWaitedForWhom) {
  Fault fault{.kind = FaultKind::kLate,
              .rank = 1,
              .peer = 0,
              .operation = 812,
              .count = 1624,
              .word = make_word(1622, 3),
              .nanoseconds = 100'040'000'000,
              .mine = call_of(Collective::kReduceScatter, DType::kFloat32, 16777216),
              .theirs = {}};
  EXPECT_EQ(
      fault_text("dp", fault, ""),
      "comm \"dp\", reduce_scatter 812 (float32, 67108864 B): rank 1 waited 100.0 s for rank 0 "
      "(its word is at 1622 of 1624)");
  fault.kind = FaultKind::kAborted;
  EXPECT_EQ(
      fault_text("dp", fault, "rank 0 failed: disk full"),
      "comm \"dp\", reduce_scatter 812 (float32, 67108864 B): rank 1 stopped waiting for rank 0: "
      "rank 0 failed: disk full");
  fault.kind = FaultKind::kMismatch;
  fault.mine = call_of(Collective::kAllGather, DType::kBFloat16, 2048);
  fault.theirs = call_of(Collective::kAllReduce, DType::kFloat32, 2);
  EXPECT_EQ(fault_text("dp", fault, ""),
            "comm \"dp\", operation 812: rank 1 runs all_gather(bfloat16, 4096 B), rank 0 runs "
            "all_reduce(float32, 8 B, sum)");
  fault.theirs = fault.mine;
  fault.theirs.place = 2;
  EXPECT_EQ(fault_text("dp", fault, ""),
            "comm \"dp\", operation 812: rank 1 runs all_gather(bfloat16, 4096 B) outside attached "
            "buffers, rank 0 runs all_gather(bfloat16, 4096 B) on place 0x2 of attached buffers");
  fault.mine = fault.theirs = call_of(Collective::kAllToAll, DType::kFloat32, 8);
  fault.mine.up = 5;    // rank 1 expects from rank 0
  fault.theirs.up = 6;  // rank 0 sends
  EXPECT_EQ(
      fault_text("dp", fault, ""),
      "comm \"dp\", operation 812: all_to_all: rank 0 sends 6 rows to rank 1, which expects 5");
}

}  // namespace
}  // namespace moiety::comm::mapped
