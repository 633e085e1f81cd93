// quantize_grouped on a GPU gives the bytes of the CPU reference, dead rows and status included.
#include <numeric>

#include "moiety/quant/quantize.h"
#include "tests/quant/grouped_cases.h"
#include "tests/quant_gpu/gpu_cases.h"

namespace moiety::quant {
namespace {

// The arrays of a problem on the GPU.
struct GpuGroups {
  GpuGroups(const Problem& p, const Stream& stream)
      : begin(to_gpu(p.begin, stream)),
        count(to_gpu(p.count, stream)),
        status(to_gpu(p.status, stream)),
        groups{count, begin, status, p.experts, p.capacity, 0} {}
  Tensor begin, count, status;
  RowGroups groups;
};

void run_reference(const TensorView& x, const Problem& p, const Guarded& out,
                   const QuantizeOptions& options) {
  const QuantizeJob whole = make_grouped_job("reference", x, p.groups, out, options);
  for (const QuantizeJob& job : group_jobs(whole, p.groups)) quantize_reference(job);
}

std::vector<SpecCase> grouped_specs() {
  std::vector<SpecCase> out;
  for (const SpecCase& c : spec_cases()) {
    if (!is_tile(c.spec.format)) out.push_back(c);
  }
  return out;
}

class GroupedGpu : public QuantGpuTest, public testing::WithParamInterface<SpecCase> {
 protected:
  const QuantSpec& spec() const { return GetParam().spec; }

  // Runs both, and compares outputs and status.
  std::string compare(const Problem& p, const TensorView& x, Directions wanted) {
    QuantizeOptions options = test_options();
    options.expert = 5;
    const QuantizedSizes sizes =
        quantized_grouped_sizes(spec(), p.capacity, kCols, p.experts, wanted);
    const Guarded expected = p.output(spec(), wanted, 0xA5);
    const GpuInput there(x, stream);
    const GpuGroups g(p, stream);
    const GpuGuarded out(spec(), p.capacity, kCols, sizes, p.experts, stream);
    quantize_grouped(there, g.groups, out, gpu_options(options), stream);
    run_reference(x, p, expected, options);
    return out.difference_from(expected) +
           difference("status", to_host(g.status, stream), p.status);
  }
};
INSTANTIATE_TEST_SUITE_P(All, GroupedGpu, testing::ValuesIn(grouped_specs()),
                         [](const auto& info) { return info.param.name; });

TEST_P(GroupedGpu, EqualsReference) {
  size_t turn = 0;
  for (const Routing& routing : routings()) {
    for (const Directions wanted : directions_of(spec())) {
      const Problem p(routing);
      const Data data = turn % 3 == 1 ? Data::kRandomBits : Data::kNormal;
      const Tensor x = p.input(turn++ % 2 ? DType::kBFloat16 : DType::kFloat32, data);
      ASSERT_EQ(compare(p, x, wanted), "")
          << routing.name << " row " << wanted.row << " col " << wanted.col;
    }
  }
}

// There are so many groups that a block takes several tiles, and searches for a group more than
// once.
TEST_P(GroupedGpu, ManyGroups) {
  std::vector<int64_t> counts(4200);
  for (size_t e = 0; e < counts.size(); ++e) {
    counts[e] = e % 41 == 7 ? 33 : e == 900 ? 300 : e % 97 == 0;
  }
  const Problem p({"", counts, 1, 9});
  const Tensor x = p.input(DType::kBFloat16, Data::kNormal);
  EXPECT_EQ(compare(p, x, {true, !spec().row_scaled}), "");
}

// Claims that cannot be, in the first and in a later run of thirty-two groups, and groups that
// overlap: the same groups are empty, and the same fault is recorded first.
TEST_P(GroupedGpu, Faults) {
  const Directions wanted{true, !spec().row_scaled};
  const Routing even{"", std::vector<int64_t>(70, 9), 2, 30};
  const Tensor rows = Problem(even).input(DType::kBFloat16, Data::kNormal);
  for (const int64_t bad : {1, 40}) {
    Problem p(even);
    p.count.data<int64_t>()[bad] = 1000;
    p.count.data<int64_t>()[bad + 20] = -3;
    EXPECT_EQ(compare(p, rows, wanted), "") << bad;
  }
  Problem backwards(even);
  backwards.begin.data<int64_t>()[33] = 0;
  EXPECT_EQ(compare(backwards, rows, wanted), "");
  Problem overlapping({"", {100, 0, 100, 0, 100}, 0, 0});
  for (int64_t e = 0; e <= 5; ++e) overlapping.begin.data<int64_t>()[e] = e % 2 ? 100 : 0;
  overlapping.groups.capacity = overlapping.capacity = 100;
  const Tensor x(DType::kBFloat16, {100, kCols});
  EXPECT_EQ(compare(overlapping, x, wanted), "");
}

TEST_P(GroupedGpu, AmaxOfEachGroup) {
  if (!is_tensor_scaled(spec().format)) GTEST_SKIP() << "no amax";
  const Directions both{true, !spec().row_scaled};
  for (const Routing& routing : routings()) {
    const Problem p(routing);
    const Tensor x = p.input(DType::kBFloat16, Data::kNormal);
    const Guarded expected = p.output(spec(), both, 0xA5);
    const GpuGroups g(p, stream);
    const GpuGuarded out(spec(), p.capacity, kCols,
                         quantized_grouped_sizes(spec(), p.capacity, kCols, p.experts, both),
                         p.experts, stream);
    compute_amax_grouped(x, p.groups, expected, test_options(), Stream());
    compute_amax_grouped(GpuInput(x, stream), g.groups, out, gpu_options(), stream);
    EXPECT_EQ(out.difference_from(expected), "") << routing.name;
  }
}

class GroupedGpuCalls : public QuantGpuTest {};

TEST_F(GroupedGpuCalls, DelayedScalesOfEachGroup) {
  const Problem p(routings()[5]);
  const Tensor x = p.input(DType::kFloat32, Data::kNormal);
  Tensor scale(DType::kFloat32, {p.experts}), inverse(DType::kFloat32, {p.experts}),
      step(DType::kFloat32, {p.experts});
  for (int64_t e = 0; e < p.experts; ++e) {
    scale.data<float>()[e] = static_cast<float>(1 << e);
    inverse.data<float>()[e] = 1 / scale.data<float>()[e];
  }
  const Tensor gpu_scale = to_gpu(scale, stream), gpu_inverse = to_gpu(inverse, stream),
               gpu_step = to_gpu(step, stream);
  const DelayedScaling state{{}, {}, scale, inverse, step};
  const DelayedScaling gpu_state{{}, {}, gpu_scale, gpu_inverse, gpu_step};
  const QuantSpec spec = QuantSpec::of(Format::kFp8Tensor);
  const Guarded expected = p.output(spec, {true, true}, 0xA5);
  const GpuGuarded out(spec, p.capacity, kCols,
                       quantized_grouped_sizes(spec, p.capacity, kCols, p.experts, {true, true}),
                       p.experts, stream);
  const GpuGroups g(p, stream);
  QuantizeOptions options = test_options();
  options.delayed = &state;
  run_reference(x, p, expected, options);
  options.delayed = &gpu_state;
  quantize_grouped(GpuInput(x, stream), g.groups, out, gpu_options(options), stream);
  EXPECT_EQ(out.difference_from(expected), "");
  EXPECT_EQ(difference("step_amax", to_host(gpu_step, stream), step), "");
}

// Faults are recorded whether or not the outputs are skipped.
TEST_F(GroupedGpuCalls, SkipChangesNothing) {
  Problem p({"", {40, 500, 3}, 0, 0});
  p.groups.capacity = p.capacity = 200;
  const Tensor x(DType::kBFloat16, {200, kCols});
  Tensor one(DType::kUInt32, {1});
  *one.data<uint32_t>() = 1;
  const Tensor skip = to_gpu(one, stream);
  const QuantSpec spec = QuantSpec::of(Format::kNvfp4);
  QuantizeOptions options = test_options();
  options.skip = one;
  const Guarded expected = p.output(spec, {true, true}, 0xA5);
  quantize_grouped(x, p.groups, expected, options, Stream());
  options.skip = skip;
  const GpuGroups g(Problem({"", {40, 500, 3}, 0, 0}), stream);
  RowGroups groups = g.groups;
  groups.capacity = 200;
  const GpuGuarded out(spec, 200, kCols, quantized_grouped_sizes(spec, 200, kCols, 3, {true, true}),
                       3, stream);
  quantize_grouped(GpuInput(x, stream), groups, out, gpu_options(options), stream);
  EXPECT_EQ(out.difference_from(expected), "");
  EXPECT_EQ(difference("status", to_host(g.status, stream), p.status), "");
}

}  // namespace
}  // namespace moiety::quant
