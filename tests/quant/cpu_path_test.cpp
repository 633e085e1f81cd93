// Every path of this processor gives the bytes of the reference, through the public headers alone:
// nothing here knows how a cast is computed.
#include "moiety/quant/cpu_path.h"

#include <array>

#include "moiety/quant/dequantize.h"
#include "moiety/quant/scale_layout.h"
#include "moiety/quant/transpose.h"
#include "tests/quant/cases.h"
#include "tests/quant/layout_cases.h"
#include "tests/quant/partial_cast_harness.h"

namespace moiety::quant {
namespace {

std::vector<Shape> shapes() {
  return {{1, 1}, {17, 33}, {127, 129}, {256, 272}, {0, 40}, {300, 16}};
}

// The bytes of everything that a case gives.
using Bytes = std::vector<std::string>;
void append(Bytes& out, const QuantizedView& x) {
  for (const TensorView* array : {&x.row_data, &x.row_scales, &x.col_data, &x.col_scales, &x.amax,
                                  &x.tensor_scale, &x.flags}) {
    out.push_back(bytes_of(*array));
  }
}

class CpuPaths : public testing::TestWithParam<SpecCase> {};
INSTANTIATE_TEST_SUITE_P(All, CpuPaths, testing::ValuesIn(spec_cases()),
                         [](const auto& info) { return info.param.name; });

Bytes results(const SpecCase& c, Shape shape, Data data, DType dtype) {
  const Input x(dtype, shape, data, 3);
  Bytes out;
  for (const Directions wanted : directions_of(c.spec)) {
    const Guarded q(c.spec, shape.rows, shape.cols, wanted);
    if (is_tensor_scaled(c.spec.format)) {
      compute_amax(x, q, test_options(), Stream());
      append(out, q);
    }
    quantize(x, q, test_options(), Stream());
    append(out, q);
    EXPECT_TRUE(q.guards_intact());
    for (const Direction d : {Direction::kRow, Direction::kCol}) {
      const bool there =
          d == Direction::kRow ? wanted.row : wanted.col && q.view().col_data.defined();
      if (!there) continue;
      const DequantizedShape s = dequantized_shape(q, d);
      const Tensor values(DType::kFloat32, {s.rows, s.cols}),
          operand(DType::kBFloat16, {s.rows, s.cols});
      dequantize(q, d, values, {}, Stream());
      dequantize_operand(q, d, operand, Stream());
      out.push_back(bytes_of(values));
      out.push_back(bytes_of(operand));
    }
  }
  return out;
}

TEST_P(CpuPaths, GiveTheSameBytes) {
  for (const Shape shape : shapes()) {
    for (const Data data : {Data::kNormal, Data::kOneNan, Data::kHugeAndTiny, Data::kExactTies}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        Bytes reference;
        for (const CpuPath path : cpu_paths()) {
          const UseCpuPath use(path);
          const Bytes got = results(GetParam(), shape, data, dtype);
          if (path == CpuPath::kReference) reference = got;
          EXPECT_TRUE(got == reference)
              << name(path) << " " << name(shape) << " " << name(data) << " " << name(dtype);
        }
      }
    }
  }
}

TEST(CpuPath, TransposesAndLayoutsOfScalesAreTheSame) {
  std::vector<Bytes> all;
  for (const CpuPath path : cpu_paths()) {
    const UseCpuPath use(path);
    Bytes& out = all.emplace_back();
    const Input x(DType::kBFloat16, {144, 272}, Data::kNormal);
    for (const Format format :
         {Format::kFp8Tensor, Format::kFp8Block128x128, Format::kNvfp4Tile16}) {
      const Guarded q(QuantSpec::of(format), 144, 272, {true, true});
      quantize(x, q, test_options(), Stream());
      std::memset(q.view().col_data.raw(), 0x5A, static_cast<size_t>(q.view().col_data.bytes()));
      const std::array items{QuantizeItem{{}, q, {}}};
      transpose_quantized(QuantizeTable(items), Stream());
      append(out, q);
    }
    for (const LayoutCase& c : layout_cases()) {
      const Guarded q(QuantSpec::of(c.format), 144, 272, {true, true});
      quantize(x, q, test_options(), Stream());
      const ArraySpec size = scale_layout_size(q, c.direction, c.layout);
      const Tensor scales(size.dtype, std::span(size.sizes.data(), static_cast<size_t>(size.dims)));
      convert_scales(q, c.direction, c.layout, scales, Stream());
      out.push_back(bytes_of(scales));
    }
  }
  for (const Bytes& path : all) EXPECT_TRUE(path == all[0]);
}

TEST(CpuPath, PartialCastsAreThoseOfTheWhole) {
  std::vector<PartialWeight> weights;
  for (const Format format : {Format::kFp8Tensor, Format::kFp8Block128x128, Format::kMxfp8,
                              Format::kMxfp8Tile32, Format::kNvfp4Tile16}) {
    PartialWeight& w = weights.emplace_back();
    w.spec = QuantSpec::of(format);
    w.rows = 130;
    w.cols = 144;
    w.cuts = even_cuts(w.rows * w.cols, 3);
    w.col = format == Format::kMxfp8;
  }
  for (const CpuPath path : cpu_paths()) {
    const UseCpuPath use(path);
    EXPECT_EQ(run_partial_cast(weights, {{}}), "") << name(path);
  }
}

TEST(CpuPath, TheBestComesBack) {
  EXPECT_EQ(cpu_paths().front(), CpuPath::kReference);
  const auto refused = [](CpuPath path) { return error_of([&] { const UseCpuPath use(path); }); };
  for (const CpuPath path : cpu_paths()) EXPECT_EQ(refused(path), kNoError);
  if (cpu_paths().back() != CpuPath::kAvx2) {
    EXPECT_NE(refused(CpuPath::kAvx2).find("has no path avx2"), std::string::npos);
  }
  EXPECT_EQ(detail::by_avx2(), cpu_paths().back() == CpuPath::kAvx2);
  {
    const UseCpuPath use(CpuPath::kReference);
    EXPECT_TRUE(detail::by_reference());
  }
  EXPECT_FALSE(detail::by_reference());
}

}  // namespace
}  // namespace moiety::quant
