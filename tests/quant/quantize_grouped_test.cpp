// quantize_grouped = quantize of the rows of each group, with gaps and tails full of NaN, and the
// fast path against the reference.
#include "moiety/base/parallel.h"
#include "moiety/quant/quantize.h"
#include "moiety/quant/quantize/quantize_job.h"
#include "tests/quant/grouped_cases.h"

namespace moiety::quant {
namespace {

const uint8_t* row_of(const TensorView& x, int64_t r) {
  return static_cast<const uint8_t*>(x.raw()) + byte_size(x.dtype(), r * x.size(1));
}

// `part` is what a group's columns [c0, ...) of `whole` [rows, P] hold, then zeros to `width`.
void expect_columns(const TensorView& whole, const TensorView& part, int64_t c0, int64_t width) {
  const int64_t unit = byte_size(whole.dtype(), 1), used = part.size(1);
  for (int64_t r = 0; r < part.size(0); ++r) {
    const uint8_t* at = row_of(whole, r) + c0 * unit;
    ASSERT_EQ(std::memcmp(at, row_of(part, r), static_cast<size_t>(used * unit)), 0) << r;
    for (int64_t i = used * unit; i < width * unit; ++i) ASSERT_EQ(at[i], 0) << r;
  }
}
void expect_rows(const TensorView& whole, const TensorView& part, int64_t r0, int64_t height) {
  for (int64_t r = 0; r < height; ++r) {
    const int64_t bytes = byte_size(whole.dtype(), whole.size(1));
    for (int64_t i = 0; i < bytes; ++i) {
      ASSERT_EQ(row_of(whole, r0 + r)[i], r < part.size(0) ? row_of(part, r)[i] : 0) << r;
    }
  }
}

// Group e of `all` against the same rows quantized alone.
void expect_group(const Problem& p, const Guarded& all, const Guarded& alone, int64_t e,
                  int64_t column) {
  const QuantizedView &g = all.view(), &a = alone.view();
  const Format format = g.spec.format;
  const int64_t n = p.rows(e), padded = (n + 127) / 128 * 128;
  if (a.row_data.defined()) expect_rows(g.row_data, a.row_data, p.first(e), n);
  if (a.row_scales.defined()) expect_rows(g.row_scales, a.row_scales, p.first(e), n);
  if (a.col_data.defined()) {
    const int64_t block = block_shape(format).cols;
    if (format == Format::kMxfp8) {
      expect_rows(g.col_data, a.col_data, column, padded);
      expect_rows(g.col_scales, a.col_scales, column / 32, padded / 32);
    } else {
      const int64_t pack = is_fp4(format) ? 2 : 1;
      expect_columns(g.col_data, a.col_data, column / pack, padded / pack);
      if (a.col_scales.defined()) {
        expect_columns(g.col_scales, a.col_scales, column / block, padded / block);
      }
    }
  }
  for (const auto& [whole, part] :
       {std::pair{&g.amax, &a.amax}, std::pair{&g.tensor_scale, &a.tensor_scale}}) {
    if (!part->defined()) continue;
    const float* w = whole->data<float>();
    const float* q = part->data<float>();
    if (g.spec.row_scaled) {
      if (n > 0) {
        EXPECT_EQ(std::memcmp(w + p.first(e), q, static_cast<size_t>(4 * n)), 0);
      }
      continue;
    }
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(std::memcmp(w + i * p.experts + e, q + i, 4), 0) << "slot " << i;
    }
  }
  EXPECT_EQ(all.flag(e), alone.flag());
}

class Grouped : public testing::TestWithParam<SpecCase> {};
std::vector<SpecCase> grouped_specs() {
  std::vector<SpecCase> out;
  for (const SpecCase& c : spec_cases()) {
    if (!is_tile(c.spec.format)) out.push_back(c);
  }
  return out;
}
INSTANTIATE_TEST_SUITE_P(All, Grouped, testing::ValuesIn(grouped_specs()),
                         [](const auto& info) { return info.param.name; });

TEST_P(Grouped, EqualsALoop) {
  const ThreadBudget budget(1);
  const QuantSpec& spec = GetParam().spec;
  size_t turn = 0;
  for (const Routing& routing : routings()) {
    SCOPED_TRACE(routing.name);
    const Problem p(routing);
    const Data data = turn % 3 == 1 ? Data::kRandomBits : Data::kNormal;
    const Tensor x = p.input(turn++ % 2 ? DType::kBFloat16 : DType::kFloat32, data);
    for (const Directions wanted : directions_of(spec)) {
      QuantizeOptions options = test_options();
      options.expert = 5;
      const Guarded all = p.output(spec, wanted, 0xA5);
      quantize_grouped(x, p.groups, all, options, Stream());
      ASSERT_TRUE(all.guards_intact());
      int64_t column = 0;
      for (int64_t e = 0; e < p.experts; ++e) {
        const Guarded alone(spec, p.rows(e), kCols, wanted, 0xA5);
        options.expert = 5 + static_cast<int32_t>(e);
        quantize(x.view().slice(0, p.first(e), p.first(e) + p.rows(e)), alone, options, Stream());
        SCOPED_TRACE(e);
        ASSERT_NO_FATAL_FAILURE(expect_group(p, all, alone, e, column));
        column += (p.rows(e) + 127) / 128 * 128;
      }
      EXPECT_LE(column, grouped_columns(p.capacity, p.experts));
    }
  }
}

// The same bytes everywhere: rows of no group and columns past the groups hold the poison still.
TEST_P(Grouped, FastPathEqualsReferenceAndLeavesDeadRowsAlone) {
  const QuantSpec& spec = GetParam().spec;
  for (const Routing& routing : routings()) {
    const Problem p(routing);
    const Tensor x = p.input(DType::kBFloat16, Data::kNormal);
    for (const Directions wanted : directions_of(spec)) {
      const Guarded fast = p.output(spec, wanted, 0xA5), slow = p.output(spec, wanted, 0xA5);
      quantize_grouped(x, p.groups, fast, test_options(), Stream());
      const QuantizeJob whole = make_grouped_job("test", x, p.groups, slow, test_options());
      for (const QuantizeJob& job : group_jobs(whole, p.groups)) quantize_reference(job);
      ASSERT_EQ(difference(fast, slow), "") << routing.name;
      if (!fast.view().row_data.defined()) continue;
      std::vector<bool> live(static_cast<size_t>(p.capacity));
      for (int64_t e = 0; e < p.experts; ++e) {
        for (int64_t r = 0; r < p.rows(e); ++r) live[static_cast<size_t>(p.first(e) + r)] = true;
      }
      for (int64_t r = 0; r < p.capacity; ++r) {
        for (int64_t i = 0; !live[static_cast<size_t>(r)] && i < fast.view().row_data.size(1);
             ++i) {
          ASSERT_EQ(row_of(fast.view().row_data, r)[i], 0xA5);
        }
      }
    }
  }
}

TEST(QuantizeGrouped, AmaxOfEachGroup) {
  const Problem p(routings()[5]);
  const Tensor x = p.input(DType::kFloat32, Data::kNormal);
  for (const bool rotate : {false, true}) {
    QuantSpec spec = QuantSpec::of(Format::kNvfp4);
    spec.rht_col = rotate;
    const Guarded measured = p.output(spec, {true, true}, 0xA5);
    const Guarded whole = p.output(spec, {true, true}, 0xA5);
    compute_amax_grouped(x, p.groups, measured, {}, Stream());
    quantize_grouped(x, p.groups, whole, {}, Stream());
    EXPECT_EQ(difference("amax", measured.view().amax, whole.view().amax), "");
    QuantizeOptions options;
    options.amax_given = true;
    quantize_grouped(x, p.groups, measured, options, Stream());
    EXPECT_EQ(difference("col_data", measured.view().col_data, whole.view().col_data), "");
  }
}

TEST(QuantizeGrouped, DelayedScalesOfEachGroup) {
  const Problem p(routings()[5]);
  const Tensor x = p.input(DType::kFloat32, Data::kNormal);
  Tensor scale(DType::kFloat32, {p.experts}), inverse(DType::kFloat32, {p.experts}),
      step(DType::kFloat32, {p.experts});
  for (int64_t e = 0; e < p.experts; ++e) {
    scale.data<float>()[e] = static_cast<float>(1 << e);
    inverse.data<float>()[e] = 1 / scale.data<float>()[e];
  }
  const DelayedScaling state{{}, {}, scale, inverse, step};
  QuantizeOptions options;
  options.delayed = &state;
  const QuantSpec spec = QuantSpec::of(Format::kFp8Tensor);
  const Guarded all = p.output(spec, {true, true}, 0xA5);
  quantize_grouped(x, p.groups, all, options, Stream());
  int64_t column = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    Tensor alone_step(DType::kFloat32, {1});
    const DelayedScaling alone_state{
        {}, {}, scale.view().slice(0, e, e + 1), inverse.view().slice(0, e, e + 1), alone_step};
    options.delayed = &alone_state;
    const Guarded alone(spec, p.rows(e), kCols, {true, true});
    quantize(x.view().slice(0, p.first(e), p.first(e) + p.rows(e)), alone, options, Stream());
    ASSERT_NO_FATAL_FAILURE(expect_group(p, all, alone, e, column));
    EXPECT_EQ(step.data<float>()[e], *alone_step.data<float>());
    column += (p.rows(e) + 127) / 128 * 128;
  }
}

TEST(QuantizeGrouped, FaultyGroupsAreEmptyAndRecorded) {
  Problem p({"", {40, 500, 3}, 0, 0});
  p.groups.capacity = p.capacity = 200;
  const Tensor x(DType::kBFloat16, {200, kCols});
  const Guarded out = p.output(QuantSpec::of(Format::kNvfp4), {true, true}, 0xA5);
  quantize_grouped(x, p.groups, out, {}, Stream());
  EXPECT_TRUE(out.guards_intact());
  EXPECT_EQ(out.view().tensor_scale.data<float>()[1], 1.0f);
  EXPECT_NE(kind_and_error_of([&] {
              throw_on_fault(p.status);
            }).find("quantize_grouped: group 1, value 500"),
            std::string::npos);
}

// Groups whose ranges overlap would ask for more columns than the outputs have.
TEST(QuantizeGrouped, OverlappingGroupsStayInBounds) {
  Problem p({"", {100, 0, 100, 0, 100}, 0, 0});
  for (int64_t e = 0; e <= 5; ++e) p.begin.data<int64_t>()[e] = e % 2 ? 100 : 0;
  p.groups.capacity = p.capacity = 100;
  for (const SpecCase& c : grouped_specs()) {
    if (c.spec.row_scaled) continue;
    const Tensor x(DType::kBFloat16, {100, kCols});
    const Guarded out = p.output(c.spec, {true, true}, 0xA5);
    quantize_grouped(x, p.groups, out, test_options(), Stream());
    EXPECT_TRUE(out.guards_intact()) << c.name;
    EXPECT_EQ(p.status.data<uint32_t>()[0], kFaultGroup);
  }
}

TEST(QuantizeGrouped, ErrorsNameOperationAndValue) {
  const Problem p(routings()[2]);
  const Tensor x = p.input(DType::kFloat32, Data::kNormal);
  EXPECT_NE(kind_and_error_of([&] {
              quantized_grouped_sizes(QuantSpec::of(Format::kNvfp4Tile16), 4, 4, 2, {});
            }).find("nvfp4_tile16 is for weights"),
            std::string::npos);
  const Guarded out = p.output(QuantSpec::of(Format::kNvfp4), {true, true}, 0xA5);
  QuantizeOptions options;
  options.row0 = 16;
  options.full_rows = 400;
  EXPECT_NE(kind_and_error_of([&] {
              quantize_grouped(x, p.groups, out, options, Stream());
            }).find("quantize_grouped: row0=16"),
            std::string::npos);
  RowGroups other = p.groups;
  other.capacity = 7;
  EXPECT_NE(kind_and_error_of([&] {
              quantize_grouped(x, other, out, {}, Stream());
            }).find("groups have a capacity of 7"),
            std::string::npos);
}

}  // namespace
}  // namespace moiety::quant
