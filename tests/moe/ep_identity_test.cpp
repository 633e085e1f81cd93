// Relations that must hold between operations: independence of the layout, adjointness,
// derivatives, round trips, and the bits of single values.
#include <cmath>
#include <mutex>

#include "moiety/moe/combine_row.h"
#include "tests/moe/ep_helpers.h"
#include "tests/quant/amax_of.h"

namespace moiety::moe {
namespace {

constexpr int kTokens = 24, kModel = 40, kTopk = 3, kExperts = 12;

// Global inputs cut over the ranks: rank r has tokens [r n / R, (r + 1) n / R) of them.
struct Batch {
  std::vector<int64_t> idx;  // [kTokens, kTopk]
  std::vector<float> x;      // [kTokens, kModel]

  explicit Batch(int seed) {
    std::mt19937 rng(seed);
    idx = make_routing(Routing::kSomeMasked, {kTokens}, kTopk, ExpertMap(kExperts, 1), rng)[0];
    for (int i = 0; i < kTokens * kModel; ++i) x.push_back(std::normal_distribution<float>()(rng));
  }
  template <class V>
  static std::vector<V> part(const std::vector<V>& all, int rank, int ranks) {
    const size_t row = all.size() / kTokens, begin = rank * kTokens / ranks * row;
    return {all.begin() + begin, all.begin() + (rank + 1) * kTokens / ranks * row};
  }
};

// A "layer": dispatch, y = expert-dependent multiple of the row in bf16, combine by `reduction`.
std::vector<bf16> layer_output(const Batch& batch, int ranks, bool permuted, Reduction reduction) {
  std::vector<int32_t> owner;
  for (int e = 0; e < kExperts; ++e) owner.push_back(e * 7 % ranks);
  const ExpertMap map = permuted ? ExpertMap(owner, ranks) : ExpertMap(kExperts, ranks);
  const EpLimits limits{.tokens = kTokens, .model = kModel, .topk = kTopk, .token_order = true};
  std::vector<bf16> out(kTokens * kModel);
  Threads::run(ranks, [&](comm::Communicator& world) {
    const int me = world.rank();
    EpGroup group = EpGroup::create(world, map, limits, {});
    Mat<int64_t> idx(Batch::part(batch.idx, me, ranks), kTopk);
    const std::vector<float> mine = Batch::part(batch.x, me, ranks);
    Mat<bf16> x(std::vector<bf16>(mine.begin(), mine.end()), kModel);
    const int64_t capacity = worst_capacity(ranks, kTokens, kTopk, map.local_count(me), 4);
    const PrepareArgs args{.idx_TK = idx.view(), .alignment = 4, .capacity = capacity};
    const PlanMemory memory(map, limits, args);
    const EpPlan plan = prepare(group, args, memory.view(), {});
    Mat<bf16> rows(capacity, kModel), result(plan.tokens, kModel);
    dispatch(group, plan, {.x_TD = x.view(), .rows_CD = rows.view()}, {});
    for (int i = 0; i < map.local_count(me); ++i) {
      const int64_t* offset = plan.offset.data<int64_t>();
      for (int64_t slot = offset[i]; slot < offset[i + 1]; ++slot) {
        for (int d = 0; d < kModel; ++d) {
          rows.at(slot, d) = bf16(float(rows.at(slot, d)) * (1.0f + 0.1f * map.experts_of(me)[i]));
        }
      }
    }
    combine(group, plan, {.y_CD = rows.view(), .reduction = reduction, .out_TD = result.view()},
            {});
    for (int64_t t = 0; t < plan.tokens; ++t) {
      const int64_t row = me * kTokens / ranks + t;
      for (int d = 0; d < kModel; ++d) out[row * kModel + d] = result.at(t, d);
    }
    group.close();
  });
  return out;
}

TEST(EpIdentity, TokenOrderDoesNotDependOnRanksAndMap) {
  const Batch batch(1);
  const auto bits = [](const std::vector<bf16>& x) {
    std::vector<uint16_t> out;
    for (const bf16 v : x) out.push_back(v.bits);
    return out;
  };
  const auto one = bits(layer_output(batch, 1, false, Reduction::kToken));
  for (const int ranks : {2, 4, 8}) {
    EXPECT_EQ(bits(layer_output(batch, ranks, false, Reduction::kToken)), one) << ranks;
    EXPECT_EQ(bits(layer_output(batch, ranks, true, Reduction::kToken)), one) << ranks;
  }
  // The default order does depend on them: the comparison above can fail.
  EXPECT_NE(bits(layer_output(batch, 4, true, Reduction::kRank)), one);
}

// On small integers all sums are exact, so the two sides are equal to the last bit.
TEST(EpIdentity, DispatchBackwardIsTheAdjointOfDispatch) {
  constexpr int kRanks = 3;
  const ExpertMap map(kExperts, kRanks);
  double forward = 0, backward = 0;
  std::mutex mutex;
  Threads::run(kRanks, [&](comm::Communicator& world) {
    std::mt19937 rng(5 + world.rank());
    const int64_t tokens = 7 + world.rank(), capacity = 60;
    const auto routing =
        make_routing(Routing::kSomeMasked, std::vector<int64_t>{tokens}, kTopk, map, rng);
    const EpLimits limits{
        .tokens = 10, .model = kModel, .topk = kTopk, .widest = PayloadFormat::kFP32};
    EpGroup group = EpGroup::create(world, map, limits, {});
    Mat<int64_t> idx(routing[0], kTopk);
    const PrepareArgs args{.idx_TK = idx.view(),
                           .alignment = 2,
                           .capacity = capacity / 4,  // some pairs are dropped
                           .overflow = OverflowPolicy::kDrop};
    const PlanMemory memory(map, limits, args);
    const EpPlan plan = prepare(group, args, memory.view(), {});
    Mat<float> x(tokens, kModel), w(tokens, kTopk), gx(tokens, kModel), gw(tokens, kTopk);
    Mat<float> rows(args.capacity, kModel), slot_w(args.capacity, 1);
    Mat<float> g_rows(args.capacity, kModel), g_slot_w(args.capacity, 1);
    const auto fill = [&](Mat<float>& m, int64_t n, int64_t cols) {
      for (int64_t i = 0; i < n * cols; ++i) m.at(i / cols, i % cols) = float(int(rng() % 17) - 8);
    };
    fill(x, tokens, kModel);
    fill(w, tokens, kTopk);
    fill(g_rows, args.capacity, kModel);
    fill(g_slot_w, args.capacity, 1);
    dispatch(group, plan,
             {.x_TD = x.view(),
              .w_TK = w.view(),
              .rows_CD = rows.view(),
              .slot_w = slot_w.vector(),
              .zero_tail = true},
             {});
    dispatch_backward(group, plan,
                      {.g_rows_CD = g_rows.view(),
                       .g_slot_w = g_slot_w.vector(),
                       .gx_TD = gx.view(),
                       .gw_TK = gw.view()},
                      {});
    double left = 0, right = 0;
    for (int64_t i = 0; i < args.capacity; ++i) {
      for (int d = 0; d < kModel; ++d) left += double(rows.at(i, d)) * g_rows.at(i, d);
      left += double(slot_w.at(i, 0)) * g_slot_w.at(i, 0);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      for (int d = 0; d < kModel; ++d) right += double(x.at(t, d)) * gx.at(t, d);
      for (int k = 0; k < kTopk; ++k) right += double(w.at(t, k)) * gw.at(t, k);
    }
    {
      const std::lock_guard lock(mutex);
      forward += left;
      backward += right;
      EXPECT_GT(plan.info.data<int64_t>()[kInfoGroupDropped], 0);
    }
    group.close();
  });
  EXPECT_EQ(forward, backward);
  EXPECT_NE(forward, 0);
}

// The backward passes of the oracle, in double, against central differences of its forward.
TEST(EpIdentity, ReferenceGradientsAgainstFiniteDifferences) {
  constexpr int kRanks = 2, kD = 5;
  std::mt19937 rng(9);
  const ExpertMap map(4, kRanks);
  const std::vector<int64_t> capacity{9, 100};  // rank 0 drops
  const auto routing = make_routing(Routing::kRandom, {6, 5}, 2, map, rng);
  const ref::Plan plan = ref::make_plan({map, 2, 2, capacity, routing}, capacity);
  EXPECT_EQ(plan.rank[0].info[kInfoGroupOverflow], 1);
  const auto random = [&](std::vector<int64_t> rows, int64_t cols) {
    ref::PerRank<double> out;
    for (const int64_t n : rows) {
      out.emplace_back(n * cols);
      for (double& v : out.back()) v = std::normal_distribution<double>()(rng);
    }
    return out;
  };
  auto x = random({6, 5}, kD), w = random({6, 5}, 2);
  auto y = random(capacity, kD), slot_w = random(capacity, 1);
  const auto g_out = random({6, 5}, kD), g_rows = random(capacity, kD);
  const auto g_slot = random(capacity, 1);
  const auto inner = [](const ref::PerRank<double>& a, const ref::PerRank<double>& b) {
    double sum = 0;
    for (size_t r = 0; r < a.size(); ++r) {
      for (size_t i = 0; i < a[r].size(); ++i) sum += a[r][i] * b[r][i];
    }
    return sum;
  };
  const auto zeros = [&](int64_t cols) {
    return ref::PerRank<double>{std::vector<double>(capacity[0] * cols),
                                std::vector<double>(capacity[1] * cols)};
  };
  const auto expect_gradient = [&](ref::PerRank<double>& at, const ref::PerRank<double>& gradient,
                                   const std::function<double()>& loss, const char* what) {
    constexpr double h = 1e-4;
    for (size_t r = 0; r < at.size(); ++r) {
      for (size_t i = 0; i < at[r].size(); ++i) {
        const double old = at[r][i];
        at[r][i] = old + h;
        const double up = loss();
        at[r][i] = old - h;
        const double down = loss();
        at[r][i] = old;
        ASSERT_NEAR((up - down) / (2 * h), gradient[r][i], 1e-6) << what << " " << r << " " << i;
      }
    }
  };

  const auto combined = [&] {
    return inner(
        ref::combine<double, double, double>(plan, kD, y, &slot_w, nullptr, Reduction::kRank),
        g_out);
  };
  auto gy = zeros(kD), g_slot_w = zeros(1);
  ref::combine_backward<double, double>(plan, kD, g_out, &slot_w, &y, gy, g_slot_w);
  expect_gradient(y, gy, combined, "y");
  expect_gradient(slot_w, g_slot_w, combined, "slot_w");

  const auto dispatched = [&] {
    auto rows = zeros(kD), sw = zeros(1);
    ref::dispatch<double, double>(plan, kD, x, &w, false, rows, sw);
    return inner(rows, g_rows) + inner(sw, g_slot);
  };
  const auto gx =
      ref::combine<double, double, double>(plan, kD, g_rows, nullptr, nullptr, Reduction::kToken);
  expect_gradient(x, gx, dispatched, "x");
  expect_gradient(w, ref::weight_gradients(plan, g_slot), dispatched, "w");
}

template <class T>
class OneRow : public testing::Test {};
using Payloads = testing::Types<bf16, fp16, float>;
TYPED_TEST_SUITE(OneRow, Payloads);

// Whole groups of lanes and parts of one, at any alignment of elements.
TYPED_TEST(OneRow, DotProductAddsInTheOrderOfLanes) {
  using T = TypeParam;
  std::mt19937 rng(3);
  std::vector<T> a, b;
  for (int i = 0; i < 2100; ++i) {
    a.push_back(T(std::normal_distribution<float>()(rng)));
    b.push_back(T(std::normal_distribution<float>()(rng)));
  }
  for (const int64_t n : {0, 1, 7, 8, 9, 255, 256, 257, 511, 512, 1000, 2047}) {
    for (const int64_t at : {0, 1, 3}) {
      const float dot = dot_row(dtype_of<T>, reinterpret_cast<const std::byte*>(&a[at]),
                                reinterpret_cast<const std::byte*>(&b[2 * at]), n);
      const float expected = ref::dot<T, float>(&a[at], &b[2 * at], n);
      EXPECT_TRUE(same_bytes(dot, expected)) << n << ": " << dot << ", expected " << expected;
    }
  }
}

template <class T>
class OneChoice : public testing::Test {};
TYPED_TEST_SUITE(OneChoice, Payloads);

// With one pair alive the bytes survive: signed zeros, subnormals and the payload of a NaN.
TYPED_TEST(OneChoice, RoundTripReturnsTheBytes) {
  using T = TypeParam;
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  constexpr int kRanks = 3, kD = 600;
  const ExpertMap map(6, kRanks);
  std::vector<T> odd;  // all kinds of bit patterns
  for (int i = 0; i < 7 * kD; ++i) {
    const Bits b = static_cast<Bits>(i * (sizeof(T) == 2 ? 0x9E37u : 0x9E3779B9u));
    T v;
    std::memcpy(static_cast<void*>(&v), &b, sizeof(T));
    odd.push_back(v);
  }
  for (const Reduction reduction : {Reduction::kRank, Reduction::kRankFp32, Reduction::kToken}) {
    Threads::run(kRanks, [&](comm::Communicator& world) {
      const EpLimits limits{
          .tokens = 7, .model = kD, .topk = 2, .widest = PayloadFormat::kFP32, .token_order = true};
      EpGroup group = EpGroup::create(world, map, limits, {});
      // Two choices, one of them masked; K = 1 is the second column alone.
      std::vector<int64_t> both;
      for (int t = 0; t < 7; ++t) both.insert(both.end(), {-1, (t + world.rank()) % 6});
      Mat<int64_t> idx(both, 2);
      for (const TensorView& choices : {idx.view(), idx.view().slice(1, 1, 2)}) {
        const PrepareArgs args{.idx_TK = choices, .alignment = 3, .capacity = 40};
        const PlanMemory memory(map, limits, args);
        const EpPlan plan = prepare(group, args, memory.view(), {});
        Mat<T> x(odd, kD), rows(40, kD), back(7, kD);
        dispatch(group, plan, {.x_TD = x.view(), .rows_CD = rows.view()}, {});
        combine(group, plan, {.y_CD = rows.view(), .reduction = reduction, .out_TD = back.view()},
                {});
        back.expect(odd, false, "round trip");
      }
      group.close();
    });
  }
}

// The amax is that of the rows that came (docs/spec/formats.md#amax-from-elsewhere).
template <class T>
void check_sink(Routing routing) {
  constexpr int kRanks = 3, kD = 100;
  const ExpertMap map(kExperts, kRanks);
  std::mt19937 rng(5);
  const auto idx = make_routing(routing, {kTokens, 0, kTokens}, kTopk, map, rng);
  Threads::run(kRanks, [&](comm::Communicator& world) {
    const int me = world.rank();
    const EpLimits limits{
        .tokens = kTokens, .model = kD, .topk = kTopk, .widest = PayloadFormat::kFP32};
    EpGroup group = EpGroup::create(world, map, limits, {});
    const int64_t tokens = std::ssize(idx[me]) / kTopk;
    const int64_t local = map.local_count(me),
                  capacity = worst_capacity(kRanks, kTokens, kTopk, local, 4);
    Mat<int64_t> choices(idx[me], kTopk);
    const PrepareArgs args{.idx_TK = choices.view(), .alignment = 4, .capacity = capacity};
    const PlanMemory memory(map, limits, args);
    const EpPlan plan = prepare(group, args, memory.view(), {});
    Mat<T> x(tokens, kD), rows(capacity, kD);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int d = 0; d < kD; ++d) x.at(t, d) = T(0.01f * static_cast<float>(t * d % 17 - 8));
    }
    if (tokens > 0) {
      x.at(3, 7) = T(-INFINITY);
      x.at(8, kD - 1) = T(NAN);
      for (int d = 0; d < kD; ++d) x.at(9, d) = T(0.0f);
    }
    std::vector<float> amax(local, 123);
    const TensorView sink(amax.data(), DType::kFloat32, {local});
    dispatch(group, plan, {.x_TD = x.view(), .rows_CD = rows.view(), .sink = {sink}}, {});
    const quant::RowGroups groups{.count_E = plan.rows_padded,
                                  .begin_E1 = plan.offset,
                                  .experts = local,
                                  .capacity = capacity};
    EXPECT_EQ(bits_of(sink), quant::amax_of(rows.view(), &groups));
    EXPECT_NE(error_of([&] {
                dispatch(group, plan,
                         {.x_TD = x.view(), .rows_CD = rows.view(), .sink = {sink.slice(0, 0, 1)}},
                         {});
              }).find("ep dispatch: sink.amax"),
              std::string::npos);
    group.close();
  });
}

TEST(EpIdentity, SinkHasTheAmaxOfEveryExpert) {
  for (const Routing routing : {Routing::kSomeMasked, Routing::kOneExpert, Routing::kAllMasked}) {
    check_sink<bf16>(routing);
    check_sink<float>(routing);
  }
}

// The own rank's partial is rounded as all others are, wherever the token lives.
TEST(EpIdentity, OwnPartialIsRoundedToo) {
  const ExpertMap map(4, 2);
  Threads::run(2, [&](comm::Communicator& world) {
    const EpLimits limits{.tokens = 1, .model = 1, .topk = 4, .rank_fp32 = true};
    EpGroup group = EpGroup::create(world, map, limits, {});
    Mat<int64_t> idx({0, 1, 2, 3}, 4);
    const PrepareArgs args{.idx_TK = idx.view(), .capacity = 4};
    const PlanMemory memory(map, limits, args);
    const EpPlan plan = prepare(group, args, memory.view(), {});
    // Each rank's two experts give 256 and 1 to every token. 257 is no bf16: it rounds to 256.
    Mat<bf16> y(4, 1);
    Mat<float> out(1, 1);
    for (int i = 0; i < 4; ++i) y.at(i, 0) = bf16(i < 2 ? 256.0f : 1.0f);
    combine(group, plan, {.y_CD = y.view(), .out_TD = out.view()}, {});
    EXPECT_EQ(out.at(0, 0), 512.0f);
    combine(group, plan,
            {.y_CD = y.view(), .reduction = Reduction::kRankFp32, .out_TD = out.view()}, {});
    EXPECT_EQ(out.at(0, 0), 514.0f);
    group.close();
  });
}

}  // namespace
}  // namespace moiety::moe
