// Tensors that are not where the stream runs are refused, whatever the build and the machine have.
// No memory of a GPU is touched: views are enough.
#include "moiety/quant/dequantize.h"
#include "moiety/quant/quantize.h"
#include "moiety/quant/scale_layout.h"
#include "tests/quant/cases.h"

namespace moiety::quant {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};

TensorView on_gpu(const TensorView& x) {
  return x.defined() ? TensorView(x.raw(), x.dtype(), x.sizes(), kGpu) : x;
}
QuantizedView on_gpu(QuantizedView view) {
  for (TensorView* x : {&view.row_data, &view.row_scales, &view.col_data, &view.col_scales,
                        &view.amax, &view.tensor_scale, &view.flags}) {
    *x = on_gpu(*x);
  }
  return view;
}

TEST(Device, TensorsOfAGpuOnTheCpuStream) {
  const QuantSpec spec = QuantSpec::of(Format::kNvfp4Tile16);
  const Tensor x(DType::kBFloat16, {32, 48});
  const QuantizedTensor host(spec, 32, 48, {true, true});
  const QuantizedView gpu = on_gpu(host.view());
  const QuantizeItem item{on_gpu(x), gpu, {}};
  const auto expect = [](const char* operation, auto&& run) {
    const std::string error = kind_and_error_of(run);
    EXPECT_NE(error.find(text("{}: ", operation)), std::string::npos) << error;
    EXPECT_NE(error.find("cuda:0"), std::string::npos) << error;
  };
  expect("quantize", [&] { quantize(on_gpu(x), gpu, {}, Stream()); });
  expect("compute_amax", [&] { compute_amax(on_gpu(x), gpu, {}, Stream()); });
  expect("quantize", [&] { quantize(x, gpu, {}, Stream()); });
  expect("quantize_many", [&] { quantize_many(QuantizeTable({&item, 1}), Stream()); });
  expect("dequantize", [&] { dequantize(gpu, Direction::kRow, on_gpu(x), {}, Stream()); });
  expect("dequantize", [&] { dequantize(gpu, Direction::kRow, x, {}, Stream()); });
  expect("dequantize_operand",
         [&] { dequantize_operand(host, Direction::kRow, on_gpu(x), Stream()); });
  const Tensor layout(DType::kUInt8, {512});
  expect("convert_scales", [&] {
    convert_scales(gpu, Direction::kRow, ScaleLayout::kSm100Swizzled, layout, Stream());
  });
  expect("convert_scales", [&] {
    convert_scales(host, Direction::kRow, ScaleLayout::kSm100Swizzled, on_gpu(layout), Stream());
  });
}

TEST(Device, AllTensorsOfACallAreOnOne) {
  const QuantSpec spec = QuantSpec::of(Format::kMxfp8);
  const Tensor x(DType::kBFloat16, {32, 48}), skip(DType::kUInt32, {1});
  const QuantizedTensor host(spec, 32, 48, {true, false});
  QuantizeOptions options;
  options.skip = on_gpu(skip);
  EXPECT_NE(kind_and_error_of([&] {
              quantize(x, host, options, Stream());
            }).find("quantize: skip is uint32[1] on cuda:0, but x is on cpu"),
            std::string::npos);
  const Tensor begin(DType::kInt64, {2});
  const RowGroups groups{{}, on_gpu(begin), {}, 1, 32, 0};
  const QuantizedTensor grouped(spec, 32, 48, quantized_grouped_sizes(spec, 32, 48, 1, {}));
  EXPECT_NE(kind_and_error_of([&] {
              quantize_grouped(x, groups, grouped, {}, Stream());
            }).find("groups.begin_E1 is int64[2] on cuda:0, but x is on cpu"),
            std::string::npos);
}

}  // namespace
}  // namespace moiety::quant
