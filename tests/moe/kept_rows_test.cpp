// With a recipe forward keeps the column codes of the rows that came, and not the rows: the bits of a
// layer that keeps rows, in the bytes of the formula; and the bytes of a layer without one.
#include "tests/moe/moe_layer_problem.h"
#include "tests/support/bits.h"

namespace moiety::moe {
namespace {

using namespace whole_layer;

constexpr int64_t kTokens = 600;

struct Case {
  Format format;
  RowLayout layout = RowLayout::kExpert;
  std::optional<Format> dispatch = {};
};

gemm::Recipe recipe_of(Format rows) {
  const Format weight = rows == Format::kFp8Block1x128 ? Format::kFp8Block128x128
                        : rows == Format::kNvfp4       ? Format::kNvfp4Tile16
                                                       : rows;
  gemm::Recipe recipe{QuantSpec::of(weight), QuantSpec::of(rows), QuantSpec::of(rows)};
  if (rows == Format::kNvfp4) recipe.input.rht_col = recipe.gradient.rht_col = true;
  return recipe;
}

// What a rank has after a step, and what forward left.
struct Outcome {
  std::string bits;
  int64_t kept = 0;
  bool has_columns = false, has_rows = false;
};

std::vector<Outcome> run(const Case& c, bool columns, int ranks) {
  MoeConfig config = small_config(DType::kBFloat16, Reduction::kRank);
  config.model = 144;
  config.ffn = 32;
  config.layout = c.layout;
  const Problem p = make_problem(config, kTokens);
  const Layout layout{"", std::vector<int64_t>(size_t(ranks), kTokens / ranks)};
  const gemm::Recipe recipe = recipe_of(c.format);
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
  on_ranks(p, layout, [&](Rank& rank) {
    rank.recipe = &recipe;
    if (columns) rank.layer.set_kept(recipe.input);
    if (c.dispatch) rank.layer.set_dispatch(QuantSpec::of(*c.dispatch));
    Outcome& out = outcomes[static_cast<size_t>(rank.world.rank())];
    const int64_t before = rank.arena.in_use();
    rank.forward(rank.layer.capacity_for(1.5, kTokens));
    out.kept = rank.arena.in_use() - before;
    out.has_columns = rank.saved.rows.columns.col_data.defined();
    out.has_rows = rank.saved.rows.rows_CD.defined();
    rank.backward();
    for (const Tensor* t : {&rank.out, &rank.dh, &rank.dw1, &rank.dw2, &rank.d_router}) {
      out.bits += bytes_of(*t);
    }
  });
  return outcomes;
}

TEST(KeptColumns, HaveTheBitsOfRowsAndTheBytesOfTheFormula) {
  using enum Format;
  const Case cases[] = {{kFp8Tensor},
                        {kFp8Block1x128},
                        {kMxfp8},
                        {kNvfp4},
                        {kNvfp4, RowLayout::kRank},
                        {kNvfp4, RowLayout::kRank, kMxfp8},
                        {kMxfp8, RowLayout::kExpert, kMxfp8},
                        {kFp8Block1x128, RowLayout::kExpert, kFp8Block1x128},
                        {kNvfp4, RowLayout::kExpert, kFp8Block1x128}};
  for (const Case& c : cases) {
    SCOPED_TRACE(text("{}, rows {}, dispatch {}", name(c.format), name(c.layout),
                      c.dispatch ? name(*c.dispatch) : "bf16"));
    const std::vector<Outcome> rows = run(c, false, 2), columns = run(c, true, 2);
    const int64_t experts = 3, capacity = kTokens * 2 / 2 * 3 / 2, model = 144;
    const int64_t came =
        c.layout == RowLayout::kRank ? mapped_rows(2, kTokens / 2, capacity) : capacity;
    const int64_t saved = padded_bytes(2 * came * model) -
                          gemm::column_bytes(recipe_of(c.format).input, capacity, model, experts);
    EXPECT_GT(saved, 0);
    for (size_t r = 0; r < 2; ++r) {
      EXPECT_TRUE(rows[r].has_rows);
      EXPECT_FALSE(rows[r].has_columns);
      EXPECT_FALSE(columns[r].has_rows);
      EXPECT_TRUE(columns[r].has_columns);
      EXPECT_EQ(columns[r].bits, rows[r].bits);
      EXPECT_EQ(rows[r].kept - columns[r].kept, saved);
    }
  }
}

// One rank reads its tokens where they lie, and few rows of many experts take less than their columns,
// which are padded.
TEST(KeptColumns, AreOnlyWhereTheyTakeLess) {
  for (const Outcome& o : run({Format::kMxfp8, RowLayout::kAuto}, true, 1)) {
    EXPECT_FALSE(o.has_columns);
    EXPECT_FALSE(o.has_rows);
  }
  const QuantSpec mxfp8 = QuantSpec::of(Format::kMxfp8);
  EXPECT_TRUE(keeps_columns(mxfp8, 4096, 256, 4, 4096));
  EXPECT_FALSE(keeps_columns(mxfp8, 256, 256, 64, 256));
  EXPECT_FALSE(keeps_columns(mxfp8, 4096, 256, 4, 1024));  // each row for four experts
}

int64_t tensor_bytes(int64_t n, int64_t item) { return padded_bytes(n * item); }

// What forward leaves of a layer, whatever the activation: routing, plan, hidden columns and the
// weights of slots; with maps these; rows that came, unless they are tokens in place or nobody wants
// the gradient of w1.
TEST(KeptBytes, AreThoseOfTheFormulaForEveryActivation) {
  const gemm::Activation activations[] = {gemm::swiglu(), gemm::clamped_swiglu(5),
                                          gemm::qgeglu(1.702f, 7, 1), gemm::squared_relu()};
  for (const gemm::Activation& activation : activations) {
    for (const RowLayout rows : {RowLayout::kExpert, RowLayout::kRank}) {
      for (const int ranks : {1, 2}) {
        for (const bool frozen_w1 : {false, true}) {
          MoeConfig config = small_config(DType::kBFloat16, Reduction::kRank);
          config.activation = activation;
          config.layout = rows;
          const Problem p = make_problem(config, 24);
          const Layout layout{"", std::vector<int64_t>(size_t(ranks), 24 / ranks)};
          on_ranks(p, layout, [&](Rank& rank) {
            const int64_t t = rank.tokens, d = config.model, f = config.ffn, k = 2;
            const int64_t hidden = activation.hidden(f), capacity = rank.ample();
            if (!activation.gated()) {
              rank.w1 = tensor_of(DType::kBFloat16, {rank.local, f, d}, p.w1);
            }
            rank.layer.forward({.weights = rank.weights(),
                                .h_TD = rank.h,
                                .mask_T = rank.mask,
                                .addend = {},
                                .capacity = capacity,
                                .out_TD = rank.out,
                                .stats = {rank.count, rank.sum},
                                .info = rank.info,
                                .frozen_w1 = frozen_w1},
                               &rank.saved, rank.arena, {});
            PrepareArgs args;
            args.idx_TK = rank.saved.idx_TK;
            args.capacity = capacity;
            const bool maps = rows == RowLayout::kRank, in_place = maps && ranks == 1;
            const int64_t came = maps ? mapped_rows(ranks, t, capacity) : capacity;
            const int64_t formula =
                padded_bytes(plan_bytes(rank.group.map(), rank.group.limits(), args)) +
                tensor_bytes(t * p.experts(), 4) + tensor_bytes(t * k, 4) +
                (in_place || frozen_w1 ? 0 : tensor_bytes(came * d, 2)) +
                (maps ? tensor_bytes(capacity, 4) : 0) + tensor_bytes(capacity, 4) +
                tensor_bytes(capacity * hidden, 2);
            EXPECT_EQ(rank.arena.in_use(), formula)
                << name(rows) << ", " << ranks << " ranks, frozen " << frozen_w1;
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace moiety::moe
