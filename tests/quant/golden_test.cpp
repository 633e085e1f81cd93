// The golden vectors of tests/golden, which a script made without our code: quantize() and
// convert_scales() give their bytes.
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "moiety/base/format.h"
#include "moiety/quant/quantize.h"
#include "moiety/quant/scale_layout.h"

namespace moiety::quant {
namespace {

using Json = nlohmann::json;
using Bytes = std::vector<uint8_t>;

constexpr uint8_t kPoison = 0xA5;

// Beside the program's sources, or, on a machine that has none, below the working directory.
Json read(const std::string& name) {
  for (const char* root : {MOIETY_SOURCE_DIR, "."}) {
    std::ifstream file(text("{}/tests/golden/{}.json", root, name));
    if (file) return Json::parse(file);
  }
  throw std::runtime_error(name + ".json is not in tests/golden");
}

Bytes bytes_of(const std::string& hexadecimal) {
  Bytes out(hexadecimal.size() / 2);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<uint8_t>(std::stoi(hexadecimal.substr(2 * i, 2), nullptr, 16));
  }
  return out;
}

Tensor input(const Json& inputs, const std::string& name) {
  const Json& j = inputs.at(name);
  Tensor out(j.at("dtype") == "bfloat16" ? DType::kBFloat16 : DType::kFloat32,
             {j.at("rows").get<int64_t>(), j.at("cols").get<int64_t>()});
  const Bytes data = bytes_of(j.at("data"));
  EXPECT_EQ(static_cast<int64_t>(data.size()), out.view().bytes()) << name;
  std::memcpy(out.view().raw(), data.data(), data.size());
  return out;
}

QuantSpec spec_of(Format format, const Json& o) {
  QuantSpec spec = QuantSpec::of(format);
  if (o.value("element", "e4m3") == "e5m2") spec.element = DType::kE5M2;
  if (o.value("rounding", "nearest") == "stochastic") spec.rounding = Rounding::kStochastic;
  spec.pow2_scales = o.value("pow2", spec.pow2_scales);
  spec.row_scaled = o.value("row_scaled", false);
  spec.rht_col = o.value("rht", false);
  spec.rht_signs = o.value("rht_signs", spec.rht_signs);
  spec.amax_floor = o.value("amax_floor", 0.0f);
  return spec;
}

// The start of an array against the expected bytes; what lies behind them is untouched.
void compare(const std::string& what, const TensorView& array, const Bytes& expected) {
  ASSERT_TRUE(array.defined()) << what;
  ASSERT_GE(array.bytes(), static_cast<int64_t>(expected.size())) << what;
  const auto* got = static_cast<const uint8_t*>(array.raw());
  for (int64_t i = 0; i < array.bytes(); ++i) {
    const bool behind = i >= static_cast<int64_t>(expected.size());
    ASSERT_EQ(int(got[i]), int(behind ? kPoison : expected[i])) << what << ", byte " << i;
  }
}

// A case of a file, run in some directions. The two of kMxfp8Tile32 have the same arrays, so they
// come together.
class Quantized {
 public:
  Quantized(Format format, const Json& golden, const Tensor& x, Directions wanted)
      : golden_(golden),
        tensor_(spec_of(format, golden.at("options")), x.view().size(0), x.view().size(1), wanted),
        view_(tensor_.view()),
        wanted_(format == Format::kMxfp8Tile32 ? Directions{true, true} : wanted) {
    for (const TensorView& a : {view_.row_data, view_.row_scales, view_.col_data, view_.col_scales,
                                view_.amax, view_.tensor_scale}) {
      if (a.defined() && a.bytes() > 0) std::memset(a.raw(), kPoison, a.bytes());
    }
    const Json& o = golden.at("options");
    const RngState rng{o.value("seed", uint64_t{0}), o.value("draw", uint64_t{0})};
    QuantizeOptions options;
    if (view_.spec.rounding == Rounding::kStochastic) options.rng = &rng;
    options.tensor_id = o.value("tensor_id", 0u);
    options.expert = o.value("expert", 0);
    options.row0 = o.value("row0", int64_t{0});
    options.col0 = o.value("col0", int64_t{0});
    options.full_rows = o.value("full_rows", int64_t{0});
    options.full_cols = o.value("full_cols", int64_t{0});
    if (o.contains("amax_given")) {
      options.amax_given = true;
      const auto bits =
          static_cast<uint32_t>(std::stoul(o.at("amax_given").get<std::string>(), nullptr, 16));
      if (wanted.row) std::memcpy(view_.amax.data<float>(), &bits, 4);
      if (wanted.col) std::memcpy(view_.amax.data<float>() + 1, &bits, 4);
    }
    quantize(x, view_, options, Stream());
  }

  const QuantizedView& view() const { return view_; }

  void check() const {
    const Json& expected = golden_.at("expect");
    ASSERT_EQ(view_.row_data.defined(), wanted_.row);
    ASSERT_EQ(view_.col_data.defined(), wanted_.col && expected.contains("col_data"));
    check("row_data", view_.row_data);
    check("row_scales", view_.row_scales);
    check("col_data", view_.col_data);
    check("col_scales", view_.col_scales);
    check_scalars("amax", view_.amax);
    check_scalars("tensor_scale", view_.tensor_scale);
    const Bytes flags = bytes_of(expected.at("flags"));
    const bool set = (wanted_.row && flags[0]) || (wanted_.col && flags[4]);
    EXPECT_EQ(*view_.flags.data<uint32_t>(), set ? kFlagNonFinite : 0);
  }

 private:
  void check(const char* name, const TensorView& array) const {
    const Json& expected = golden_.at("expect");
    if (!array.defined()) return;
    ASSERT_TRUE(expected.contains(name)) << name;
    compare(name, array, bytes_of(expected.at(name)));
  }
  // The scalar of a direction that is not asked for is untouched.
  void check_scalars(const char* name, const TensorView& array) const {
    const Json& expected = golden_.at("expect");
    ASSERT_EQ(array.defined(), expected.contains(name)) << name;
    if (!array.defined()) return;
    Bytes bytes = bytes_of(expected.at(name));
    if (!view_.spec.row_scaled) {
      bytes.resize(8, kPoison);
      if (!wanted_.row) std::fill_n(bytes.begin(), 4, kPoison);
      if (!wanted_.col) std::fill_n(bytes.begin() + 4, 4, kPoison);
    }
    compare(name, array, bytes);
  }

  const Json& golden_;
  QuantizedTensor tensor_;
  const QuantizedView& view_;
  Directions wanted_;
};

void check_layouts(const QuantizedView& view, const Json& layouts) {
  for (const auto& [key, expected] : layouts.items()) {
    const std::string name = key.substr(0, key.find('.'));
    const ScaleLayout layout = name == "sm100"    ? ScaleLayout::kSm100Swizzled
                               : name == "padded" ? ScaleLayout::kPadded
                                                  : ScaleLayout::kSm90MnMajor;
    const Direction direction =
        key.substr(key.find('.') + 1) == "row" ? Direction::kRow : Direction::kCol;
    const ArraySpec size = scale_layout_size(view, direction, layout);
    Tensor out(size.dtype, std::span(size.sizes.data(), size_t(size.dims)));
    std::memset(out.view().raw(), kPoison, out.view().bytes());
    convert_scales(view, direction, layout, out, Stream());
    const Bytes bytes = bytes_of(expected);
    ASSERT_EQ(out.view().bytes(), static_cast<int64_t>(bytes.size())) << key;
    compare(key, out, bytes);
  }
}

class Golden : public ::testing::TestWithParam<const char*> {};

TEST_P(Golden, BytesOfEveryCase) {
  const Format format = *format_of(GetParam());
  const Json inputs = read("inputs"), cases = read(GetParam());
  ASSERT_GT(cases.size(), 10u);
  for (const Json& golden : cases) {
    SCOPED_TRACE(golden.at("name").get<std::string>());
    const Tensor x = input(inputs, golden.at("input"));
    if (golden.at("options").value("directions", "both") == "row") {
      Quantized(format, golden, x, {.row = true, .col = false}).check();
      continue;
    }
    const Quantized both(format, golden, x, {.row = true, .col = true});
    both.check();
    Quantized(format, golden, x, {.row = true, .col = false}).check();
    Quantized(format, golden, x, {.row = false, .col = true}).check();
    if (golden.contains("layouts")) check_layouts(both.view(), golden.at("layouts"));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Golden,
                         ::testing::Values("fp8_tensor", "fp8_block_1x128", "fp8_block_128x128",
                                           "mxfp8", "mxfp8_tile32", "nvfp4", "nvfp4_tile16"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace moiety::quant
