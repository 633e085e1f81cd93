// Random problems on a GPU against the CPU reference.
#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/dequantize.h"
#include "moiety/quant/quantize.h"
#include "tests/quant/fuzz_cases.h"
#include "tests/quant_gpu/gpu_cases.h"

namespace moiety::quant {
namespace {

class FuzzGpu : public QuantGpuTest {
 public:
  void tensor() {
    const FuzzCases::TensorCase c = cases_.tensor();
    const Guarded expected = reference(c.x, c.spec.spec, c.wanted, c.options);
    const GpuInput there(c.x, stream, cases_.up_to(3));
    const GpuGuarded out(c.spec.spec, c.shape.rows, c.shape.cols, c.wanted, stream);
    quantize(there, out, gpu_options(c.options), stream);
    ASSERT_EQ(out.difference_from(expected), "")
        << c.spec.name << " " << name(c.shape) << " " << c.x.view().describe();
    values(expected, out, c.wanted.row ? Direction::kRow : Direction::kCol);
  }

  void values(const QuantizedView& host, const QuantizedView& gpu, Direction d) {
    const bool turned = d == Direction::kCol && !is_mxfp8(host.spec.format);
    if (d == Direction::kCol && host.spec.format == Format::kMxfp8Tile32) return;
    const bool rotated = d == Direction::kCol && host.spec.rht_col, undo = rotated && cases_.coin();
    const int64_t rows = turned ? host.cols : host.rows;
    int64_t cols = turned ? host.rows : host.cols;
    if (rotated && !undo) cols = (cols + 15) / 16 * 16;
    const Tensor expected(cases_.any_dtype(), {rows, cols + cases_.up_to(4)});
    const Tensor there(expected.view().dtype(), expected.view().sizes(), kGpu);
    dequantize(gpu, d, there.view().slice(1, 0, cols), {.undo_rht = undo}, stream);
    dequantize_reference(make_dequantize_job("test", host, d, expected.view().slice(1, 0, cols),
                                             Dequantized::kValues, undo));
    ASSERT_EQ(difference("values", to_host(there, stream), expected), "") << name(host.spec.format);
  }

  void groups() {
    FuzzCases::GroupCase c = cases_.groups();
    const Problem& p = c.problem;
    const Guarded expected = p.output(c.spec.spec, c.wanted, 0xA5);
    const Tensor begin = to_gpu(p.begin, stream), count = to_gpu(p.count, stream),
                 status = to_gpu(p.status, stream);
    const RowGroups there{count, begin, status, p.experts, p.capacity, 0};
    const QuantizeJob whole = make_grouped_job("test", c.x, p.groups, expected, test_options());
    for (const QuantizeJob& job : group_jobs(whole, p.groups)) quantize_reference(job);
    const GpuGuarded out(
        c.spec.spec, p.capacity, kCols,
        quantized_grouped_sizes(c.spec.spec, p.capacity, kCols, p.experts, c.wanted), p.experts,
        stream);
    quantize_grouped(GpuInput(c.x, stream, cases_.up_to(3)), there, out, gpu_options(), stream);
    ASSERT_EQ(out.difference_from(expected), "") << c.spec.name << " " << p.experts << " experts";
    ASSERT_EQ(difference("status", to_host(status, stream), p.status), "");
  }

  void partial(int64_t seed) {
    const PartialProblem p = random_problem(static_cast<uint64_t>(seed));
    const PartialRun host{.aligned = p.aligned},
        gpu{.aligned = p.aligned, .shard_only = cases_.coin(), .device = kGpu};
    ASSERT_EQ(run_partial_cast(p.weights, {host, gpu}), "");
  }

 protected:
  FuzzCases cases_;
};

TEST_F(FuzzGpu, RandomProblemsEqualTheReference) { for_fuzz_seconds(cases_, *this); }

}  // namespace
}  // namespace moiety::quant
