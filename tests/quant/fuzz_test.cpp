// Random problems on the fast CPU paths against the scalar reference.
#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/dequantize.h"
#include "tests/quant/fuzz_cases.h"

namespace moiety::quant {
namespace {

class Fuzz : public testing::Test {
 public:
  void tensor() {
    const FuzzCases::TensorCase c = cases_.tensor();
    const auto guarded = [&] { return Guarded(c.spec.spec, c.shape.rows, c.shape.cols, c.wanted); };
    const Guarded expected = guarded(), out = guarded();
    quantize_reference(make_quantize_job("reference", c.x, expected, c.options));
    quantize(c.x, out, c.options, Stream());
    ASSERT_EQ(difference(out, expected), "")
        << c.spec.name << " " << name(c.shape) << " " << c.x.view().describe();
    ASSERT_TRUE(out.guards_intact()) << c.spec.name << " " << name(c.shape);
    const Direction d = c.wanted.row ? Direction::kRow : Direction::kCol;
    if (d == Direction::kCol && c.spec.spec.format == Format::kMxfp8Tile32) return;
    values(expected, d, Dequantized::kValues);
    values(expected, d, Dequantized::kOperand);
  }

  void values(const QuantizedView& x, Direction d, Dequantized what) {
    const bool turned = d == Direction::kCol && !is_mxfp8(x.spec.format);
    const bool rotated = d == Direction::kCol && x.spec.rht_col;
    const bool undo = rotated && what == Dequantized::kValues && cases_.coin();
    const int64_t rows = turned ? x.cols : x.rows;
    int64_t cols = turned ? x.rows : x.cols;
    if (rotated && !undo) cols = (cols + 15) / 16 * 16;
    const DType dtype = what == Dequantized::kOperand ? DType::kBFloat16 : cases_.any_dtype();
    const Tensor expected(dtype, {rows, cols + cases_.up_to(4)});
    const Tensor out(dtype, expected.view().sizes());
    const TensorView to = out.view().slice(1, 0, cols);
    if (what == Dequantized::kOperand) {
      dequantize_operand(x, d, to, Stream());
    } else {
      dequantize(x, d, to, {.undo_rht = undo}, Stream());
    }
    dequantize_reference(
        make_dequantize_job("reference", x, d, expected.view().slice(1, 0, cols), what, undo));
    ASSERT_EQ(difference("values", out, expected), "") << name(x.spec.format);
  }

  void groups() {
    FuzzCases::GroupCase c = cases_.groups();
    const Guarded expected = c.problem.output(c.spec.spec, c.wanted, 0xA5);
    const Guarded out = c.problem.output(c.spec.spec, c.wanted, 0xA5);
    const QuantizeJob whole =
        make_grouped_job("reference", c.x, c.problem.groups, expected, test_options());
    for (const QuantizeJob& job : group_jobs(whole, c.problem.groups)) quantize_reference(job);
    quantize_grouped(c.x, c.problem.groups, out, test_options(), Stream());
    ASSERT_EQ(difference(out, expected), "") << c.spec.name << " " << c.problem.experts;
    ASSERT_TRUE(out.guards_intact()) << c.spec.name;
  }

  void partial(int64_t seed) {
    const PartialProblem p = random_problem(static_cast<uint64_t>(seed));
    ASSERT_EQ(run_partial_cast(p.weights, {{.aligned = p.aligned, .reference = true},
                                           {.aligned = p.aligned, .shard_only = cases_.coin()}}),
              "");
  }

 protected:
  FuzzCases cases_;
};

TEST_F(Fuzz, RandomProblemsEqualTheReference) { for_fuzz_seconds(cases_, *this); }

}  // namespace
}  // namespace moiety::quant
