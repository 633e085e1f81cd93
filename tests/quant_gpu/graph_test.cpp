// Quantization in captured graphs: what replays read is what memory holds then. That a capture
// succeeds shows that the calls neither allocate nor wait.
#include "moiety/base/graph.h"

#include <chrono>
#include <cstdio>

#include "moiety/quant/dequantize.h"
#include "moiety/quant/scale_layout.h"
#include "moiety/quant/transpose.h"
#include "tests/quant/grouped_cases.h"
#include "tests/quant_gpu/gpu_cases.h"

namespace moiety::quant {
namespace {

class QuantGraph : public QuantGpuTest {};

QuantSpec stochastic_nvfp4() {
  QuantSpec spec = QuantSpec::of(Format::kNvfp4);
  spec.rounding = Rounding::kStochastic;
  spec.rht_col = true;
  return spec;
}

TEST_F(QuantGraph, ReplaysReadDataDrawAndSkip) {
  const QuantSpec spec = stochastic_nvfp4();
  const Tensor there(DType::kBFloat16, {200, 304}, kGpu);
  Tensor skip(DType::kUInt32, {1});
  const Tensor gpu_skip = to_gpu(skip, stream);
  GpuGuarded out(spec, 200, 304, {true, true}, stream);
  QuantizeOptions options = gpu_options();
  options.skip = gpu_skip;
  const Graph graph(stream, [&] { quantize(there, out, options, stream); });
  for (uint32_t replay = 0; replay < 6; ++replay) {
    const Input x(DType::kBFloat16, {200, 304}, replay == 3 ? Data::kOneNan : Data::kNormal, 0,
                  replay);
    copy(there, x, stream);
    const RngState rng{kTestRng.seed + replay / 2, replay};
    set_rng(rng);
    *skip.data<uint32_t>() = replay == 4;
    copy(gpu_skip, skip, stream);
    out.poison_all();
    graph.launch(stream);
    QuantizeOptions host = test_options();
    host.rng = &rng;
    host.skip = skip;
    EXPECT_EQ(out.difference_from(reference(x, spec, {true, true}, host)), "") << replay;
  }
}

TEST_F(QuantGraph, OneCaptureServesEveryRouting) {
  const int64_t capacity = 600, experts = 9;
  const std::vector<std::vector<int64_t>> counts = {
      {0, 0, 0, 0, 0, 0, 0, 0, 0},          {600, 0, 0, 0, 0, 0, 0, 0, 0},
      {1, 2, 3, 5, 7, 11, 13, 127, 131},    {0, 1, 0, 0, 0, 0, 0, 0, 0},
      {60, 70, 60, 70, 60, 70, 60, 70, 80}, {10, 9000, 5, 0, 0, 0, 0, 0, 1}};
  for (const QuantSpec& spec :
       {stochastic_nvfp4(), QuantSpec::of(Format::kMxfp8), QuantSpec::of(Format::kFp8Block1x128)}) {
    const Tensor there(DType::kBFloat16, {capacity, kCols}, kGpu);
    const Tensor begin(DType::kInt64, {experts + 1}, kGpu), count(DType::kInt64, {experts}, kGpu),
        status(DType::kUInt32, {4}, kGpu);
    const RowGroups groups{count, begin, status, experts, capacity, 0};
    const QuantizedSizes sizes =
        quantized_grouped_sizes(spec, capacity, kCols, experts, {true, true});
    GpuGuarded out(spec, capacity, kCols, sizes, experts, stream);
    const Graph graph(stream, [&] { quantize_grouped(there, groups, out, gpu_options(), stream); });
    for (const std::vector<int64_t>& split : counts) {
      Problem p({"", split, 0, 0});
      p.groups.capacity = p.capacity = capacity;
      const Tensor x(DType::kBFloat16, {capacity, kCols});
      fill(x, Data::kNormal, static_cast<uint32_t>(split[0]));
      copy(there, x, stream);
      copy(begin, p.begin, stream);
      copy(count, p.count, stream);
      fill_bytes(status, 0, stream);
      out.poison_all();
      graph.launch(stream);
      const Guarded expected = p.output(spec, {true, true}, 0xA5);
      const QuantizeJob whole = make_grouped_job("test", x, p.groups, expected, test_options());
      for (const QuantizeJob& job : group_jobs(whole, p.groups)) quantize_reference(job);
      EXPECT_EQ(out.difference_from(expected), "") << name(spec.format) << split[0];
      EXPECT_EQ(difference("status", to_host(status, stream), p.status), "");
    }
  }
}

TEST_F(QuantGraph, AllOperationsCanBeCaptured) {
  const Directions both{true, true};
  const Tensor x(DType::kBFloat16, {130, 150}, kGpu), back(DType::kBFloat16, {130, 150}, kGpu);
  std::vector<QuantizedTensor> tensors;
  std::vector<QuantizeItem> items;
  for (const SpecCase& c : spec_cases()) {
    tensors.emplace_back(c.spec, 130, 150, c.spec.row_scaled ? Directions{true, false} : both,
                         kGpu);
    items.push_back({x, tensors.back(), gpu_options()});
  }
  const QuantizeTable all(items);
  const QuantizedTensor tile(QuantSpec::of(Format::kNvfp4Tile16), 130, 150, both, kGpu);
  const QuantizeItem item{{}, tile, {}};
  const QuantizeTable transposes({&item, 1});
  const QuantizedTensor mx(QuantSpec::of(Format::kMxfp8), 130, 150, both, kGpu);
  const ArraySpec layout = scale_layout_size(mx, Direction::kRow, ScaleLayout::kSm100Swizzled);
  const Tensor scales(layout.dtype, {layout.sizes[0]}, kGpu);
  const Graph graph(stream, [&] {
    quantize_many(all, stream);
    quantize(x, mx, {}, stream);
    transpose_quantized(transposes, stream);
    convert_scales(mx, Direction::kRow, ScaleLayout::kSm100Swizzled, scales, stream);
    compact_scales(scales, ScaleLayout::kSm100Swizzled, mx, Direction::kRow, stream);
    dequantize(mx, Direction::kRow, back, {}, stream);
    dequantize_operand(mx, Direction::kCol, back, stream);
  });
  EXPECT_GT(graph.nodes(), 6);
  graph.launch(stream);
  stream.synchronize();
}

// Prints the time that the host spends on a call; it does not grow with the number of tensors.
TEST_F(QuantGraph, HostTimeOfACall) {
  const Tensor x(DType::kBFloat16, {64, 128}, kGpu);
  for (const int tensors : {1, 1000}) {
    std::vector<QuantizedTensor> outputs;
    std::vector<QuantizeItem> items;
    for (int i = 0; i < tensors; ++i) {
      outputs.emplace_back(QuantSpec::of(Format::kMxfp8), 64, 128, Directions{true, true}, kGpu);
      items.push_back({x, outputs.back(), {}});
    }
    const QuantizeTable table(items);
    quantize_many(table, stream);
    stream.synchronize();
    constexpr int kCalls = 200;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) quantize_many(table, stream);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    stream.synchronize();
    std::printf("quantize_many of %d tensors: %.1f us of the host a call\n", tensors,
                time.count() / kCalls);
  }
}

}  // namespace
}  // namespace moiety::quant
