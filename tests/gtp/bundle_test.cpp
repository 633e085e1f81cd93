// Weights that do not go together in a bundle, and shards that are not as their layout says.
#include "moiety/gtp/bundle.h"

#include <gtest/gtest.h>

#include "tests/gtp/quantized_weights.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kRows = 32, kCols = 24;

// Weights of one rank with memory of their own.
struct Members {
  std::vector<Tensor> memory;
  std::vector<ShardedWeight> weights;

  ShardedWeight& add(const char* name, int64_t cols = kCols, bool trained = true) {
    ShardedWeight& w = weights.emplace_back();
    w.name = name;
    w.layout.rows = kRows;
    w.layout.cols = cols;
    w.data = memory.emplace_back(DType::kBFloat16, std::initializer_list{kRows, cols});
    if (trained)
      w.main_grad = memory.emplace_back(DType::kFloat32, std::initializer_list{kRows, cols});
    return w;
  }
  std::string error(Bundle bundle = {.name = "fc1", .members = {0, 1}},
                    DType wire = DType::kFloat32) const {
    return kind_and_error_of([&] { BundleLayout(bundle, weights, nullptr, wire); });
  }
};

TEST(BundleErrors, MembersThatDiffer) {
  const std::string differ =
      "invalid argument: gtp bundle fc1: a and b differ in layout, codec or main_grad";
  {
    Members m;
    m.add("a"), m.add("b", kCols + 1);
    EXPECT_EQ(m.error(), differ);
  }
  {
    Members m;
    m.add("a"), m.add("b", kCols, false);
    EXPECT_EQ(m.error(), differ);
  }
  {
    Members m;
    m.add("a"), m.add("b").codec = Codec(DType::kFloat32);
    EXPECT_EQ(m.error(), differ);
  }
  {
    Members m;
    m.add("a"), m.add("b");
    m.weights[1].main_grad =
        m.memory.emplace_back(DType::kBFloat16, std::initializer_list{kRows, kCols});
    EXPECT_EQ(m.error(), differ);
  }
}

TEST(BundleErrors, MembersThatAreMissing) {
  Members m;
  m.add("a");
  EXPECT_EQ(m.error(), "invalid argument: gtp bundle fc1: member 1 of 1 weights");
  EXPECT_EQ(m.error({.name = "fc1", .members = {}}),
            "invalid argument: gtp bundle fc1: no members");
}

TEST(BundleErrors, AGroupOfAnotherSize) {
  Members m;
  ShardedWeight& a = m.add("a");
  a.layout.gtp_size = 2;
  EXPECT_EQ(m.error({.name = "fc1", .members = {0}, .group = 3}),
            "invalid argument: gtp bundle fc1: a is rank 0 of 2, the transport of group 3 has no "
            "ranks");
}

TEST(BundleErrors, WiresAndViews) {
  Members m;
  ShardedWeight& a = m.add("a");
  EXPECT_EQ(m.error({.name = "fc1", .members = {0}}, DType::kE4M3),
            "invalid argument: gtp bundle fc1: wire is e4m3, expected float32 or bfloat16");
  a.codec = Codec(QuantSpec::of(Format::kMxfp8));
  EXPECT_EQ(m.error({.name = "fc1", .members = {0}, .rows_only = true}),
            "invalid argument: gtp bundle fc1: mxfp8 has other codes in its column view");
}

TEST(ShardErrors, NameTheWeightAndWhatIsExpected) {
  const auto error = [](const ShardedWeight& w) {
    return kind_and_error_of([&] { check_weight(w); });
  };
  Members m;
  ShardedWeight w = m.add("layers.0.fc1");
  EXPECT_EQ(error(w), "no error");
  w.layout.rows = kRows + 16;
  EXPECT_NE(error(w).find("gtp weight layers.0.fc1: data is bfloat16[32, 24]"), std::string::npos)
      << error(w);
  w.layout.rows = kRows;
  w.layout.gtp_size = 2;
  w.codec = Codec(QuantSpec::of(Format::kMxfp8));
  EXPECT_EQ(error(w),
            "invalid argument: gtp weight layers.0.fc1: rows are aligned to 16, expected a "
            "multiple of 32 for mxfp8");
  w.layout.gtp_size = 1;
  EXPECT_EQ(error(w),
            "invalid argument: gtp weight layers.0.fc1: the shard is [0, 0] of fp8_block_1x128, "
            "scales compact, expected [32, 24] of mxfp8, compact");
  QuantizedTensor q(QuantSpec::of(Format::kMxfp8), kRows, kCols, {true, false});
  w.quantized = q.view();
  EXPECT_EQ(error(w), "invalid argument: gtp weight layers.0.fc1: column codes are missing");
  QuantizedTensor tile(QuantSpec::of(Format::kNvfp4Tile16), kRows, kCols, {true, false});
  w.codec = Codec(QuantSpec::of(Format::kNvfp4Tile16));
  w.quantized = tile.view();
  EXPECT_EQ(error(w), "no error");
  w.quantized.amax = {};
  EXPECT_EQ(error(w), "invalid argument: gtp weight layers.0.fc1: amax is missing");
}

}  // namespace
}  // namespace moiety::gtp
