// The grouped linear as an object: the bits of single operations, jobs that wait, targets that count.
#include "moiety/gemm/grouped_linear.h"

#include <gtest/gtest.h>

#include "tests/gemm/quantized_cases.h"
#include "tests/support/bits.h"
#include "tests/support/error_of.h"

namespace moiety::gemm {
namespace {

constexpr int64_t kIn = 24, kOut = 40;

// A micro-batch over groups of its own.
struct Batch {
  Batch(const GroupCase& c, DType dtype, uint32_t seed)
      : groups(c),
        x(dtype, {groups.capacity(), kIn}),
        dy(dtype, {groups.capacity(), kOut}),
        prob(DType::kFloat32, {groups.capacity()}),
        y(dtype, {groups.capacity(), kOut}),
        dx(dtype, {groups.capacity(), kIn}),
        dprob(DType::kFloat32, {groups.capacity()}) {
    for (const Tensor* t : {&x, &dy, &prob}) fill_normal(*t, ++seed);
    for (const Tensor* t : {&y, &dx, &dprob}) fill(*t, kSentinel);
  }
  GroupedLinear::Backward backward() const {
    return {.groups = groups(), .dy = {dy}, .x = {x}, .prob_R = prob, .dx = dx, .dprob_R = dprob};
  }
  TestGroups groups;
  Tensor x, dy, prob, y, dx, dprob;
};

// Three micro-batches with empty groups in each place; gradients in main_grad's dtype.
struct Problem {
  explicit Problem(DType dtype, DType grad = DType::kFloat32)
      : w(dtype, {3, kOut, kIn}),
        b(dtype, {3, kOut}),
        dw(grad, {3, kOut, kIn}),
        db(grad, {3, kOut}) {
    fill_normal(w, 1);
    fill_normal(b, 2);
    fill(dw, NAN);
    fill(db, NAN);
    const std::vector<GroupCase> all = group_cases();
    for (uint32_t m = 0; m < 3; ++m) batches.emplace_back(all[m + 1], dtype, 10 * (m + 1));
  }
  void aim(GroupedLinear& linear, int batch) const {
    linear.weight_target().into = {dw.view(), {batch == 0 ? 0.0f : 1.0f, {}}};
    linear.bias_target().grad_EN = db;
    linear.bias_target().beta.value = batch == 0 ? 0.0f : 1.0f;
  }
  std::string bits() const {
    std::string all = bytes_of(dw) + bytes_of(db);
    for (const Batch& m : batches) all += bytes_of(m.y) + bytes_of(m.dx) + bytes_of(m.dprob);
    return all;
  }
  Tensor w, b, dw, db;
  std::vector<Batch> batches;
};

// The same by the operations alone.
std::string bits_of_operations(const Problem& p) {
  for (size_t m = 0; m < p.batches.size(); ++m) {
    const Batch& t = p.batches[m];
    const GroupScalar beta{m == 0 ? 0.0f : 1.0f, {}};
    grouped_gemm({.op = GroupedOp::kForward,
                  .groups = t.groups(),
                  .a = {t.x},
                  .w = p.w.view(),
                  .out = t.y,
                  .bias_EN = p.b,
                  .bias_scale_R = t.prob},
                 {});
    grouped_gemm(
        {.op = GroupedOp::kDgrad, .groups = t.groups(), .a = {t.dy}, .w = p.w.view(), .out = t.dx},
        {});
    grouped_gemm({.op = GroupedOp::kWgrad,
                  .groups = t.groups(),
                  .a = {t.dy},
                  .b = {t.x},
                  .w = p.dw.view(),
                  .beta = beta},
                 {});
    grouped_bias_grad(
        {.groups = t.groups(), .dy = {t.dy}, .scale_R = t.prob, .dbias_EN = p.db, .beta = beta},
        {});
    grouped_scale_grad({.groups = t.groups(), .dy = {t.dy}, .bias_EN = p.b, .dscale_R = t.dprob},
                       {});
  }
  return p.bits();
}

// Weight gradients wait for so many micro-batches; on a stream of their own, if asked.
std::string bits_of_object(const Problem& p, int64_t wait, const Stream& stream) {
  GroupedLinear linear("fc1", p.w.view(), p.b);
  const auto run_oldest = [&](int batch) {
    p.aim(linear, batch);
    linear.backward_weights(stream);
  };
  int done = 0;
  for (size_t m = 0; m < p.batches.size(); ++m) {
    const Batch& t = p.batches[m];
    linear.forward({.groups = t.groups(), .x = {t.x}, .prob_R = t.prob, .y = t.y}, {});
    p.aim(linear, int(m));
    linear.backward_data(t.backward(), {});
    EXPECT_EQ(linear.bias_target().contributions, int64_t(m) + 1);
    EXPECT_TRUE(linear.bias_target().ready.complete());
    if (linear.pending() > wait) run_oldest(done++);
    EXPECT_EQ(linear.pending(), std::min<int64_t>(int64_t(m) + 1, wait));
  }
  while (linear.pending() > 0) run_oldest(done++);
  EXPECT_EQ(linear.weight_target().contributions, 3);
  linear.weight_target().ready.wait();
  EXPECT_TRUE(linear.weight_target().ready.complete());
  linear.check_idle("optimizer step");
  return p.bits();
}

TEST(GroupedLinear, HasTheBitsOfTheOperationsHoweverLongGradientsWait) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const DType grad : {DType::kFloat32, DType::kBFloat16}) {
      if (dtype == DType::kFloat32 && grad == DType::kBFloat16) continue;
      const std::string expected = bits_of_operations(Problem(dtype, grad));
      for (const int64_t wait : {0, 1, 2, 3}) {
        EXPECT_EQ(bits_of_object(Problem(dtype, grad), wait, {}), expected) << wait;
        EXPECT_EQ(bits_of_object(Problem(dtype, grad), wait, Stream::deferred()), expected) << wait;
      }
    }
  }
}

// `ready` is behind the writes: nothing is there before somebody waits for it.
TEST(GroupedLinear, ReadyIsBehindTheWrites) {
  const Problem p(DType::kFloat32);
  const Stream later = Stream::deferred();
  GroupedLinear linear("fc1", p.w.view(), p.b);
  p.aim(linear, 0);
  linear.backward_data(p.batches[0].backward(), {});
  linear.backward_weights(later);
  EXPECT_FALSE(linear.weight_target().ready.complete());
  EXPECT_TRUE(std::isnan(get(p.dw, 0)));
  linear.weight_target().ready.wait();
  EXPECT_FALSE(std::isnan(get(p.dw, 0)));
  EXPECT_EQ(get(p.dw, 0), 0);  // its group is empty: written all the same
}

TEST(GroupedLinear, ComputesWhatIsWanted) {
  const Problem p(DType::kFloat32);
  const Batch& t = p.batches[1];
  const auto memory = std::make_shared<int>(0);
  for (int bits = 0; bits < 16; ++bits) {
    const LinearNeeds needs{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
    for (const Tensor* x : {&t.dx, &t.dprob, &p.dw, &p.db}) fill(*x, kSentinel);
    GroupedLinear linear("fc1", p.w.view(), p.b, needs);
    EXPECT_EQ(linear.keeps_x(), needs.dw);
    if (needs.dw) linear.weight_target().into.grad = p.dw.view();
    if (needs.db) linear.bias_target().grad_EN = p.db;
    GroupedLinear::Backward a = t.backward();
    if (!needs.dx) a.dx = {};
    if (!needs.dw) a.x = {};
    if (!needs.dprob) a.dprob_R = {};
    a.memory = memory;
    linear.backward_data(a, {});
    a.memory.reset();
    EXPECT_EQ(linear.pending(), needs.dw ? 1 : 0);
    EXPECT_EQ(memory.use_count(), needs.dw ? 2 : 1);
    if (needs.dw) linear.backward_weights({});
    EXPECT_EQ(memory.use_count(), 1);
    const auto is_written = [](const Tensor& x) {
      for (int64_t i = 0; i < x.view().numel(); ++i) {
        if (get(x, i) != kSentinel) return true;
      }
      return false;
    };
    EXPECT_EQ(is_written(t.dx), needs.dx);
    EXPECT_EQ(is_written(p.dw), needs.dw);
    EXPECT_EQ(is_written(p.db), needs.db);
    EXPECT_EQ(is_written(t.dprob), needs.dprob);
    EXPECT_EQ(linear.weight_target().contributions, needs.dw ? 1 : 0);
    EXPECT_EQ(linear.bias_target().contributions, needs.db ? 1 : 0);
  }
}

TEST(GroupedLinear, NamesItselfInErrors) {
  const Problem p(DType::kFloat32);
  GroupedLinear linear("layers.3.fc1", p.w.view());
  EXPECT_EQ(error_of([&] { linear.backward_weights({}); }, ErrorKind::kInvalidArgument),
            "grouped linear layers.3.fc1: no weight gradient waits");
  GroupedLinear::Backward a = p.batches[0].backward();
  a.prob_R = a.dprob_R = {};
  EXPECT_EQ(error_of([&] { linear.backward_data(a, {}); }, ErrorKind::kInvalidArgument),
            "grouped linear layers.3.fc1: the weight's gradient has no target");
  linear.weight_target().into.grad = p.dw.view();
  a.x = {};
  EXPECT_EQ(error_of([&] { linear.backward_data(a, {}); }, ErrorKind::kInvalidArgument),
            "grouped linear layers.3.fc1: backward without x, which the weight's gradient reads");
  a.x = {p.batches[0].x};
  linear.backward_data(a, {});
  linear.backward_data(a, {});
  EXPECT_EQ(error_of([&] { linear.check_idle("optimizer step"); }, ErrorKind::kInvalidArgument),
            "optimizer step: 2 weight gradients of grouped linear layers.3.fc1 wait");
  linear.backward_weights({});
  linear.backward_weights({});
  linear.check_idle("optimizer step");
  EXPECT_EQ(error_of([&] { GroupedLinear("fc2", GroupedWeight()); }, ErrorKind::kInvalidArgument),
            "grouped linear fc2: there is no weight");
}

class QuantizedGroupedLinear : public testing::TestWithParam<RecipeCase> {};
INSTANTIATE_TEST_SUITE_P(All, QuantizedGroupedLinear, testing::ValuesIn(recipe_cases()),
                         [](const auto& info) { return info.param.name; });

// With a recipe it has the bits of the operations, however long gradients wait, and though x is gone
// by then: its column codes are all that stays.
TEST_P(QuantizedGroupedLinear, HasTheBitsOfTheOperationsWithoutX) {
  static const quant::RngState rng{7, 3};
  const Recipe& recipe = GetParam().recipe;
  const Problem ours(DType::kBFloat16), theirs(DType::kBFloat16);
  const int64_t n = std::ssize(ours.batches);
  const auto bits_of = [&](int64_t m) { return RandomBits{&rng, uint32_t(m + 1)}; };
  Arena arena("temporaries"), codes("codes");
  const QuantizedLinear weights{&recipe, {{}, ours.w}};
  GroupedLinear linear("fc1", weights, ours.b);
  EXPECT_FALSE(linear.keeps_x());
  EXPECT_TRUE(linear.keeps_columns());
  int64_t kept = 0;
  for (int64_t m = 0; m < n; ++m) {
    const Batch& t = ours.batches[m];
    const QuantizedView columns =
        allocate_columns(recipe.input, t.groups.capacity(), kIn, t.groups.experts(), codes);
    kept += column_bytes(recipe.input, t.groups.capacity(), kIn, t.groups.experts());
    linear.forward({.groups = t.groups(),
                    .x = {t.x},
                    .prob_R = t.prob,
                    .y = t.y,
                    .arena = &arena,
                    .columns = columns},
                   {});
    fill(t.x, NAN);
    GroupedLinear::Backward a = t.backward();
    a.x = {};
    a.arena = &arena;
    a.columns = columns;
    a.gradient_bits = bits_of(m);
    ours.aim(linear, int(m));
    linear.backward_data(a, {});
  }
  EXPECT_EQ(codes.peak(), kept);
  for (int64_t m = 0; m < n; ++m) {
    ours.aim(linear, int(m));
    linear.backward_weights({}, &arena);
  }
  linear.check_idle("optimizer step");
  for (int64_t m = 0; m < n; ++m) {
    const Batch& t = theirs.batches[m];
    const GroupScalar beta{m == 0 ? 0.0f : 1.0f, {}};
    const QuantizedLinear plain{&recipe, {{}, theirs.w}, bits_of(m)};
    quantized_grouped_forward(plain, t.groups(), {t.x}, t.y, theirs.b, t.prob, arena, {});
    quantized_grouped_input_gradient(plain, t.groups(), {t.dy}, t.dx, arena, {});
    quantized_grouped_weight_gradient(plain, t.groups(), {t.dy}, {t.x}, theirs.dw.view(), beta,
                                      arena, {});
    grouped_bias_grad({.groups = t.groups(),
                       .dy = {t.dy},
                       .scale_R = t.prob,
                       .dbias_EN = theirs.db,
                       .beta = beta},
                      {});
    grouped_scale_grad(
        {.groups = t.groups(), .dy = {t.dy}, .bias_EN = theirs.b, .dscale_R = t.dprob}, {});
  }
  EXPECT_EQ(ours.bits(), theirs.bits());
}

TEST(QuantizedGroupedLinearErrors, NameWhatIsMissing) {
  const Recipe recipe = recipe_cases()[3].recipe;
  const Problem p(DType::kBFloat16);
  const Batch& t = p.batches[1];
  GroupedLinear linear("fc1", QuantizedLinear{&recipe, {{}, p.w}});
  GroupedLinear::Forward a{.groups = t.groups(), .x = {t.x}, .y = t.y};
  const auto error = [&](const auto& call) { return error_of(call, ErrorKind::kInvalidArgument); };
  EXPECT_EQ(error([&] { linear.forward(a, {}); }),
            "grouped linear fc1: products of quantized operands need an arena");
  Arena arena("test");
  a.arena = &arena;
  EXPECT_EQ(error([&] { linear.forward(a, {}); }),
            "grouped linear fc1: forward has no place for x's columns, which the weight's gradient "
            "reads");
  linear.weight_target().into.grad = p.dw.view();
  EXPECT_EQ(
      error([&] { linear.backward_data({.groups = t.groups(), .dy = {t.dy}, .dx = t.dx}, {}); }),
      "grouped linear fc1: backward without x's columns, which the weight's gradient reads");
  EXPECT_EQ(error([&] { GroupedLinear("fc2", QuantizedLinear()); }),
            "grouped linear fc2: there is no recipe");
}

// Without experts, or without rows, a contribution is one all the same.
TEST(GroupedLinear, CountsContributionsOfNothing) {
  for (const GroupCase& c : group_cases()) {
    if (c.name != "experts0" && c.name != "rows0" && c.name != "empty_all") continue;
    SCOPED_TRACE(c.name);
    const Batch t(c, DType::kFloat32, 5);
    const Tensor w(DType::kFloat32, {t.groups.experts(), kOut, kIn}),
        dw(DType::kFloat32, {t.groups.experts(), kOut, kIn});
    fill(dw, NAN);
    GroupedLinear linear("fc1", w.view());
    linear.weight_target().into.grad = dw.view();
    linear.backward_data({.groups = t.groups(), .dy = {t.dy}, .x = {t.x}, .dx = t.dx}, {});
    linear.backward_weights({});
    EXPECT_EQ(linear.weight_target().contributions, 1);
    EXPECT_TRUE(linear.weight_target().ready.complete());
    for (int64_t i = 0; i < dw.view().numel(); ++i) ASSERT_EQ(get(dw, i), 0);
  }
}

}  // namespace
}  // namespace moiety::gemm
