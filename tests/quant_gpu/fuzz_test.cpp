// Random problems on a GPU against the CPU reference, for MOIETY_FUZZ_SECONDS (2 if not set) from
// MOIETY_FUZZ_SEED on. A failure names the seed of its problem.
#include <chrono>
#include <random>

#include "moiety/quant/dequantize.h"
#include "moiety/quant/dequantize_job.h"
#include "moiety/quant/quantize.h"
#include "tests/quant/grouped_cases.h"
#include "tests/quant/partial_cast_cases.h"
#include "tests/quant_gpu/gpu_cases.h"

namespace moiety::quant {
namespace {

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoll(text, nullptr, 10) : otherwise;
}

class FuzzGpu : public QuantGpuTest {
 protected:
  int64_t up_to(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n)(random_); }
  bool coin() { return up_to(1) == 1; }
  template <class T>
  const T& one_of(const std::vector<T>& all) {
    return all[static_cast<size_t>(up_to(static_cast<int64_t>(all.size()) - 1))];
  }
  Data any_data() { return kAllData[up_to(std::size(kAllData) - 1)]; }
  DType any_dtype() { return coin() ? DType::kBFloat16 : DType::kFloat32; }

  void tensor() {
    const SpecCase& c = one_of(specs_);
    const int64_t most = up_to(9) == 0 ? 700 : 150;
    const Shape shape{up_to(most), up_to(most)};
    const Input x(any_dtype(), shape, any_data(), up_to(2) * up_to(5),
                  static_cast<uint32_t>(random_()));
    const Directions wanted = one_of(directions_of(c.spec));
    QuantizeOptions options = test_options();
    if (coin()) {
      options.row0 = 16 * up_to(50);
      options.col0 = 16 * up_to(50);
      options.full_rows = options.row0 + shape.rows + up_to(100);
      options.full_cols = options.col0 + shape.cols + up_to(100);
    }
    const Guarded expected = reference(x, c.spec, wanted, options);
    const GpuInput there(x, stream, up_to(3));
    const GpuGuarded out(c.spec, shape.rows, shape.cols, wanted, stream);
    quantize(there, out, gpu_options(options), stream);
    ASSERT_EQ(out.difference_from(expected), "")
        << c.name << " " << name(shape) << " " << x.view().describe();
    values(expected, out, wanted.row ? Direction::kRow : Direction::kCol);
  }

  void values(const QuantizedView& host, const QuantizedView& gpu, Direction d) {
    const bool turned = d == Direction::kCol && !is_mxfp8(host.spec.format);
    if (d == Direction::kCol && host.spec.format == Format::kMxfp8Tile32) return;
    const bool rotated = d == Direction::kCol && host.spec.rht_col, undo = rotated && coin();
    const int64_t rows = turned ? host.cols : host.rows;
    int64_t cols = turned ? host.rows : host.cols;
    if (rotated && !undo) cols = (cols + 15) / 16 * 16;
    const Tensor expected(any_dtype(), {rows, cols + up_to(4)});
    const Tensor there(expected.view().dtype(), expected.view().sizes(), kGpu);
    dequantize(gpu, d, there.view().slice(1, 0, cols), {.undo_rht = undo}, stream);
    dequantize_reference(make_dequantize_job("test", host, d, expected.view().slice(1, 0, cols),
                                             Dequantized::kValues, undo));
    ASSERT_EQ(difference("values", to_host(there, stream), expected), "") << name(host.spec.format);
  }

  void groups() {
    const SpecCase& c = one_of(specs_);
    if (is_tile(c.spec.format)) return;
    Routing routing{"", {}, up_to(3), up_to(50)};
    for (int64_t e = up_to(40); e > 0; --e) routing.counts.push_back(coin() ? up_to(150) : 0);
    Problem p(routing);
    // Broken begins and counts too.
    if (up_to(3) == 0 && p.experts > 0) {
      p.begin.data<int64_t>()[up_to(p.experts)] = up_to(p.capacity) - 5;
      p.count.data<int64_t>()[up_to(p.experts - 1)] = up_to(300) - 20;
    }
    const Tensor x(any_dtype(), {p.capacity, kCols});
    fill(x, any_data(), static_cast<uint32_t>(random_()));
    const Directions wanted = one_of(directions_of(c.spec));
    const Guarded expected = p.output(c.spec, wanted, 0xA5);
    const Tensor begin = to_gpu(p.begin, stream), count = to_gpu(p.count, stream),
                 status = to_gpu(p.status, stream);
    const RowGroups there{count, begin, status, p.experts, p.capacity, 0};
    const QuantizeJob whole = make_grouped_job("test", x, p.groups, expected, test_options());
    for (const QuantizeJob& job : group_jobs(whole, p.groups)) quantize_reference(job);
    const GpuGuarded out(c.spec, p.capacity, kCols,
                         quantized_grouped_sizes(c.spec, p.capacity, kCols, p.experts, wanted),
                         p.experts, stream);
    quantize_grouped(GpuInput(x, stream, up_to(3)), there, out, gpu_options(), stream);
    ASSERT_EQ(out.difference_from(expected), "") << c.name << " " << p.experts << " experts";
    ASSERT_EQ(difference("status", to_host(status, stream), p.status), "");
  }

  void partial(int64_t seed) {
    const PartialProblem p = random_problem(static_cast<uint64_t>(seed));
    const PartialRun host{.aligned = p.aligned},
        gpu{.aligned = p.aligned, .shard_only = coin(), .device = kGpu};
    ASSERT_EQ(run_partial_cast(p.weights, {host, gpu}), "");
  }

  std::mt19937_64 random_;
  const std::vector<SpecCase> specs_ = spec_cases();
};

TEST_F(FuzzGpu, RandomProblemsEqualTheReference) {
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::seconds(setting("MOIETY_FUZZ_SECONDS", 2));
  int64_t seed = setting("MOIETY_FUZZ_SEED", 1);
  const int64_t first = seed;
  for (; std::chrono::steady_clock::now() < end; ++seed) {
    SCOPED_TRACE(text("MOIETY_FUZZ_SEED={}", seed));
    random_.seed(static_cast<uint64_t>(seed));
    if (seed % 4 == 0) {
      ASSERT_NO_FATAL_FAILURE(groups());
    } else if (seed % 4 == 1) {
      ASSERT_NO_FATAL_FAILURE(partial(seed));
    } else {
      ASSERT_NO_FATAL_FAILURE(tensor());
    }
  }
  RecordProperty("problems", static_cast<int>(seed - first));
}

}  // namespace
}  // namespace moiety::quant
