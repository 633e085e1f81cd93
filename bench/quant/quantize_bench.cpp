// Quantizers, dequantization for GEMMs, layouts, partial casts and grouped quantization. The value
// counts every input byte once per pass and every output byte once; the ratio is to a large copy in
// the same run, of grouped rows to as many ungrouped ones. The peer is bench/peers/quantize.py,
// which takes the cases from --list.
#include <cstring>
#include <functional>
#include <optional>

#include "bench/harness.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/base/parallel.h"
#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/dequantize.h"
#include "moiety/quant/partial_cast.h"
#include "moiety/quant/quantize/quantize_job.h"
#include "moiety/quant/requantize.h"
#include "moiety/quant/scale_layout.h"
#include "moiety/quant/transpose.h"

namespace moiety::bench {
namespace {

using namespace quant;

constexpr Format kFormats[] = {
    Format::kFp8Tensor,   Format::kFp8Block1x128, Format::kFp8Block128x128, Format::kMxfp8,
    Format::kMxfp8Tile32, Format::kNvfp4,         Format::kNvfp4Tile16};
constexpr Directions kRow{true, false}, kBoth{true, true};
constexpr uint8_t kPoison = 0xA5;

struct Shape {
  int64_t rows, cols;
};
// Shapes of training, with 32768 tokens and of weights; and one with ragged blocks.
constexpr Shape kFullShapes[] = {{32768, 7168}, {16384, 4096}, {8192, 8192}, {8192, 7100}};
constexpr Shape kQuickShapes[] = {{4096, 2048}, {2048, 2000}};

struct Settings {
  std::string device = "cpu", only;
  int threads = thread_budget();
  int64_t rows = 0, cols = 0;
  bool full = false, list = false;
};

// Targets for a GPU, and for all cores of the CPU.
struct Target {
  double gpu, cpu;
};
constexpr Target kOneDirection{0.85, 0.80}, kTwoDirections{0.75, 0.60}, kRandom{0.60, 0.40};

// The device on which the program runs, and the rate of a copy there.
class Machine {
 public:
  explicit Machine(const Settings& settings) : settings_(&settings) {
    if (settings.device == "cuda") device_ = {DeviceType::kCuda, 0};
    require_device("quantize_bench", device_);
    stream_ = Stream::on(device_);
  }

  const Stream& stream() const { return stream_; }
  bool wanted(const std::string& name) const { return bench::wanted(name, settings_->only); }
  // Times run; on a GPU for a shorter time, since times vary little there.
  Timing time(const std::function<void(int64_t)>& run) const {
    return measure(run, stream_, on_gpu() ? 0.1 : 0.3);
  }

  Tensor empty(DType dtype, std::span<const int64_t> sizes) const {
    return Tensor(dtype, sizes, device_, "operand");
  }
  Tensor here(const TensorView& x) const {
    Tensor out = empty(x.dtype(), x.sizes());
    copy(out, x, stream_);
    stream_.synchronize();
    return out;
  }
  Tensor on_host(const TensorView& x) const {
    Tensor out(x.dtype(), x.sizes());
    copy(out, x, stream_);
    stream_.synchronize();
    return out;
  }
  QuantizedTensor quantized(const QuantSpec& spec, Shape s, Directions wanted) const {
    return QuantizedTensor(spec, s.rows, s.cols, wanted, device_);
  }
  void poison(const QuantizedView& v) const {
    for (const TensorView& a :
         {v.row_data, v.row_scales, v.col_data, v.col_scales, v.amax, v.tensor_scale}) {
      if (a.defined()) fill_bytes(a, kPoison, stream_);
    }
  }

  // Measures the copy that others are compared with: every core copies a part of its own, in the
  // faster of two ways.
  void measure_copy() {
    const int64_t bytes = int64_t{256} << 20;
    const Tensor from = empty(DType::kUInt8, std::array{bytes});
    const Tensor to = empty(DType::kUInt8, std::array{bytes});
    fill_bytes(from, 1, stream_);
    Timing best;
    for (const int64_t grain : {bytes / settings_->threads, int64_t{64} << 10}) {
      const Timing time = measure(
          [&](int64_t) {
            if (device_.type == DeviceType::kCuda) return copy(to, from, stream_);
            parallel_for(bytes, grain, [&](int64_t begin, int64_t end) {
              std::memcpy(to.data<uint8_t>() + begin, from.data<uint8_t>() + begin,
                          static_cast<size_t>(end - begin));
            });
          },
          stream_);
      if (best.ms == 0 || time.ms < best.ms) best = time;
    }
    copy_rate_ = giga(2.0 * static_cast<double>(bytes), best.ms);
    Row row{"copy", "256 MiB", copy_rate_, "GB/s", best};
    row.device = device_;
    print(row);
  }

  // run(i) moves `bytes`; `small_copy`, if there is one, copies as many.
  void report(const std::string& name, const std::string& label, double bytes, Target target,
              const std::function<void(int64_t)>& run,
              const std::function<void(int64_t)>& small_copy = {}) const {
    const Timing time = this->time(run);
    Row row{name, label, giga(bytes, time.ms), "GB/s", time, "copy"};
    row.ratio = row.value / copy_rate_;
    row.target = on_gpu() ? target.gpu : target.cpu;
    row.device = device_;
    if (small_copy) {
      row.more = text("\"ratio_to_small_copy\": {:.3f}", this->time(small_copy).ms / time.ms);
    }
    print(row);
  }
  bool on_gpu() const { return device_.type == DeviceType::kCuda; }
  Device device() const { return device_; }

 private:
  const Settings* settings_;
  Device device_;
  Stream stream_;
  double copy_rate_ = 0;
};

std::string label(Shape s, const char* dtype = "bf16") {
  return text("{}x{} {}", s.rows, s.cols, dtype);
}

double bytes_of(const TensorView& a) { return a.defined() ? static_cast<double>(a.bytes()) : 0; }
double output_bytes(const QuantizedView& v) {
  return bytes_of(v.row_data) + bytes_of(v.row_scales) + bytes_of(v.col_data) +
         bytes_of(v.col_scales);
}

void expect_equal(const std::string& what, const TensorView& got, const TensorView& expected) {
  if (!expected.defined()) return;
  const auto *a = static_cast<const uint8_t*>(got.raw()),
             *b = static_cast<const uint8_t*>(expected.raw());
  if (std::memcmp(a, b, static_cast<size_t>(expected.bytes())) == 0) return;
  for (int64_t i = 0; i < expected.bytes(); ++i) {
    MOIETY_CHECK(a[i] == b[i], "{}: byte {} is {}, the reference has {}", what, i, int(a[i]),
                 int(b[i]));
  }
}

// The reference's result; for a GPU that of the CPU, which equals it and takes less time.
void run_on_host(const Machine& m, const QuantizeJob& job) {
  m.on_gpu() ? quantize_cpu({&job, 1}) : quantize_reference(job);
}
void run_on_host(const Machine& m, const DequantizeJob& job) {
  m.on_gpu() ? dequantize_cpu(job) : dequantize_reference(job);
}

// Compares the arrays of `got`, wherever they are, with those of a tensor on the host.
void expect_equal(const Machine& m, const std::string& what, const QuantizedView& got,
                  const QuantizedView& expected) {
  const auto compare = [&](const char* array, const TensorView& a, const TensorView& b) {
    if (b.defined()) expect_equal(what + " " + array, m.on_host(a), b);
  };
  compare("row_data", got.row_data, expected.row_data);
  compare("row_scales", got.row_scales, expected.row_scales);
  compare("col_data", got.col_data, expected.col_data);
  compare("col_scales", got.col_scales, expected.col_scales);
}

// ---- one matrix

// Matrices of a shape, which the cases take in turn.
class Inputs {
 public:
  Inputs(const Machine& m, Shape s) : shape(s) {
    const int64_t n = copies(2 * s.rows * s.cols);
    for (int64_t i = 0; i < n; ++i) {
      Tensor host = random_tensor(DType::kBFloat16, {s.rows, s.cols}, static_cast<uint32_t>(i));
      x.push_back(m.here(host));
      if (i == 0) first = std::move(host);
    }
  }
  double bytes() const { return bytes_of(first); }
  // Whether results are checked: those of the largest shape would take longer than the
  // measurements, and the others need the same kernels.
  bool checked() const { return first.view().numel() <= int64_t{1} << 27; }

  Shape shape;
  Tensor first;  // on the host
  std::vector<Tensor> x;
};

// Casts of the inputs, and further operations on the results.
class Cast {
 public:
  Cast(const Machine& m, const Inputs& in, QuantSpec spec, Directions wanted)
      : m_(&m), in_(&in), spec_(spec), wanted_(wanted) {
    const RngState state{5, 1};
    Tensor words(DType::kUInt64, {2});
    std::memcpy(words.data<uint64_t>(), &state, sizeof state);
    rng_ = m.here(words);
    for (size_t i = 0; i < in.x.size(); ++i) out_.push_back(m.quantized(spec, in.shape, wanted));
  }

  void run(int64_t i) const { quantize(x(i), out(i), options(rng_), m_->stream()); }
  const QuantizedTensor& out(int64_t i) const { return out_[i % std::ssize(out_)]; }
  const Tensor& x(int64_t i) const { return in_->x[i % std::ssize(in_->x)]; }
  // An input is read once more where the scale of the tensor has to be found first.
  double bytes() const {
    const bool twice = is_tensor_scaled(spec_.format) && !spec_.row_scaled;
    return (twice ? 2 : 1) * in_->bytes() + output_bytes(out_[0]);
  }
  void fill() const {
    for (int64_t i = 0; i < std::ssize(out_); ++i) run(i);
    m_->stream().synchronize();
  }
  // The first result.
  void check(const std::string& what) const {
    if (!in_->checked()) return;
    m_->poison(out(0));
    run(0);
    expect_equal(*m_, what, out(0), expected());
  }
  QuantizedTensor expected() const {
    QuantizedTensor out(spec_, in_->shape.rows, in_->shape.cols, wanted_);
    const RngState state{5, 1};
    QuantizeOptions o = options({});
    if (spec_.rounding == Rounding::kStochastic) o.rng = &state;
    const QuantizeJob job = make_quantize_job("quantize_bench", in_->first, out, o);
    run_on_host(*m_, job);
    return out;
  }

 private:
  QuantizeOptions options(const std::optional<TensorView>& rng) const {
    QuantizeOptions out;
    out.tensor_id = 7;
    if (spec_.rounding == Rounding::kStochastic && rng) {
      out.rng = static_cast<const RngState*>(rng->raw());
    }
    return out;
  }

  const Machine* m_;
  const Inputs* in_;
  QuantSpec spec_;
  Directions wanted_;
  Tensor rng_;
  std::vector<QuantizedTensor> out_;
};

void cast(const Machine& m, const Inputs& in, const std::string& name, QuantSpec spec,
          Directions wanted, Target target) {
  if (!m.wanted(name)) return;
  const Cast c(m, in, spec, wanted);
  c.check(name);
  m.report(name, label(in.shape), c.bytes(), target, [&](int64_t i) { c.run(i); });
}

// Measures compute_amax, and the cast with its result.
void amax(const Machine& m, const Inputs& in) {
  const std::string name = "quantize.amax";
  if (!m.wanted(name)) return;
  const Cast c(m, in, QuantSpec::of(Format::kNvfp4), kRow);
  const auto run = [&](int64_t i) { compute_amax(c.x(i), c.out(i), {}, m.stream()); };
  if (in.checked()) {
    run(0);
    const QuantizedTensor expected = c.expected();
    expect_equal(name, m.on_host(c.out(0).view().amax.slice(0, 0, 1)),
                 expected.view().amax.slice(0, 0, 1));
  }
  m.report(name, label(in.shape), in.bytes(), kOneDirection, run);
}

void operand(const Machine& m, const Inputs& in, Format format) {
  const std::string name = text("dequantize_operand.{}", moiety::name(format));
  if (!m.wanted(name)) return;
  const Cast c(m, in, QuantSpec::of(format), kRow);
  c.fill();
  std::vector<Tensor> out;
  for (size_t i = 0; i < in.x.size(); ++i) {
    out.push_back(m.empty(DType::kBFloat16, std::array{in.shape.rows, in.shape.cols}));
  }
  const auto run = [&](int64_t i) {
    dequantize_operand(c.out(i), Direction::kRow, out[i % std::ssize(out)], m.stream());
  };
  if (in.checked()) {
    fill_bytes(out[0], kPoison, m.stream());
    run(0);
    const QuantizedTensor codes = c.expected();
    const Tensor expected(DType::kBFloat16, {in.shape.rows, in.shape.cols});
    run_on_host(m, make_dequantize_job(name.c_str(), codes, Direction::kRow, expected,
                                       Dequantized::kOperand, false));
    expect_equal(name, m.on_host(out[0]), expected);
  }
  m.report(name, label(in.shape), output_bytes(c.out(0)) + in.bytes(), kOneDirection, run);
}

void transpose(const Machine& m, const Inputs& in, Format format) {
  const std::string name = text("transpose_quantized.{}", moiety::name(format));
  if (!m.wanted(name)) return;
  const Cast c(m, in, QuantSpec::of(format), kBoth);
  c.fill();
  std::vector<QuantizeTable> tables;
  for (size_t i = 0; i < in.x.size(); ++i) {
    const QuantizeItem item{{}, c.out(static_cast<int64_t>(i)), {}};
    tables.emplace_back(std::span(&item, 1));
  }
  const auto run = [&](int64_t i) {
    transpose_quantized(tables[i % std::ssize(tables)], m.stream());
  };
  if (in.checked()) {
    fill_bytes(c.out(0).view().col_data, kPoison, m.stream());
    run(0);
    expect_equal(m, name, c.out(0), c.expected());
  }
  const QuantizedView& v = c.out(0);
  m.report(name, label(in.shape), bytes_of(v.row_data) + bytes_of(v.col_data), kTwoDirections, run);
}

// Columns of rows that came quantized, from their codes; and by the two calls that define them, which
// store the values between.
void requantize(const Machine& m, const Inputs& in, Format format) {
  const std::string name = text("requantize_col.{}", moiety::name(format));
  if (!m.wanted(name)) return;
  constexpr Directions kCol{false, true};
  const Cast c(m, in, QuantSpec::of(format), kRow);
  c.fill();
  const QuantSpec spec = QuantSpec::of(format);
  std::vector<QuantizedTensor> out;
  for (size_t i = 0; i < in.x.size(); ++i) out.push_back(m.quantized(spec, in.shape, kCol));
  const Tensor values = m.empty(DType::kBFloat16, std::array{in.shape.rows, in.shape.cols});
  const auto run = [&](int64_t i, const TensorView& through) {
    requantize_col(c.out(i), out[i % std::ssize(out)], {}, through, m.stream());
  };
  if (in.checked()) {
    const QuantizedTensor rows = c.expected(), expected(spec, in.shape.rows, in.shape.cols, kCol);
    requantize_col(rows, expected, {}, {}, Stream());
    for (const TensorView& through : {TensorView(), values.view()}) {
      m.poison(out[0]);
      run(0, through);
      expect_equal(m, name, out[0], expected);
    }
  }
  const double bytes = output_bytes(c.out(0)) + output_bytes(out[0]);
  m.report(name, label(in.shape), bytes, kTwoDirections, [&](int64_t i) { run(i, {}); });
  m.report(name + ".two_calls", label(in.shape), bytes, kTwoDirections,
           [&](int64_t i) { run(i, values); });
}

// Measures layouts of scales, which are small: beside the large copy there is one of as many bytes,
// launch and all.
void scales(const Machine& m, const Inputs& in, Format format, ScaleLayout layout) {
  const std::string name = text("convert_scales.{}.{}", moiety::name(format), moiety::name(layout));
  if (!m.wanted(name)) return;
  const Cast c(m, in, QuantSpec::of(format), kRow);
  c.fill();
  const ArraySpec size = scale_layout_size(c.out(0), Direction::kRow, layout);
  std::vector<Tensor> out;
  for (size_t i = 0; i < in.x.size(); ++i) {
    out.push_back(m.empty(size.dtype, std::span(size.sizes.data(), size_t(size.dims))));
  }
  const auto run = [&](int64_t i) {
    convert_scales(c.out(i), Direction::kRow, layout, out[i % std::ssize(out)], m.stream());
  };
  if (in.checked()) {
    fill_bytes(out[0], kPoison, m.stream());
    run(0);
    // Compact scales from the result must be those that it was made from.
    const QuantizedTensor expected = c.expected();
    const QuantizedTensor back(QuantSpec::of(format), in.shape.rows, in.shape.cols, kRow);
    compact_scales(m.on_host(out[0]), layout, back, Direction::kRow, Stream());
    expect_equal(name, back.view().row_scales, expected.view().row_scales);
  }
  const double bytes = bytes_of(c.out(0).view().row_scales) + bytes_of(out[0]);
  const int64_t half = static_cast<int64_t>(bytes) / 2;
  std::vector<Tensor> from, to;
  for (size_t i = 0; i < in.x.size(); ++i) {
    from.push_back(m.empty(DType::kUInt8, std::array{half}));
    to.push_back(m.empty(DType::kUInt8, std::array{half}));
  }
  m.report(name, label(in.shape), bytes, kTwoDirections, run, [&](int64_t i) {
    copy(to[i % std::ssize(to)], from[i % std::ssize(from)], m.stream());
  });
}

void one_matrix(const Machine& m, Shape s) {
  const Inputs in(m, s);
  for (const Format f : kFormats) {
    cast(m, in, text("quantize.{}.row", name(f)), QuantSpec::of(f), kRow, kOneDirection);
  }
  for (const Format f : kFormats) {
    if (f == Format::kMxfp8Tile32) continue;  // has no arrays of its own for columns
    cast(m, in, text("quantize.{}.row_col", name(f)), QuantSpec::of(f), kBoth, kTwoDirections);
  }
  for (const Format f :
       {Format::kFp8Tensor, Format::kFp8Block1x128, Format::kMxfp8, Format::kNvfp4}) {
    QuantSpec spec = QuantSpec::of(f);
    spec.rounding = Rounding::kStochastic;
    cast(m, in, text("quantize.{}.row.stochastic", name(f)), spec, kRow, kRandom);
  }
  QuantSpec rotated = QuantSpec::of(Format::kNvfp4);
  rotated.rht_col = true;
  cast(m, in, "quantize.nvfp4.row_col.rht", rotated, kBoth, kRandom);
  rotated.rounding = Rounding::kStochastic;
  cast(m, in, "quantize.nvfp4.row_col.rht.stochastic", rotated, kBoth, kRandom);
  QuantSpec row_scaled = QuantSpec::of(Format::kNvfp4);
  row_scaled.row_scaled = true;
  cast(m, in, "quantize.nvfp4.row.row_scaled", row_scaled, kRow, kOneDirection);
  amax(m, in);
  for (const Format f : kFormats) operand(m, in, f);
  for (const Format f : {Format::kFp8Tensor, Format::kFp8Block128x128, Format::kNvfp4Tile16}) {
    transpose(m, in, f);
  }
  for (const Format f : {Format::kFp8Block1x128, Format::kMxfp8}) requantize(m, in, f);
  scales(m, in, Format::kNvfp4, ScaleLayout::kSm100Swizzled);
  scales(m, in, Format::kMxfp8, ScaleLayout::kSm100Swizzled);
  scales(m, in, Format::kMxfp8, ScaleLayout::kPadded);
  scales(m, in, Format::kFp8Block1x128, ScaleLayout::kSm90MnMajor);
}

// ---- partial casts

struct PartialCase {
  const char* label;
  int64_t tensors;
  std::vector<Shape> shapes;  // taken in turns, as formats are
  Target target;
};
constexpr Format kPartialFormats[] = {Format::kNvfp4Tile16, Format::kMxfp8Tile32,
                                      Format::kFp8Block128x128, Format::kMxfp8, Format::kFp8Tensor};

class Partial {
 public:
  Partial(const Machine& m, const PartialCase& c) : m_(&m) {
    std::vector<PartialCastItem> items;
    for (int64_t i = 0; i < c.tensors; ++i) {
      const Shape& s = c.shapes[i % std::ssize(c.shapes)];
      PartialCastItem item;
      item.spec = QuantSpec::of(kPartialFormats[i % std::size(kPartialFormats)]);
      item.rows = s.rows;
      item.cols = s.cols;
      item.end = s.rows * s.cols;
      item.col = item.spec.format == Format::kMxfp8;
      elements_ += item.end;
      items.push_back(item);
    }
    host_ = random_tensor(DType::kFloat32, {elements_}, 1);
    masters_ = m.here(host_);
    plan_.emplace(items, false);
    std::vector<PartialCastArrays> arrays;
    int64_t at = 0;
    for (const PartialCastItem& item : plan_->items()) {
      out_.push_back(m.quantized(item.spec, {item.rows, item.cols}, {true, item.col}));
      arrays.push_back({masters_.view().slice(0, at, at + item.end), out_.back()});
      at += item.end;
      written_ += output_bytes(out_.back());
    }
    table_.emplace(*plan_, arrays);
    reduction_ = m.empty(DType::kUInt8, std::array{plan_->reduction_bytes()});
  }

  void amax() const { partial_amax(*plan_, *table_, reduction_, m_->stream()); }
  void cast() const { partial_cast(*plan_, *table_, reduction_, m_->stream()); }
  double amax_bytes() const { return bytes_of(host_); }
  double cast_bytes() const { return bytes_of(host_) + bytes_of(reduction_) + written_; }

  // Checks tensors of all formats and shapes against casts of the whole.
  void check(const PartialCase& c) const {
    for (const QuantizedTensor& out : out_) m_->poison(out);
    amax();
    cast();
    const float* master = host_.data<float>();
    for (size_t i = 0; i < std::size(kPartialFormats) * c.shapes.size(); ++i) {
      const QuantizedView& v = out_[i];
      const Tensor x(DType::kBFloat16, {v.rows, v.cols});
      for (int64_t i = 0; i < v.rows * v.cols; ++i) x.data<bf16>()[i] = bf16(*master++);
      const QuantizedTensor expected(v.spec, v.rows, v.cols,
                                     {true, v.spec.format == Format::kMxfp8});
      const QuantizeJob job = make_quantize_job("quantize_bench", x, expected, {});
      run_on_host(*m_, job);
      expect_equal(*m_, text("{} of {}", c.label, moiety::name(v.spec.format)), v, expected);
    }
  }

 private:
  const Machine* m_;
  int64_t elements_ = 0;
  double written_ = 0;
  Tensor host_, masters_, reduction_;
  std::vector<QuantizedTensor> out_;
  std::optional<PartialCastPlan> plan_;
  std::optional<PartialCastTable> table_;
};

void partial(const Machine& m, const PartialCase& c) {
  if (!m.wanted("partial_amax") && !m.wanted("partial_cast")) return;
  const Partial p(m, c);
  p.check(c);
  m.report("partial_amax", c.label, p.amax_bytes(), c.target, [&](int64_t) { p.amax(); });
  p.amax();
  m.report("partial_cast", c.label, p.cast_bytes(), c.target, [&](int64_t) { p.cast(); });
}

void partial_casts(const Machine& m, bool full) {
  const std::vector<Shape> weights = full
                                         ? std::vector<Shape>{{2048, 7168}, {7168, 2048}}
                                         : std::vector<Shape>{{704, 1024}, {1024, 512}, {333, 896}};
  partial(m, {"64 mixed tensors fp32", 64, weights, {0.85, 0.80}});
  partial(m, {"1000 tensors of 65536 fp32", 1000, {{256, 256}}, {0.75, 0.60}});
}

// ---- groups

constexpr int64_t kExperts = 32;

// Rows of each expert; if skewed, the first has a quarter of all and some have none.
std::vector<int64_t> group_rows(int64_t rows, bool skewed) {
  std::vector<int64_t> out(kExperts);
  int64_t left = rows;
  for (int64_t e = 0; e + 1 < kExperts; ++e) {
    out[e] = skewed ? left / 4 : rows / kExperts + (e % 2 ? 13 : -13);
    left -= out[e];
  }
  out.back() = left;
  return out;
}

class Grouped {
 public:
  Grouped(const Machine& m, const Inputs& in, Format format, bool skewed)
      : m_(&m), in_(&in), spec_(QuantSpec::of(format)), counts_(group_rows(in.shape.rows, skewed)) {
    const Tensor begin(DType::kInt64, {kExperts + 1});
    for (int64_t e = 0; e < kExperts; ++e) {
      begin.data<int64_t>()[e + 1] = begin.data<int64_t>()[e] + counts_[e];
    }
    begin_ = m.here(begin);
    groups_.begin_E1 = begin_;
    groups_.experts = kExperts;
    groups_.capacity = in.shape.rows;
    const QuantizedSizes sizes =
        quantized_grouped_sizes(spec_, in.shape.rows, in.shape.cols, kExperts, kBoth);
    for (size_t i = 0; i < in.x.size(); ++i) {
      out_.emplace_back(spec_, in.shape.rows, in.shape.cols, sizes, m.device());
    }
  }

  void run(int64_t i) const {
    quantize_grouped(in_->x[i % std::ssize(in_->x)], groups_, out_[i % std::ssize(out_)], {},
                     m_->stream());
  }
  // Checks the rows of every group against a cast of the group alone.
  void check(const std::string& what) const {
    m_->poison(out_[0]);
    run(0);
    const Tensor data = m_->on_host(out_[0].view().row_data);
    const Tensor scales = m_->on_host(out_[0].view().row_scales);
    int64_t at = 0;
    for (const int64_t n : counts_) {
      const QuantizedTensor expected(spec_, n, in_->shape.cols, kRow);
      const QuantizeJob job =
          make_quantize_job("quantize_bench", in_->first.view().slice(0, at, at + n), expected, {});
      run_on_host(*m_, job);
      expect_equal(what, data.view().slice(0, at, at + n), expected.view().row_data);
      expect_equal(what, scales.view().slice(0, at, at + n), expected.view().row_scales);
      at += n;
    }
  }

 private:
  const Machine* m_;
  const Inputs* in_;
  QuantSpec spec_;
  std::vector<int64_t> counts_;
  Tensor begin_;
  RowGroups groups_;
  std::vector<QuantizedTensor> out_;
};

void grouped(const Machine& m, Shape s) {
  if (!m.wanted("quantize_grouped")) return;
  const Inputs in(m, s);
  for (const Format f : {Format::kFp8Block1x128, Format::kMxfp8, Format::kNvfp4}) {
    const Cast whole(m, in, QuantSpec::of(f), kBoth);
    for (const bool skewed : {false, true}) {
      const std::string name =
          text("quantize_grouped.{}.row_col{}", moiety::name(f), skewed ? ".skewed" : "");
      const Grouped groups(m, in, f, skewed);
      groups.check(name);
      const Timing ungrouped = m.time([&](int64_t i) { whole.run(i); });
      const Timing time = m.time([&](int64_t i) { groups.run(i); });
      Row row{name,
              text("{} E{}", label(s), kExperts),
              giga(whole.bytes(), time.ms),
              "GB/s",
              time,
              "ungrouped"};
      row.ratio = ungrouped.ms / time.ms;
      row.target = 0.95;
      row.device = m.device();
      print(row);
    }
  }
}

void run(Options& options) {
  Settings settings;
  options.choice("--device", settings.device, {"cpu", "cuda"}, "where")
      .number("--threads", settings.threads, "of the CPU")
      .word("--only", settings.only, kOnlyHelp)
      .number("--rows", settings.rows, "of one shape, with --cols, instead of some")
      .number("--cols", settings.cols, "of one shape")
      .flag("--full", settings.full, "the large shapes, which a GPU has by default")
      .flag("--list", settings.list, "print the shapes instead, for the peer");
  if (!options.parse()) return;
  set_thread_budget(settings.threads);
  const bool full = settings.full || settings.device == "cuda";
  std::vector<Shape> shapes(std::begin(kQuickShapes), std::end(kQuickShapes));
  if (full) shapes.assign(std::begin(kFullShapes), std::end(kFullShapes));
  if (settings.rows > 0 && settings.cols > 0) shapes = {{settings.rows, settings.cols}};
  if (settings.list) {
    for (const Shape s : shapes) {
      std::puts(
          text(R"({{"case": "{}", "rows": {}, "cols": {}}})", label(s), s.rows, s.cols).c_str());
    }
    return;
  }
  Machine machine(settings);
  machine.measure_copy();
  partial_casts(machine, full);
  for (const Shape s : shapes) one_matrix(machine, s);
  grouped(machine, shapes[0]);
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(
      argc, argv, "Quantizers against a copy: how near they are to what the memory gives.",
      moiety::bench::run);
}
