// Tables of many tensors on a GPU: quantize_many and transpose_quantized against one tensor after
// the other on the CPU.
#include "moiety/quant/transpose.h"
#include "tests/quant_gpu/gpu_cases.h"

namespace moiety::quant {
namespace {

class TablesGpu : public QuantGpuTest {};

// Every spec with shapes that change from item to item, in one table.
TEST_F(TablesGpu, ManyEqualOneByOne) {
  std::vector<Shape> shapes = small_shapes();
  shapes.push_back({260, 700});
  std::vector<GpuInput> inputs;
  std::vector<GpuGuarded> outputs;
  std::vector<Guarded> expected;
  std::vector<QuantizeItem> items;
  size_t turn = 0;
  for (int round = 0; round < 4; ++round) {
    for (const SpecCase& c : spec_cases()) {
      const Shape shape = shapes[turn % shapes.size()];
      const std::vector<Directions> choices = directions_of(c.spec);
      const Directions wanted = choices[turn % choices.size()];
      const Input x(turn % 3 ? DType::kBFloat16 : DType::kFloat32, shape, Data::kNormal, 0,
                    static_cast<uint32_t>(turn));
      QuantizeOptions options = test_options();
      options.tensor_id = static_cast<uint32_t>(turn++);
      expected.push_back(reference(x, c.spec, wanted, options));
      inputs.emplace_back(x, stream);
      outputs.emplace_back(c.spec, shape.rows, shape.cols, wanted, stream);
      items.push_back({inputs.back(), outputs.back(), gpu_options(options)});
    }
  }
  const QuantizeTable table(items);
  EXPECT_NE(table.device(), nullptr);
  quantize_many(table, stream);
  for (size_t i = 0; i < items.size(); ++i) {
    ASSERT_EQ(outputs[i].difference_from(expected[i]), "")
        << i << " " << name(items[i].out.spec.format);
  }
}

// More tensors than a few steps of the search for a tile's tensor, and several tiles a block.
TEST_F(TablesGpu, ThousandsOfSmallTensors) {
  const QuantSpec spec = QuantSpec::of(Format::kNvfp4Tile16);
  const Input x(DType::kBFloat16, {17, 150}, Data::kNormal);
  const GpuInput there(x, stream);
  const Guarded expected = reference(x, spec, {true, true}, test_options());
  std::vector<GpuGuarded> outputs;
  std::vector<QuantizeItem> items;
  for (int i = 0; i < 2100; ++i) {
    outputs.emplace_back(spec, 17, 150, Directions{true, true}, stream);
    items.push_back({there, outputs.back(), gpu_options()});
  }
  quantize_many(QuantizeTable(items), stream);
  for (const GpuGuarded& out : outputs) ASSERT_EQ(out.difference_from(expected), "");
}

TEST_F(TablesGpu, DelayedScalesAndSkip) {
  Tensor scale(DType::kFloat32, {1}), step(DType::kFloat32, {1}), skip(DType::kUInt32, {1});
  *scale.data<float>() = 4;
  const Tensor gpu_scale = to_gpu(scale, stream), gpu_step = to_gpu(step, stream),
               gpu_skip = to_gpu(skip, stream);
  const DelayedScaling state{{}, {}, scale, scale, step};
  const DelayedScaling gpu_state{{}, {}, gpu_scale, gpu_scale, gpu_step};
  const QuantSpec spec = QuantSpec::of(Format::kFp8Tensor);
  const Input x(DType::kBFloat16, {100, 90}, Data::kNormal);
  const GpuInput there(x, stream);
  QuantizeOptions options = test_options();
  options.delayed = &state;
  const Guarded expected = reference(x, spec, {true, true}, options);
  GpuGuarded out(spec, 100, 90, {true, true}, stream);
  options.delayed = &gpu_state;
  options.skip = gpu_skip;
  const QuantizeItem item{there, out, gpu_options(options)};
  const QuantizeTable table({&item, 1});
  quantize_many(table, stream);
  EXPECT_EQ(out.difference_from(expected), "");
  EXPECT_EQ(difference("step_amax", to_host(gpu_step, stream), step), "");
  *skip.data<uint32_t>() = 1;
  copy(gpu_skip, skip, stream);
  out.poison_all();
  quantize_many(table, stream);
  EXPECT_EQ(out.difference_from(Guarded(spec, 100, 90, {true, true})), "");
}

TEST_F(TablesGpu, TransposesAreTheColHalfOfQuantize) {
  std::vector<Shape> shapes = small_shapes();
  shapes.insert(shapes.end(), {{300, 700}, {2, 3}, {33, 65}, {128, 128}, {256, 512}});
  for (int64_t i = 1; i < 16; ++i) shapes.push_back({256 + i, 272 - i});  // any alignment
  std::vector<Guarded> expected;
  std::vector<GpuGuarded> moved;
  std::vector<QuantizeItem> items;
  for (const SpecCase& c : spec_cases()) {
    if (!is_tile(c.spec.format) && c.spec.format != Format::kFp8Tensor) continue;
    for (const Shape& shape : shapes) {
      const Input x(DType::kBFloat16, shape, Data::kNormal);
      expected.push_back(reference(x, c.spec, {true, true}, test_options()));
      moved.emplace_back(c.spec, shape.rows, shape.cols, Directions{true, true}, stream);
      // The state is as after a gather: only the row half is there.
      QuantizedView row = expected.back();
      row.col_data = {};
      moved.back().set(row);
      for (const TensorView* pair :
           {&moved.back().view().amax, &moved.back().view().tensor_scale}) {
        if (pair->defined() && is_tensor_scaled(c.spec.format)) {
          fill_bytes(pair->slice(0, 1, 2), 0x5A, stream);
        }
      }
      items.push_back({{}, moved.back(), {}});
    }
  }
  transpose_quantized(QuantizeTable(items), stream);
  for (size_t i = 0; i < items.size(); ++i) {
    ASSERT_EQ(moved[i].difference_from(expected[i]), "")
        << name(items[i].out.spec.format) << " " << items[i].out.rows << "x" << items[i].out.cols;
  }
}

}  // namespace
}  // namespace moiety::quant
