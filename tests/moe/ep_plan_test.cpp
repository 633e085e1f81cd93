// Expert maps, trimming, memory formulas, plans in named situations, and the errors of prepare.
#include <numeric>

#include "moiety/moe/trim.h"
#include "tests/moe/ep_helpers.h"

namespace moiety::moe {
namespace {

TEST(ExpertMap, DefaultIsEvenUpToOne) {
  const ExpertMap map(6, 4);
  std::vector<int> owners;
  for (int e = 0; e < 6; ++e) owners.push_back(map.owner(e));
  EXPECT_EQ(owners, (std::vector<int>{0, 1, 1, 2, 3, 3}));
  EXPECT_EQ(map.local_count(0), 1);
  EXPECT_EQ(map.local_max(), 2);
  EXPECT_EQ(map.local_index(2), 1);

  const ExpertMap one(1, 4);  // ranks without experts
  EXPECT_EQ(one.owner(0), 3);
  EXPECT_EQ(one.local_count(0), 0);
  EXPECT_TRUE(one.experts_of(1).empty());
}

TEST(ExpertMap, CustomOwners) {
  const ExpertMap map({2, 0, 2, 0, 2}, 3);
  EXPECT_EQ(std::vector<int32_t>(map.experts_of(2).begin(), map.experts_of(2).end()),
            (std::vector<int32_t>{0, 2, 4}));
  EXPECT_EQ(map.local_index(4), 2);
  EXPECT_EQ(map.local_count(1), 0);
  EXPECT_EQ(error_of([] {
              ExpertMap({0, 3}, 3);
            }),
            "expert map: owner 3 of expert 1 is outside [0, 3)");
  EXPECT_EQ(error_of([] { ExpertMap(4097, 2); }), "expert map: 4097 experts, at most 4096");
}

std::vector<int64_t> trimmed(const std::vector<int64_t>& count, int64_t capacity, int64_t a) {
  std::vector<int64_t> kept(count.size());
  trim(count, capacity, a, kept);
  return kept;
}

TEST(Trim, LongestExpertsLoseFirst) {
  using V = std::vector<int64_t>;
  EXPECT_EQ(trimmed({5, 3, 0}, 8, 1), (V{5, 3, 0}));
  EXPECT_EQ(trimmed({90, 3, 4}, 20, 1), (V{13, 3, 4}));  // one hot expert: others keep all
  EXPECT_EQ(trimmed({7, 7, 7}, 20, 1), (V{7, 7, 6}));    // ties: the first experts win
  EXPECT_EQ(trimmed({7, 7, 7}, 19, 1), (V{7, 6, 6}));
  EXPECT_EQ(trimmed({17, 16, 1}, 64, 16), (V{17, 16, 1}));  // 2 + 1 + 1 blocks of 16
  EXPECT_EQ(trimmed({17, 16, 1}, 63, 16), (V{16, 16, 1}));  // 3 blocks
  EXPECT_EQ(trimmed({17, 16, 1}, 47, 16), (V{16, 16, 0}));  // 2 blocks
  EXPECT_EQ(trimmed({17, 16, 1}, 15, 16), (V{0, 0, 0}));    // less than a block
  EXPECT_EQ(trimmed({3, 0, 2}, 0, 1), (V{0, 0, 0}));
  EXPECT_EQ(trimmed({}, 10, 1), V{});
}

// The terms of docs/spec/ep.md#bytes, written out.
TEST(Memory, BytesFollowTheFormulas) {
  const auto up = [](int64_t n, int64_t q) { return (n + q - 1) / q * q; };
  struct Row {
    int ranks, experts;
    EpLimits limits;
    int chunk_rows;
  };
  const Row rows[] = {
      {4, 64, {.tokens = 4096, .model = 7168, .topk = 8}, 16},
      {2,
       6,
       {.tokens = 17, .model = 127, .topk = 2, .widest = PayloadFormat::kFP32, .depth = 1},
       1},
      {8, 256, {.tokens = 100, .model = 33, .topk = 32, .rank_fp32 = true, .token_order = true}, 7},
      {1, 8, {.tokens = 100, .model = 64, .topk = 2, .token_order = true}, 16},
      {3, 5, {.tokens = 0, .model = 1, .topk = 1}, 16},
  };
  for (const Row& row : rows) {
    const EpLimits& l = row.limits;
    const int64_t r = row.ranks, e = row.experts, t = l.tokens, d = l.model, k = l.topk;
    const int64_t b = l.widest == PayloadFormat::kFP32 ? 4 : 2, depth = l.depth;
    const int64_t reduce = up(up(d * (l.rank_fp32 ? 4 : b), 16) + up(4 * k, 16), 128);
    const int64_t record = up(up(d * b, 16) + up(4 * k, 16), 128);
    int64_t regions = depth * (r - 1) * t * std::max(record, reduce);
    if (l.token_order && r > 1) {
      regions = std::max(regions, depth * t * k * up(up(d * b, 16) + 16, 128));
    }
    const int64_t chunks = (t + row.chunk_rows - 1) / row.chunk_rows;
    const int64_t words = 5 * up(8 * depth * r, 128) + up(8 * depth * r * (chunks + 1), 128) +
                          up(8 * r, 128) + up(8, 128) + up(48 * r, 128);
    const EpBytes bytes =
        EpGroup::bytes(ExpertMap(row.experts, row.ranks), l, {.chunk_rows = row.chunk_rows});
    EXPECT_EQ(bytes.record, record);
    EXPECT_EQ(bytes.record_reduce, reduce);
    EXPECT_EQ(bytes.regions, regions);
    EXPECT_EQ(bytes.meta, depth * (r - 1) * (128 + up(4 * (e + r), 128) + t * (8 + 8 * k)));
    EXPECT_EQ(bytes.words, words);
    EXPECT_EQ(bytes.total, up(bytes.total, 4096));
    EXPECT_EQ(bytes.total, bytes.regions + bytes.meta + bytes.words + bytes.loss);
    EXPECT_LT(bytes.loss, 4096 + 128);
  }
  // The table's line for bf16, D 7168, K 8.
  const EpLimits big{.tokens = 4096, .model = 7168, .topk = 8};
  EXPECT_EQ(EpGroup::bytes(ExpertMap(64, 4), big, {}).record, 14464);
  EXPECT_EQ(EpGroup::bytes(ExpertMap(64, 2), big, {}).regions >> 20, 113);
  EXPECT_EQ(EpGroup::bytes(ExpertMap(64, 4), big, {}).regions >> 20, 339);
  EXPECT_EQ(EpGroup::bytes(ExpertMap(64, 8), big, {}).regions >> 20, 791);
}

TEST(Memory, BytesOverCollectivesFollowTheFormulas) {
  const auto up = [](int64_t n, int64_t q) { return (n + q - 1) / q * q; };
  const EpOptions options{.transport = EpTransport::kCollectives};
  const ExpertMap map(64, 5);
  for (const int64_t peer_rows : {0, 7, 1000}) {
    for (const bool token_order : {false, true}) {
      const int64_t t = 100, d = 33, k = 8, r = 5, e = 64;
      const int64_t rows = (r - 1) * (peer_rows == 7 ? 7 : t);
      const EpLimits limits{.tokens = t,
                            .model = d,
                            .topk = k,
                            .rank_fp32 = true,
                            .token_order = token_order,
                            .peer_rows = peer_rows};
      const int64_t record = up(up(4 * d, 16) + up(4 * k, 16), 128);
      const int64_t pair = token_order ? up(up(2 * d, 16) + 16, 128) : 0;
      const EpBytes bytes = EpGroup::bytes(map, limits, options);
      EXPECT_EQ(bytes.record_reduce, record);
      EXPECT_EQ(bytes.pair, pair);
      EXPECT_EQ(bytes.regions, std::max(rows * record, rows * k * pair) +
                                   std::max(rows * record, std::min(rows, t) * k * pair));
      EXPECT_EQ(bytes.meta,
                2 * r * 32 + r * (128 + up(4 * (e + r), 128)) + (token_order ? 4 * t * k : 0));
      EXPECT_EQ(bytes.words, 0);
      EXPECT_EQ(bytes.total, bytes.regions + bytes.meta + bytes.loss);
      EXPECT_LT(bytes.loss, 5 * 128);
    }
  }
}

TEST(Memory, PlanBytesFollowTheFormula) {
  const auto up = [](int64_t n) { return (n + 127) / 128 * 128; };
  const ExpertMap map({0, 0, 0, 1, 2, 0}, 3);
  const int64_t t = 300, k = 4, c = 1000, r = 3, e = 6, most = 4, blocks = 2;
  const Tensor idx(DType::kInt32, {7, k});
  const int64_t expected = 128 + 3 * up(8 * most) + up(8 * (most + 1)) + up(4 * r * e) +
                           up(4 * r * r) + up(4 * r) + 2 * up(4 * t * k) + up(4 * t * r) +
                           up(4 * r * t) + up(4 * r * t * k) + up(4 * c) + up(4 * blocks * r) +
                           up(4 * blocks * e);
  EXPECT_EQ(plan_bytes(map, {.tokens = t, .model = 1, .topk = 8}, {.idx_TK = idx, .capacity = c}),
            expected);
}

TEST(Memory, Capacities) {
  EXPECT_EQ(worst_capacity(4, 100, 8, 16, 1), 4 * 100 * 8);
  EXPECT_EQ(worst_capacity(4, 100, 8, 2, 16), 4 * 100 * 2 + 15 * 2);
  EXPECT_EQ(worst_capacity(4, 100, 8, 2, 16, true), 4 * 100 * 8 + 15 * 2);
  EXPECT_EQ(worst_capacity(4, 100, 8, 0, 16), 0);
  EXPECT_EQ(worst_capacity(1, 1, 1, 64, 16), 1 + 15);
  EXPECT_EQ(capacity_for(1.25, 400, 8, 4, 16, 1), 1000);
  EXPECT_EQ(capacity_for(1.0, 401, 8, 4, 16, 16), (802 + 16 * 15 + 15) / 16 * 16);
}

// One batch on `ranks` ranks: routes with `idx` (by rank), then calls body(group, plan).
using Body = std::function<void(EpGroup&, const EpPlan&)>;
void with_plan(const ExpertMap& map, const ref::PerRank<int64_t>& idx, int topk,
               const std::function<PrepareArgs(int rank)>& args_of, const Body& body) {
  Threads::run(map.ranks(), [&](comm::Communicator& world) {
    const int me = world.rank();
    int64_t most = 0;
    for (const auto& rank : idx) most = std::max(most, static_cast<int64_t>(rank.size()) / topk);
    const EpLimits limits{.tokens = most, .model = 1, .topk = topk};
    EpGroup group = EpGroup::create(world, map, limits, {.name = "moe"});
    Mat<int64_t> mine(idx[me], topk);
    PrepareArgs args = args_of(me);
    args.idx_TK = mine.view();
    const PlanMemory memory(map, limits, args);
    body(group, prepare(group, args, memory.view(), {}));
    group.close();
  });
}

TEST(Plan, OverflowIsAnErrorOnEveryRank) {
  // Rank 1 owns experts 2 and 3: 4 + 7 pairs, alignment 4 asks for 4 + 8 rows.
  const ref::PerRank<int64_t> idx{{2, 3, 3, 3, 0}, {3, 3, 3, 3, 2, 2, 2}};
  const auto args = [](int rank) {
    return PrepareArgs{.idx_TK = {}, .alignment = 4, .capacity = rank == 1 ? 11 : 8};
  };
  with_plan(ExpertMap(4, 2), idx, 1, args, [](EpGroup& group, const EpPlan& plan) {
    const std::string expected =
        "ep prepare, group \"moe\": rank 1 needs 12 rows, capacity 11; largest is expert 3 with 7";
    EXPECT_EQ(error_of([&] { group.check(plan.epoch - 1); }), "no error");
    EXPECT_EQ(error_of([&] { group.check(plan.epoch); }), expected);
    EXPECT_EQ(error_of([&] { group.check(plan.epoch); }), "no error");
    const int64_t* info = plan.info.data<int64_t>();
    EXPECT_EQ(info[kInfoGroupRequired], 12);
    EXPECT_EQ(info[kInfoGroupDropped], 3);
    EXPECT_EQ(info[kInfoDropped], group.rank() == 1 ? 3 : 0);
  });
}

TEST(Plan, CapacityLimitIsReadWhenItRuns) {
  const ref::PerRank<int64_t> idx{{0, 0, 0, 1, 1, 1}};
  Tensor limit(DType::kInt64, {1});
  const ExpertMap map(2, 1);
  Threads::run(1, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, map, {.tokens = 6, .model = 1, .topk = 1}, {});
    Mat<int64_t> mine(idx[0], 1);
    const PrepareArgs args{.idx_TK = mine.view(),
                           .capacity = 6,
                           .capacity_limit = limit,
                           .overflow = OverflowPolicy::kDrop};
    const PlanMemory memory(map, group.limits(), args);
    for (const auto& [value, kept] :
         {std::pair<int64_t, int64_t>{100, 6}, {6, 6}, {5, 5}, {1, 1}, {0, 0}, {-7, 0}}) {
      *limit.data<int64_t>() = value;
      const EpPlan plan = prepare(group, args, memory.view(), {});
      EXPECT_EQ(plan.info.data<int64_t>()[kInfoKept], kept) << value;
      EXPECT_EQ(plan.info.data<int64_t>()[kInfoCapacity], std::clamp<int64_t>(value, 0, 6));
      EXPECT_EQ(plan.rows_real.data<int64_t>()[0], (kept + 1) / 2);  // the first expert wins ties
    }
  });
}

// Rank 0 has 5 rows for rank 1, two of them too many; one takes two pairs with it, and the pair
// that the other has at its own rank stays.
TEST(Plan, RowsOverPeerRowsAreCut) {
  const ref::PerRank<int64_t> idx{{2, 0, 2, 3, 3, 2, 1, 3, 2, 2, 0, 1}, {0, 3, -1, 1}};
  const ExpertMap map(4, 2);
  for (const OverflowPolicy policy :
       {OverflowPolicy::kError, OverflowPolicy::kDrop, OverflowPolicy::kReport}) {
    Threads::run(2, [&](comm::Communicator& world) {
      const int me = world.rank();
      const EpLimits limits{.tokens = 6, .model = 1, .topk = 2, .peer_rows = 3};
      EpGroup group = EpGroup::create(world, map, limits, {.name = "moe"});
      Mat<int64_t> mine(idx[me], 2);
      const PrepareArgs args{.idx_TK = mine.view(), .capacity = 20, .overflow = policy};
      const PlanMemory memory(map, limits, args);
      const EpPlan plan = prepare(group, args, memory.view(), {});
      const auto info = [&](InfoWord word) { return plan.info.data<int64_t>()[word]; };
      EXPECT_EQ(info(kInfoOwnDropped), me == 0 ? 3 : 0);
      EXPECT_EQ(info(kInfoDropped), 0);
      EXPECT_EQ(info(kInfoGroupDropped), 3);
      EXPECT_EQ(info(kInfoGroupOverflow), 1);
      EXPECT_EQ(info(kInfoLargestRows), 5);  // would have been enough
      EXPECT_EQ(info(kInfoRequired), 6);
      if (me == 0) {
        // Slots without holes: experts 2 and 3 have 3 and 3 pairs, one of them of rank 1.
        const std::vector<int32_t> slots(plan.slot_TK.data<int32_t>(),
                                         plan.slot_TK.data<int32_t>() + 12);
        EXPECT_EQ(slots, (std::vector<int32_t>{0, 0, 1, 3, 4, 2, 3, -1, -1, -1, 1, 4}));
      }
      const bool fails = policy == OverflowPolicy::kError;
      EXPECT_EQ(error_of([&] { group.check(plan.epoch); }),
                fails ? "ep prepare, group \"moe\": rank 0 has 5 rows for rank 1, peer_rows is 3"
                      : "no error");
      group.reserve({.tokens = 6, .model = 1, .topk = 2, .peer_rows = 5});
      EXPECT_EQ(group.limits().peer_rows, 5);
      const EpPlan whole = prepare(group, args, memory.view(), {});
      EXPECT_EQ(whole.info.data<int64_t>()[kInfoGroupOverflow], 0);
      group.reserve({.tokens = 3, .model = 1, .topk = 1});  // 0: all rows
      EXPECT_EQ(group.limits().peer_rows, 0);
      group.release();
      group.reserve(limits);
      Mat<bf16> x(6, 1), rows(20, 1);
      x = Mat<bf16>(std::vector<bf16>(plan.tokens), 1);
      EXPECT_EQ(
          error_of([&] { dispatch(group, whole, {.x_TD = x.view(), .rows_CD = rows.view()}, {}); }),
          "ep dispatch, group \"moe\": the plan is for up to 5 rows to a rank, reserved are "
          "3 (EpLimits peer_rows)");
      group.close();
    });
  }
}

TEST(Plan, BadIndexIsNamedOnEveryRank) {
  const ref::PerRank<int64_t> idx{{0, 1, 2, 3}, {-1, 3, 2, 4, 77, 1}};
  const auto args = [](int) { return PrepareArgs{.idx_TK = {}, .capacity = 10}; };
  with_plan(ExpertMap(4, 2), idx, 2, args, [](EpGroup& group, const EpPlan& plan) {
    EXPECT_EQ(error_of([&] { group.check(plan.epoch); }),
              "ep prepare, group \"moe\": rank 1, token 1, choice 1: expert 4 is outside [0, 4)");
    const int64_t* info = plan.info.data<int64_t>();
    EXPECT_EQ(info[kInfoOwnBad], group.rank() == 1 ? 2 : 0);
    EXPECT_EQ(info[kInfoOwnMasked], group.rank() == 1 ? 1 : 0);
    if (group.rank() == 1) {
      EXPECT_EQ(plan.slot_TK.data<int32_t>()[3], -1);
      EXPECT_EQ(plan.slot_TK.data<int32_t>()[4], -1);
    }
  });
}

TEST(Plan, ReportsAreStickyUntilTaken) {
  const ref::PerRank<int64_t> idx{{0, 0, 0}, {0, 1, 1}};
  Threads::run(2, [&](comm::Communicator& world) {
    const ExpertMap map(2, 2);
    EpGroup group = EpGroup::create(world, map, {.tokens = 3, .model = 1, .topk = 1}, {});
    Mat<int64_t> mine(idx[world.rank()], 1);
    Tensor report(DType::kInt64, {3});
    const int64_t* words = report.data<int64_t>();
    for (const int64_t capacity : {3, 4, 1}) {  // drops 1, none, 3 + 1
      const PrepareArgs args{
          .idx_TK = mine.view(), .capacity = capacity, .overflow = OverflowPolicy::kReport};
      const PlanMemory memory(map, group.limits(), args);
      const EpPlan plan = prepare(group, args, memory.view(), {});
      group.check(plan.epoch);
    }
    group.take_report(report, {});
    EXPECT_EQ(std::vector<int64_t>(words, words + 3), (std::vector<int64_t>{2, 4, 5}));
    group.take_report(report, {});
    EXPECT_EQ(std::vector<int64_t>(words, words + 3), (std::vector<int64_t>{0, 0, 0}));
    group.close();
  });
}

TEST(Plan, ArgumentsAreChecked) {
  Threads::run(1, [](comm::Communicator& world) {
    const ExpertMap map(4, 1);
    EpGroup group = EpGroup::create(world, map, {.tokens = 8, .model = 16, .topk = 2}, {});
    const Tensor idx(DType::kInt32, {8, 2}), many(DType::kInt32, {9, 2}),
        wide(DType::kInt32, {8, 3});
    const Buffer memory(1 << 16);
    const TensorView bytes = memory.view(DType::kUInt8, {1 << 16});
    const auto prepared = [&](const PrepareArgs& args, TensorView where) {
      return error_of([&] { prepare(group, args, where, {}); });
    };
    EXPECT_EQ(prepared({.idx_TK = many, .capacity = 8}, bytes),
              "ep prepare, group \"ep\": 9 tokens, reserved are 8");
    EXPECT_EQ(prepared({.idx_TK = wide, .capacity = 8}, bytes),
              "ep prepare, group \"ep\": K=3 is outside [1, 2]");
    EXPECT_EQ(prepared({.idx_TK = idx, .alignment = 0, .capacity = 8}, bytes),
              "ep prepare: alignment 0 is outside [1, 2147483647]");
    EXPECT_NE(
        prepared({.idx_TK = idx, .capacity = 8}, bytes.slice(0, 0, 100)).find("bytes aligned"),
        std::string::npos);
    EXPECT_EQ(error_of([&] {
                EpGroup::create(world, ExpertMap(4, 2), {.tokens = 8, .model = 16, .topk = 2}, {});
              }),
              "ep, group \"ep\": the map has 2 ranks, the communicator 1");
    EXPECT_EQ(
        error_of([&] { EpGroup::create(world, map, {.tokens = 8, .model = 16, .topk = 33}, {}); }),
        "ep, group \"ep\": topk 33 is outside [1, 32]");

    const EpPlan plan = prepare(group, {.idx_TK = idx, .capacity = 16}, bytes, {});
    const Tensor x(DType::kBFloat16, {8, 16}), rows(DType::kBFloat16, {16, 16});
    const Tensor fp32(DType::kFloat32, {8, 16}), wrong(DType::kBFloat16, {15, 16});
    const Tensor bytes8(DType::kUInt8, {8, 16}), weights(DType::kFloat32, {8, 2});
    const auto dispatched = [&](const DispatchArgs& args) {
      return error_of([&] { dispatch(group, plan, args, {}); });
    };
    EXPECT_EQ(dispatched({.x_TD = x, .rows_CD = wrong}),
              "ep dispatch: rows is bfloat16[15, 16], expected bfloat16[16, 16]");
    EXPECT_EQ(dispatched({.x_TD = bytes8, .rows_CD = rows}),
              "ep dispatch: x is uint8[8, 16]; rows are bfloat16, float16 or float32");
    EXPECT_EQ(dispatched({.x_TD = x, .w_TK = weights, .rows_CD = rows}),
              "ep dispatch: w and slot_w go together");
    EXPECT_EQ(
        error_of([&] {
          combine(group, plan, {.y_CD = rows, .reduction = Reduction::kToken, .out_TD = x}, {});
        }),
        "ep combine, group \"ep\": kToken of bfloat16[16, 16] needs 128 bytes a pair, reserved "
        "are 0 (EpLimits token_order, model, widest)");
    const Tensor long_x(DType::kFloat32, {8, 64}), long_rows(DType::kFloat32, {16, 64});
    EXPECT_EQ(dispatched({.x_TD = long_x, .rows_CD = long_rows}),
              "ep dispatch, group \"ep\": float32[8, 64] needs 384 bytes a row, reserved are 128 "
              "(EpLimits model, topk, widest, rank_fp32)");
  });
}

}  // namespace
}  // namespace moiety::moe
