// Rows that experts read through maps, in a group of one rank where they lie and in others as they
// came, against rows that are copied to the order of experts.
#include "moiety/moe/slot_maps.h"

#include <array>
#include <map>
#include <mutex>
#include <optional>

#include "tests/moe/moe_layer_problem.h"
#include "tests/support/bits.h"

namespace moiety::moe {
namespace {

using namespace whole_layer;

// Everything that a step of the layer stores.
struct Stored {
  std::map<std::string, std::string> bytes;
  std::mutex mutex;
  void add(int rank, const std::string& what, const TensorView& x) {
    const std::scoped_lock lock(mutex);
    bytes[text("{} of rank {}", what, rank)] = bytes_of(x);
  }
};

struct StepOptions {
  bool recompute = false, delay = false;
  int64_t capacity = -1;  // -1: ample
  std::optional<QuantSpec> dispatch = {};
  const gemm::Recipe* recipe = nullptr;
  std::optional<RowCopies> copies = {};
  size_t ranks = 0;  // which of layouts()
  bool own = false;  // the layer has its own rows of gradients
};

// A step of the layer as the model runs it, forward and two backward passes that add up.
void step_of(Problem p, RowLayout layout, const StepOptions& o, Stored& result) {
  p.config.layout = layout;
  p.config.copies = o.copies;
  on_ranks(p, layouts()[o.ranks], [&](Rank& r) {
    EXPECT_EQ(r.layer.layout(), layout);
    if (o.dispatch) r.layer.set_dispatch(o.dispatch);
    MoeWeights weights = r.weights();
    if (o.recipe) {
      weights.quantized_1 = {o.recipe, {{}, r.w1}};
      weights.quantized_2 = {o.recipe, {{}, r.w2}};
    }
    const int64_t capacity = o.capacity < 0 ? r.ample() : o.capacity;
    for (int pass = 0; pass < 2; ++pass) {
      const ArenaScope scope(r.arena);
      r.layer.forward({.weights = weights,
                       .h_TD = r.h,
                       .mask_T = r.mask,
                       .addend = r.addend,
                       .capacity = capacity,
                       .out_TD = r.out,
                       .stats = {r.count, r.sum},
                       .info = r.info,
                       .recompute = o.recompute},
                      &r.saved, r.arena, {});
      std::fill_n(r.scope.data<int64_t>(), 2, r.count.data<int64_t>()[p.experts()]);
      MoeRows rows;
      if (o.recompute) {
        rows = r.layer.make_rows(capacity, r.arena);
        r.layer.rows_again(weights, r.h, r.saved, rows, nullptr, r.arena, {});
      }
      const gemm::GroupScalar beta{static_cast<float>(pass), {}};
      const gemm::GradTarget w1{r.dw1.view(), beta}, w2{r.dw2.view(), beta};
      MoeGradientRows gradient;
      if (!o.own) {
        gradient = r.layer.make_gradient_rows(capacity, r.arena);
        r.layer.receive_gradient(r.saved, r.dout, gradient, nullptr, {});
      }
      const TensorView none;
      r.layer.backward({.weights = weights,
                        .grads = {.router_ED = r.d_router,
                                  .router_beta = beta.value,
                                  .w1 = o.delay ? gemm::GradTarget{} : w1,
                                  .w2 = o.delay ? gemm::GradTarget{} : w2,
                                  .b1_LH = p.b1.empty() ? none : r.db1.view(),
                                  .b2_LD = p.b2.empty() ? none : r.db2.view(),
                                  .bias_beta = beta},
                        .h_TD = r.h,
                        .dout_TD = r.dout,
                        .addend = r.dh_addend,
                        .count = r.count,
                        .scope = r.scope,
                        .dh_TD = r.dh,
                        .rows = rows,
                        .gradient = gradient},
                       r.saved, r.arena, {});
      if (o.delay) {
        r.layer.backward_weights({.weights = weights,
                                  .w1 = w1,
                                  .w2 = w2,
                                  .rows = rows,
                                  .gradient = gradient,
                                  .h_TD = r.h,
                                  .dout_TD = r.dout},
                                 r.saved, r.arena, {});
      }
    }
    for (const auto& [what, x] :
         {std::pair{"out", &r.out}, std::pair{"dh", &r.dh}, std::pair{"d_router", &r.d_router},
          std::pair{"dw1", &r.dw1}, std::pair{"dw2", &r.dw2}, std::pair{"info", &r.info}}) {
      result.add(r.group.rank(), what, *x);
    }
    if (!p.b1.empty()) result.add(r.group.rank(), "db1", r.db1);
    if (!p.b2.empty()) result.add(r.group.rank(), "db2", r.db2);
  });
}

void expect_same_bits(const Problem& p, const StepOptions& options) {
  Stored copies, maps;
  step_of(p, RowLayout::kExpert, options, copies);
  step_of(p, RowLayout::kRank, options, maps);
  for (const auto& [what, bytes] : copies.bytes) EXPECT_EQ(maps.bytes.at(what), bytes) << what;
}

TEST(SlotMaps, RowsReadThroughMapsGiveTheBitsOfCopies) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const Reduction reduction : {Reduction::kRank, Reduction::kRankFp32, Reduction::kToken}) {
      Problem p = make_problem(small_config(dtype, reduction), 24);
      p.mask[3] = p.mask[4] = 0;
      p.addend = stored(DType::kFloat32, random_values(p.h.size(), 8));
      p.dh_addend = stored(dtype, random_values(p.h.size(), 9));
      for (const StepOptions& options : std::initializer_list<StepOptions>{
               {}, {.recompute = true}, {.delay = true}, {.recompute = true, .delay = true}}) {
        SCOPED_TRACE(text("{}, reduction {}, recompute {}, delay {}", name(dtype), int(reduction),
                          options.recompute, options.delay));
        expect_same_bits(p, options);
      }
      expect_same_bits(p, {.own = true});
      expect_same_bits(p, {.recompute = true, .copies = RowCopies{true, true, true}, .own = true});
      // Products that read copies for themselves, as Hopper's may.
      for (const RowCopies& copies : {RowCopies{true, false, false}, RowCopies{false, true, false},
                                      RowCopies{false, false, true}, RowCopies{true, true, true}}) {
        expect_same_bits(p, {.copies = copies});
        expect_same_bits(p, {.recompute = true, .delay = true, .copies = copies});
      }
      p.config.alignment = 16;
      p.b1 = stored(dtype, random_values(p.experts() * 2 * p.config.ffn, 6));
      p.b2 = stored(dtype, random_values(p.experts() * p.config.model, 7));
      expect_same_bits(p, {});
      p.config.overflow = OverflowPolicy::kDrop;
      for (const int64_t capacity : {0, 16, 32, 64}) {
        expect_same_bits(p, {.capacity = capacity});
        expect_same_bits(p, {.capacity = capacity, .copies = RowCopies{true, true, true}});
      }
      std::fill(p.mask.begin(), p.mask.end(), 0);
      expect_same_bits(p, {});
    }
  }
}

// From forward to backward: the hidden activation, the maps and the routing; h is the caller's.
TEST(SlotMaps, ALayerKeepsItsHiddenActivationAndMaps) {
  MoeConfig config = small_config(DType::kBFloat16, Reduction::kRank);
  config.layout = RowLayout::kRank;
  const Problem p = make_problem(config, 24);
  on_ranks(p, layouts()[0], [&](Rank& r) {
    const auto aligned = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t capacity = r.ample(), tokens = r.h.view().size(0), topk = config.router.top_k,
                  pairs = tokens * topk;
    ASSERT_EQ(capacity, pairs);
    PrepareArgs args;
    args.idx_TK = TensorView(nullptr, DType::kInt32, {tokens, topk});
    args.capacity = capacity;
    const int64_t routing = aligned(plan_bytes(r.group.map(), r.group.limits(), args)) +
                            aligned(tokens * config.router.experts * 4) + aligned(pairs * 4);
    const int64_t before = r.arena.in_use();
    r.forward(capacity);
    EXPECT_EQ(r.arena.in_use() - before,
              routing + 2 * aligned(pairs * 4) + aligned(4 * pairs * config.ffn));
  });
}

// A rank without tokens among others, masked tokens, drops, and every order of sums.
TEST(SlotMaps, RowsThatCameOnceGiveTheBitsOfCopies) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const Reduction reduction : {Reduction::kRank, Reduction::kRankFp32, Reduction::kToken}) {
      for (const size_t ranks : {1, 2, 3}) {
        SCOPED_TRACE(
            text("{}, reduction {}, {}", name(dtype), int(reduction), layouts()[ranks].name));
        Problem p = make_problem(small_config(dtype, reduction), 24);
        p.mask[3] = p.mask[4] = 0;
        p.addend = stored(DType::kFloat32, random_values(p.h.size(), 8));
        p.dh_addend = stored(dtype, random_values(p.h.size(), 9));
        expect_same_bits(p, {.ranks = ranks});
        expect_same_bits(p, {.recompute = true, .delay = true, .ranks = ranks});
        p.config.alignment = 16;
        p.b1 = stored(dtype, random_values(p.experts() * 2 * p.config.ffn, 6));
        p.b2 = stored(dtype, random_values(p.experts() * p.config.model, 7));
        expect_same_bits(p, {.ranks = ranks});
        p.config.overflow = OverflowPolicy::kDrop;
        for (const int64_t capacity : {0, 16, 32}) {
          expect_same_bits(p, {.capacity = capacity, .ranks = ranks});
        }
        std::fill(p.mask.begin(), p.mask.end(), 0);
        expect_same_bits(p, {.ranks = ranks});
      }
    }
  }
}

// Formats whose scales belong to a row, to a tensor, and to blocks beside exact factors.
TEST(SlotMaps, QuantizedRowsReadThroughMapsGiveTheBitsOfCopies) {
  QuantSpec exact = QuantSpec::of(Format::kFp8Block1x128);
  exact.pow2_scales = false;
  const QuantSpec tiles = QuantSpec::of(Format::kFp8Block128x128),
                  mxfp8 = QuantSpec::of(Format::kMxfp8), nvfp4 = QuantSpec::of(Format::kNvfp4);
  QuantSpec exact_tiles = tiles;
  exact_tiles.pow2_scales = false;
  MoeConfig config = small_config(DType::kBFloat16, Reduction::kRank);
  config.model = 160;
  config.ffn = 48;
  const Problem p = make_problem(config, 24);
  for (const auto& [weight, input] :
       {std::pair{exact_tiles, exact}, std::pair{mxfp8, mxfp8}, std::pair{nvfp4, nvfp4}}) {
    const gemm::Recipe recipe{weight, input, input};
    for (const std::optional<QuantSpec>& dispatch :
         {std::optional<QuantSpec>{}, std::optional(exact), std::optional(mxfp8)}) {
      SCOPED_TRACE(text("{}, rows as {}", name(input.format),
                        dispatch ? name(dispatch->format) : "bfloat16"));
      expect_same_bits(p, {.dispatch = dispatch, .recipe = &recipe});
      expect_same_bits(p,
                       {.recompute = true, .delay = true, .dispatch = dispatch, .recipe = &recipe});
      expect_same_bits(p, {.dispatch = dispatch, .recipe = &recipe, .ranks = 1});
      expect_same_bits(p, {.recompute = true, .dispatch = dispatch, .recipe = &recipe, .ranks = 3});
    }
  }
  expect_same_bits(p, {.dispatch = mxfp8});
  expect_same_bits(p, {.dispatch = mxfp8, .ranks = 2});
}

// docs/spec/grouped.md: X is the caller's, of the rest the hidden activation and the maps are kept.
TEST(SlotMaps, KeepTheHiddenActivationAndMapsAlone) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool relu : {false, true}) {
      MoeConfig config = small_config(dtype, Reduction::kRank);
      if (relu) config.activation = gemm::squared_relu();
      const Problem p = make_problem(config, 24);
      on_ranks(p, layouts()[0], [&](Rank& r) {
        EXPECT_EQ(r.layer.layout(), RowLayout::kRank);
        const int64_t t = r.tokens, k = config.router.top_k, rows = t * k, item = bits(dtype) / 8;
        const TensorView idx(nullptr, DType::kInt32, {t, k});
        const int64_t routing = padded_bytes(plan_bytes(r.group.map(), r.group.limits(),
                                                        {.idx_TK = idx, .capacity = rows})) +
                                padded_bytes(4 * t * k) + padded_bytes(4 * t * p.experts());
        const int64_t maps = 2 * padded_bytes(4 * rows);
        const int64_t hidden = (relu ? 1 : 2) * rows * config.ffn * item;
        r.w1 = Tensor(dtype, {r.local, config.activation.hidden(config.ffn), config.model});
        r.forward(rows);
        EXPECT_EQ(r.arena.in_use(), routing + maps + padded_bytes(hidden));
      });
    }
  }
}

// Several ranks keep each row that came once, at most R T of them or as many as there are slots; the
// rest is the same.
TEST(SlotMaps, KeepEachRowThatCameOnce) {
  MoeConfig config = small_config(DType::kBFloat16, Reduction::kRank);
  config.layout = RowLayout::kRank;
  config.router.top_k = 4;
  const Problem p = make_problem(config, 24);
  for (const bool few : {false, true}) {
    on_ranks(p, layouts()[1], [&](Rank& r) {
      const int64_t t = r.tokens, most = r.group.limits().tokens, k = config.router.top_k;
      const int64_t capacity = few ? most : 2 * most * 3;
      const TensorView idx(nullptr, DType::kInt32, {t, k});
      const int64_t routing = padded_bytes(plan_bytes(r.group.map(), r.group.limits(),
                                                      {.idx_TK = idx, .capacity = capacity})) +
                              padded_bytes(4 * t * k) + padded_bytes(4 * t * p.experts());
      const int64_t rows = few ? most : 2 * most;
      EXPECT_EQ(mapped_rows(2, most, capacity), rows);
      r.config.overflow = OverflowPolicy::kDrop;
      r.forward(capacity);
      EXPECT_EQ(r.arena.in_use(), routing + 2 * padded_bytes(4 * capacity) +
                                      padded_bytes(2 * rows * config.model) +
                                      padded_bytes(2 * capacity * 2 * config.ffn));
    });
  }
}

TEST(RowLayout, IsAPureChoice) {
  EXPECT_EQ(choose_row_layout(RowLayout::kAuto, 1), RowLayout::kRank);
  EXPECT_EQ(choose_row_layout(RowLayout::kAuto, 2), RowLayout::kExpert);
  EXPECT_EQ(choose_row_layout(RowLayout::kExpert, 1), RowLayout::kExpert);
  EXPECT_EQ(choose_row_layout(RowLayout::kRank, 1), RowLayout::kRank);
  EXPECT_EQ(choose_row_layout(RowLayout::kRank, 4), RowLayout::kRank);
  EXPECT_EQ(name(RowLayout::kAuto), "auto");
  // Copies for single products are Hopper's alone.
  using gemm::MlpPath;
  for (const MlpPath path : {MlpPath::kReference, MlpPath::kCpu, MlpPath::kCudaPlain}) {
    const RowCopies none = choose_row_copies(path, 1 << 14, 1 << 20, 1 << 21);
    EXPECT_FALSE(none.forward || none.gradient || none.weight_gradient);
  }
  for (const MlpPath path : {MlpPath::kSm90, MlpPath::kSm90Fused}) {
    const auto copied = [&](int64_t model, int64_t ffn) {
      const RowCopies c = choose_row_copies(path, model, ffn, 2 * ffn);
      return std::array{c.forward, c.gradient, c.weight_gradient};
    };
    EXPECT_EQ(copied(2048, 768), (std::array{false, false, false}));
    EXPECT_EQ(copied(2880, 2880), (std::array{false, true, true}));
    EXPECT_EQ(copied(4096, 2048), (std::array{false, false, false}));
    EXPECT_EQ(copied(7168, 2048), (std::array{false, false, true}));
    EXPECT_EQ(copied(4096, 14336), (std::array{true, true, true}));
  }
}

TEST(SlotMaps, AreThePlansInverse) {
  MoeConfig config = small_config(DType::kFloat32, Reduction::kRank);
  config.alignment = 8;
  const Problem p = make_problem(config, 24);
  on_ranks(p, layouts()[0], [&](Rank& r) {
    r.forward(r.ample());
    const EpPlan& plan = r.saved.plan;
    const int64_t k = plan.topk;
    std::vector<int32_t> source(plan.capacity, -1);
    for (int64_t i = 0; i < plan.tokens * k; ++i) {
      const int32_t slot = plan.slot_TK.data<int32_t>()[i];
      if (slot >= 0) source[slot] = static_cast<int32_t>(i / k);
    }
    for (int64_t slot = 0; slot < plan.capacity; ++slot) {
      EXPECT_EQ(r.saved.rows.source_C.data<int32_t>()[slot], source[slot]) << slot;
      const float w = r.saved.rows.slot_w.data<float>()[slot];
      EXPECT_TRUE(source[slot] >= 0 || w == 0) << slot;
    }
    const Tensor w(DType::kFloat32, {3, 3}), c(DType::kInt32, {4}), f(DType::kFloat32, {4});
    EXPECT_NE(error_of([&] {
                make_slot_maps(plan, w, {c, f}, {});
              }).find("slot_maps: w_TK is"),
              std::string::npos);
  });
}

struct ExpertRowsCase {
  std::string name;
  int64_t experts, topk;
  std::vector<int64_t> idx;
};

// Every array of one call, from an idx of either type.
struct RowsOf {
  Tensor idx, w, count, source, row, slot_w;

  RowsOf(const ExpertRowsCase& c, DType dtype)
      : idx(dtype, {std::ssize(c.idx) / c.topk, c.topk}),
        w(DType::kFloat32, {std::ssize(c.idx) / c.topk, c.topk}),
        count(DType::kInt64, {c.experts}),
        source(DType::kInt32, {std::ssize(c.idx)}),
        row(DType::kInt32, {std::ssize(c.idx) / c.topk, c.topk}),
        slot_w(DType::kFloat32, {std::ssize(c.idx)}) {
    for (size_t i = 0; i < c.idx.size(); ++i) {
      if (dtype == DType::kInt64) {
        idx.data<int64_t>()[i] = c.idx[i];
      } else {
        idx.data<int32_t>()[i] = static_cast<int32_t>(c.idx[i]);
      }
      w.data<float>()[i] = 0.5f + static_cast<float>(i);
      source.data<int32_t>()[i] = row.data<int32_t>()[i] = 12345;
      slot_w.data<float>()[i] = 12345;
    }
    expert_rows({idx, w, count, source, row, slot_w}, {});
  }
};

TEST(ExpertRows, ComeInTheOrderOfExpertsThenPairs) {
  const std::vector<ExpertRowsCase> cases = {
      {"random", 4, 2, {3, 0, 1, 3, 0, 1, 3, 2}}, {"empty_expert", 4, 1, {3, 0, 3}},
      {"all_to_one", 3, 1, {1, 1, 1, 1}},         {"one_token", 5, 3, {4, 0, 2}},
      {"every_expert", 3, 3, {2, 1, 0, 0, 1, 2}}, {"masked", 3, 2, {-1, -1, 2, 0, 3, 7}},
      {"twice_the_same", 2, 2, {1, 1, 0, 1}},     {"no_tokens", 3, 2, {}},
      {"one_expert", 1, 1, {0, 0, -1}},
  };
  for (const ExpertRowsCase& c : cases) {
    for (const DType dtype : {DType::kInt32, DType::kInt64}) {
      SCOPED_TRACE(c.name);
      const RowsOf got(c, dtype);
      int64_t r = 0;
      for (int64_t e = 0; e < c.experts; ++e) {
        const int64_t first = r;
        for (size_t pair = 0; pair < c.idx.size(); ++pair) {
          if (c.idx[pair] != e) continue;
          EXPECT_EQ(got.source.data<int32_t>()[r], int64_t(pair) / c.topk);
          EXPECT_EQ(got.row.data<int32_t>()[pair], r);
          EXPECT_EQ(got.slot_w.data<float>()[r], got.w.data<float>()[pair]);
          ++r;
        }
        EXPECT_EQ(got.count.data<int64_t>()[e], r - first);
      }
      for (size_t pair = 0; pair < c.idx.size(); ++pair) {
        const bool valid = c.idx[pair] >= 0 && c.idx[pair] < c.experts;
        EXPECT_EQ(got.row.data<int32_t>()[pair] == -1, !valid);
      }
      for (; r < std::ssize(c.idx); ++r) {
        EXPECT_EQ(got.source.data<int32_t>()[r], -1);
        EXPECT_EQ(got.slot_w.data<float>()[r], 0);
      }
    }
  }
}

TEST(ExpertRows, AreThoseOfAPlanOfOneRank) {
  const Problem p = make_problem(small_config(DType::kFloat32, Reduction::kRank), 24);
  on_ranks(p, layouts()[0], [&](Rank& r) {
    r.forward(r.ample());
    const EpPlan& plan = r.saved.plan;
    const TensorView idx = r.saved.idx_TK;
    const int64_t pairs = idx.numel();
    const Tensor count(DType::kInt64, {p.experts()}), source(DType::kInt32, {pairs}),
        row(DType::kInt32, {idx.size(0), idx.size(1)});
    expert_rows({.idx_TK = idx, .count_E = count, .source_R = source, .row_TK = row}, {});
    EXPECT_TRUE(same_bits(count, plan.rows_real));
    EXPECT_TRUE(same_bits(row, plan.slot_TK));
    for (int64_t i = 0; i < std::min(pairs, plan.capacity); ++i) {
      EXPECT_EQ(source.data<int32_t>()[i], r.saved.rows.source_C.data<int32_t>()[i]) << i;
    }
  });
}

TEST(ExpertRows, NameTheArgument) {
  const Tensor idx(DType::kFloat32, {2, 1}), count(DType::kInt64, {3}), rows(DType::kInt32, {2});
  EXPECT_NE(error_of([&] {
              expert_rows({.idx_TK = idx, .count_E = count, .source_R = rows, .row_TK = rows}, {});
            }).find("expert_rows: idx_TK is"),
            std::string::npos);
  const Tensor good(DType::kInt32, {2, 1}), short_row(DType::kInt32, {1, 1});
  EXPECT_NE(error_of([&] {
              expert_rows({.idx_TK = good, .count_E = count, .source_R = rows, .row_TK = short_row},
                          {});
            }).find("expert_rows: row_TK is int32[1, 1]"),
            std::string::npos);
}

}  // namespace
}  // namespace moiety::moe
