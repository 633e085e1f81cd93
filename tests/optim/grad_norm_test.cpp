#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"
#include "moiety/optim/grad_norm_table.h"

namespace moiety::optim {
namespace {

Tensor random_tensor(int64_t n) {
  Tensor x(DType::kFloat32, {n});
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t w = philox({5, 6}, {static_cast<uint32_t>(i), 0, 0, 0})[0];
    x.data<float>()[i] = std::ldexp(normal_from_word(w), static_cast<int>(w % 41) - 20);
  }
  return x;
}

GradStatistics run(void (*statistics)(const GradStatisticsTable&, TensorView, Stream),
                   const std::vector<GradSegment>& segments) {
  GradStatistics out{.sumsq = -1, .bad = 3, .bad_parameter = 4};
  statistics({segments, Device{}}, {&out, DType::kUInt8, {sizeof out}}, Stream());
  return out;
}

GradStatistics fast(const Tensor& x, const std::vector<ElementRun>& runs) {
  return run(grad_statistics, {{x, runs}});
}

GradStatistics reference(const Tensor& x, const std::vector<ElementRun>& runs) {
  return run(grad_statistics_reference, {{x, runs}});
}

void expect_equal(const GradStatistics& a, const GradStatistics& b) {
  const auto same = [](double x, double y) {
    return std::bit_cast<uint64_t>(x) == std::bit_cast<uint64_t>(y) ||
           (std::isnan(x) && std::isnan(y));
  };
  EXPECT_TRUE(same(a.sumsq, b.sumsq)) << a.sumsq << " " << b.sumsq;
  for (int c = 0; c < kParameterClasses; ++c) {
    EXPECT_TRUE(same(a.class_sumsq[c], b.class_sumsq[c])) << "class " << c;
  }
  EXPECT_EQ(a.bad, b.bad);
  EXPECT_EQ(a.bad_parameter, b.bad_parameter);
}

// Runs of all classes with gaps, some shorter than a block, some longer.
std::vector<ElementRun> mixed_runs(int64_t n) {
  std::vector<ElementRun> out;
  int64_t at = 0;
  for (int p = 0; at < n; ++p) {
    const uint32_t w = philox({7, 8}, {static_cast<uint32_t>(p), 0, 0, 0})[0];
    const int64_t length = p % 5 == 4 ? 9000 + w % 9000 : w % 900;
    const int64_t end = std::min(n, at + length);
    out.push_back(
        {.begin = at, .end = end, .parameter = 50 - p, .kind = static_cast<ParameterClass>(p % 4)});
    at = end + w % 3 * 64;
  }
  return out;
}

TEST(GradNorm, FastEqualsReference) {
  for (const int64_t n : {0, 1, 255, 256, 4095, 4096, 4097, 100000}) {
    const Tensor x = random_tensor(n);
    expect_equal(fast(x, mixed_runs(n)), reference(x, mixed_runs(n)));
    const std::vector<ElementRun> one{{.begin = 0, .end = n, .kind = ParameterClass::kExpert}};
    expect_equal(fast(x, one), reference(x, one));
    EXPECT_EQ(fast(x, one).sumsq, fast(x, one).class_sumsq[1]);
  }
}

// The order, written out.
TEST(GradNorm, SumsInTheOrderOfTheSpec) {
  const int64_t n = 3 * 4096 + 700;
  const Tensor x = random_tensor(n);
  const auto fold = [](std::vector<double> lanes) {
    for (size_t half = 128; half >= 1; half /= 2) {
      for (size_t l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
    }
    return lanes[0];
  };
  std::vector<double> block_sums(256);
  for (int64_t block = 0; block < 4; ++block) {
    std::vector<double> lanes(256);
    for (int64_t i = block * 4096; i < std::min(n, (block + 1) * 4096); ++i) {
      const double v = x.data<float>()[i];
      lanes[i % 256] += v * v;
    }
    block_sums[block] = fold(lanes);
  }
  const double expected = fold(block_sums);
  EXPECT_EQ(fast(x, {{.begin = 0, .end = n}}).sumsq, expected);
  // More than 4096 blocks are a level more.
  std::vector<double> many(4096 + 300, 1.0);
  many[4100] = 0.5;
  EXPECT_EQ(detail::fold_block_sums(many), 4396 - 0.5);
  EXPECT_EQ(detail::fold_block_sums({}), 0);
}

TEST(GradNorm, Bf16GradientsCountAsTheirValues) {
  const int64_t n = 20011;
  const Tensor x = random_tensor(n), narrow(DType::kBFloat16, {n});
  for (int64_t i = 0; i < n; ++i) {
    narrow.data<bf16>()[i] = bf16(x.data<float>()[i]);
    x.data<float>()[i] = narrow.data<bf16>()[i];
  }
  for (const auto& runs : {mixed_runs(n), std::vector<ElementRun>{{.begin = 0, .end = n}}}) {
    expect_equal(fast(narrow, runs), fast(x, runs));
    expect_equal(reference(narrow, runs), fast(x, runs));
  }
  narrow.data<bf16>()[77] = bf16(std::nanf(""));
  EXPECT_EQ(fast(narrow, {{.begin = 70, .end = 80, .parameter = 6}}).bad_parameter, 6);
}

TEST(GradNorm, SegmentsAreAddedAscending) {
  const Tensor x = random_tensor(9000), y = random_tensor(130), none(DType::kFloat32, {0});
  y.data<float>()[3] = std::nanf("");
  const std::vector<ElementRun> one{{.begin = 0, .end = 9000, .parameter = 8}},
      other{{.begin = 5, .end = 130, .parameter = 2, .kind = ParameterClass::kRouter}};
  const std::vector<GradSegment> all{{x, one}, {none, {}}, {y, other}, {x, one}};
  GradStatistics expected;
  for (const GradSegment& s : all) {
    expected.add(run(grad_statistics, {s}));
  }
  expect_equal(run(grad_statistics, all), expected);
  expect_equal(run(grad_statistics_reference, all), expected);
  EXPECT_EQ(expected.sumsq, expected.class_sumsq[0] + expected.class_sumsq[2]);
}

TEST(GradNorm, NonFiniteElementsAreCountedAndNamed) {
  const int64_t n = 20000;
  Tensor x = random_tensor(n);
  const std::vector<ElementRun> runs{{.begin = 0, .end = 9000, .parameter = 7},
                                     {.begin = 9100, .end = 9200, .parameter = 3},
                                     {.begin = 9200, .end = n, .parameter = 5}};
  x.data<float>()[9050] = std::nanf("");  // in a gap
  EXPECT_EQ(fast(x, runs).bad, 0);
  EXPECT_EQ(fast(x, runs).bad_parameter, -1);
  EXPECT_TRUE(std::isfinite(fast(x, runs).sumsq));
  x.data<float>()[19999] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(fast(x, runs).bad_parameter, 5);
  x.data<float>()[100] = -std::numeric_limits<float>::infinity();
  x.data<float>()[8999] = std::nanf("");
  EXPECT_EQ(fast(x, runs).bad_parameter, 5);
  x.data<float>()[9100] = std::nanf("");
  EXPECT_EQ(fast(x, runs).bad, 4);
  EXPECT_EQ(fast(x, runs).bad_parameter, 3);
  expect_equal(fast(x, runs), reference(x, runs));
}

TEST(GradNorm, HugeGradientsDoNotOverflow) {
  Tensor x(DType::kFloat32, {5000});
  std::fill_n(x.data<float>(), 5000, std::numeric_limits<float>::max());
  const double max = std::numeric_limits<float>::max();
  EXPECT_DOUBLE_EQ(fast(x, {{.begin = 0, .end = 5000}}).sumsq, 5000 * max * max);
}

TEST(GradNorm, RefusesRunsOutOfOrder) {
  const Tensor x(DType::kFloat32, {10});
  EXPECT_THROW(fast(x, {{.begin = 5, .end = 8}, {.begin = 0, .end = 5}}), Error);
  EXPECT_THROW(fast(x, {{.begin = 5, .end = 11}}), Error);
}

}  // namespace
}  // namespace moiety::optim
