#include "moiety/moe/payload_rows.h"

#include <algorithm>
#include <optional>

#include "moiety/base/error.h"
#include "moiety/moe/slot_maps.h"
#include "moiety/quant/scale_layout.h"
#include "moiety/quant/scale_layout_job.h"

namespace moiety::moe {
namespace {

constexpr int kFormats = static_cast<int>(PayloadFormat::kNVFP4) + 1;
// There is one more name for the words of peers, which have three bits for the format.
constexpr const char* kNames[kFormats + 1] = {"bf16",     "fp16",  "fp32",  "fp8_e4m3",
                                              "fp8_e5m2", "mxfp8", "nvfp4", "?"};

QuantSpec spec_of(PayloadFormat format) {
  QuantSpec spec = QuantSpec::of(format == PayloadFormat::kMXFP8   ? Format::kMxfp8
                                 : format == PayloadFormat::kNVFP4 ? Format::kNvfp4
                                                                   : Format::kFp8Block1x128);
  if (format == PayloadFormat::kFP8E5M2) spec.element = DType::kE5M2;
  return spec;
}

std::optional<PayloadFormat> payload_format(const QuantSpec& spec) {
  for (int i = 0; i < kFormats; ++i) {
    const auto format = static_cast<PayloadFormat>(i);
    const bool quantized = format > PayloadFormat::kFP32;
    const QuantSpec wanted = spec_of(format);
    if (quantized && spec.format == wanted.format && spec.element == wanted.element) return format;
  }
  return std::nullopt;
}

// A part of a quantized payload, with its name for errors.
struct Part {
  const char* operation;
  std::string name;
  const TensorView& x;

  void check_matrix(const ArraySpec& expected) const {
    check_tensor(operation, name.c_str(), x, expected.dtype,
                 {expected.sizes[0], expected.sizes[1]});
    MOIETY_CHECK(x.size(0) == 0 || x.size(1) <= 1 || x.stride(1) == 1,
                 "{}: {} is {}; a row must be contiguous", operation, name, x.describe());
  }
  void check_vector(int64_t n) const {
    check_tensor(operation, name.c_str(), x, DType::kFloat32, {n});
  }
};

// Checks that hold for a payload that is sent and for one that receives.
PayloadFormat check_quantized_rows(const char* op, const char* argument, const QuantizedView& q,
                                   int64_t rows) {
  check_spec(op, q.spec);
  const std::optional<PayloadFormat> format = payload_format(q.spec);
  if (!format) {
    fail(ErrorKind::kUnsupported,
         "{}: {} is {} of {}; quantized rows travel as fp8_block_1x128, as mxfp8 of e4m3, or as "
         "nvfp4",
         op, argument, name(q.spec.format), name(q.spec.element));
  }
  MOIETY_CHECK(q.rows == rows && q.cols >= 1, "{}: {} is {}, expected {} rows of 1 element or more",
               op, argument, describe(q), rows);
  Part{op, text("{}.row_data", argument), q.row_data}.check_matrix(
      quantized_sizes(q.spec, q.rows, q.cols, {}).row_data);
  return *format;
}

void check_compact_scales(const char* op, const char* argument, const QuantizedView& q) {
  Part{op, text("{}.row_scales", argument), q.row_scales}.check_matrix(
      quantized_sizes(q.spec, q.rows, q.cols, {}).row_scales);
}

void check_scale_layout(const char* op, const char* argument, const QuantizedView& q,
                        const EpPlan& plan) {
  if (q.layout == ScaleLayout::kCompact) return check_compact_scales(op, argument, q);
  const bool swizzled = !is_fp8_block(q.spec.format);
  const ScaleLayout layout = swizzled ? ScaleLayout::kSm100Swizzled : ScaleLayout::kSm90MnMajor;
  if (q.layout != layout) {
    fail(ErrorKind::kUnsupported, "{}: {} wants {} scales; those of {} are written compact or {}",
         op, argument, name(q.layout), name(q.spec.format), name(layout));
  }
  MOIETY_CHECK(!swizzled || (plan.alignment % 128 == 0 && plan.capacity % 128 == 0),
               "{}: {} wants {} scales with alignment {} and capacity {}; both must be multiples "
               "of 128",
               op, argument, name(layout), plan.alignment, plan.capacity);
  QuantizedView shape;
  shape.spec = q.spec;
  shape.rows = q.rows;
  shape.cols = q.cols;
  const ArraySpec size = quant::scale_layout_size(shape, Direction::kRow, layout);
  const Part scales{op, text("{}.row_scales", argument), q.row_scales};
  if (swizzled) {
    check_tensor(op, scales.name.c_str(), scales.x, size.dtype, {size.sizes[0]});
  } else {
    scales.check_matrix(size);
  }
  MOIETY_CHECK(scales.x.contiguous(), "{}: {} is {}, expected no gaps", op, scales.name,
               scales.x.describe());
}

}  // namespace

const char* name(PayloadFormat format) { return kNames[static_cast<int>(format)]; }

RowParts row_parts(PayloadFormat format, int64_t model) {
  if (format <= PayloadFormat::kFP32) {
    return {.data = (format == PayloadFormat::kFP32 ? 4 : 2) * model};
  }
  const QuantizedSizes sizes = quantized_sizes(spec_of(format), 1, model, {});
  return {.data = sizes.row_data.bytes(),
          .scales = sizes.row_scales.bytes(),
          .row_scale = format == PayloadFormat::kNVFP4 ? int64_t{sizeof(float)} : 0};
}

bool wider(PayloadFormat a, PayloadFormat b) {
  constexpr int64_t kLong = 1024;
  return row_parts(a, kLong).bytes() > row_parts(b, kLong).bytes();
}

int64_t largest_record(PayloadFormat widest, int64_t model, int topk) {
  int64_t out = 0;
  for (int i = 0; i < kFormats; ++i) {
    const auto format = static_cast<PayloadFormat>(i);
    if (!wider(format, widest)) out = std::max(out, row_parts(format, model).record(topk));
  }
  return out;
}

int64_t largest_rest(PayloadFormat widest, int64_t model, int topk) {
  int64_t out = 0;
  for (int i = 0; i < kFormats; ++i) {
    const auto format = static_cast<PayloadFormat>(i);
    if (wider(format, widest)) continue;
    const RowParts parts = row_parts(format, model);
    out = std::max(out, RowParts{0, parts.scales, parts.row_scale}.record(topk));
  }
  return out;
}

PayloadFormat payload_format(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return PayloadFormat::kBF16;
    case DType::kFloat16:
      return PayloadFormat::kFP16;
    default:
      return PayloadFormat::kFP32;
  }
}

std::string describe(const Payload& x) {
  if (const auto* tensor = std::get_if<TensorView>(&x)) return tensor->describe();
  const auto& q = std::get<QuantizedView>(x);
  return text("{}[{}, {}]", name(q.spec.format), q.rows, q.cols);
}

void check_alone_on_gpu(const char* operation, const char* argument, const ExpertRows& rows) {
  const ScaleLayout layout = rows.scales.layout();
  if (layout != ScaleLayout::kCompact) {
    fail(ErrorKind::kUnsupported,
         "{}: {} wants {} scales; in a group of one rank on a GPU they are written compact",
         operation, argument, name(layout));
  }
  if (rows.source) {
    fail(ErrorKind::kUnsupported,
         "{}: in a group of one rank on a GPU rows do not come by source_C", operation);
  }
}

void check_payload_device(const char* operation, const char* argument, const Payload& x,
                          const Stream& stream) {
  if (const auto* tensor = std::get_if<TensorView>(&x)) {
    return check_device(operation, argument, *tensor, stream);
  }
  const auto& q = std::get<QuantizedView>(x);
  for (const auto& [part, view] : {std::pair{"row_data", q.row_data},
                                   {"row_scales", q.row_scales},
                                   {"tensor_scale", q.tensor_scale}}) {
    check_device(operation, text("{}.{}", argument, part).c_str(), view, stream);
  }
}

void check_rows(const char* operation, const char* argument, const TensorView& x, int64_t rows,
                int64_t model) {
  const bool payload =
      x.dtype() == DType::kBFloat16 || x.dtype() == DType::kFloat16 || x.dtype() == DType::kFloat32;
  if (x.defined() && !payload) {
    fail(ErrorKind::kUnsupported, "{}: {} is {}; rows are bfloat16, float16 or float32", operation,
         argument, x.describe());
  }
  check_tensor(operation, argument, x, x.dtype(), {rows, model});
  MOIETY_CHECK(x.size(0) == 0 || x.size(1) <= 1 || x.stride(1) == 1,
               "{}: {} is {}; a row must be contiguous", operation, argument, x.describe());
}

SourceRows source_rows(const char* op, const char* argument, const Payload& x, int64_t rows) {
  SourceRows out;
  if (const auto* tensor = std::get_if<TensorView>(&x)) {
    check_rows(op, argument, *tensor, rows, -1);
    out.format = payload_format(tensor->dtype());
    out.model = tensor->size(1);
    out.data = Rows(*tensor);
  } else {
    const auto& q = std::get<QuantizedView>(x);
    out.format = check_quantized_rows(op, argument, q, rows);
    out.model = q.cols;
    if (q.layout != ScaleLayout::kCompact) {
      fail(ErrorKind::kUnsupported, "{}: {} has {} scales; compact ones travel", op, argument,
           name(q.layout));
    }
    check_compact_scales(op, argument, q);
    out.data = Rows(q.row_data);
    out.scales = Rows(q.row_scales);
    if (out.format == PayloadFormat::kNVFP4) {
      const TensorView& scale = q.tensor_scale;
      Part{op, text("{}.tensor_scale", argument), scale}.check_vector(q.spec.row_scaled ? rows : 2);
      out.row_scale = q.spec.row_scaled ? Rows(scale) : Rows::repeated(scale);
    }
  }
  out.parts = row_parts(out.format, out.model);
  return out;
}

ExpertRows expert_rows(const char* op, const char* argument, const Payload& rows,
                       const Payload& from, const EpPlan& plan, const TensorView& values_C,
                       const TensorView& source_C) {
  MOIETY_CHECK(rows.index() == from.index(), "{}: {} is {}, what is sent is {}", op, argument,
               describe(rows), describe(from));
  ExpertRows out;
  out.values = Rows(values_C);
  out.has_values = values_C.defined();
  out.places = plan.capacity;
  if (source_C.defined()) {
    check_tensor(op, "source_C", source_C, DType::kInt32, {plan.capacity});
    out.source = source_C.data<int32_t>();
    out.places = mapped_rows(int(plan.rows_RR.size(0)), plan.tokens_max, plan.capacity);
  }
  if (const auto* tensor = std::get_if<TensorView>(&rows)) {
    const auto& x = std::get<TensorView>(from);
    check_rows(op, argument, *tensor, out.places, x.size(1));
    check_tensor(op, argument, *tensor, x.dtype(), {-1, -1});
    out.parts = row_parts(payload_format(x.dtype()), x.size(1));
    out.data = Rows(*tensor);
    return out;
  }
  const auto &q = std::get<QuantizedView>(rows), &x = std::get<QuantizedView>(from);
  const PayloadFormat format = check_quantized_rows(op, argument, q, out.places);
  MOIETY_CHECK(q.spec.format == x.spec.format && q.spec.element == x.spec.element &&
                   q.spec.pow2_scales == x.spec.pow2_scales && q.cols == x.cols,
               "{}: {} is {} of {}, pow2_scales {}; what is sent is {} of {}, pow2_scales {}", op,
               argument, describe(q), name(q.spec.element), q.spec.pow2_scales, describe(x),
               name(x.spec.element), x.spec.pow2_scales);
  if (q.col_data.defined() || q.col_scales.defined()) {
    fail(ErrorKind::kUnsupported,
         "{}: {} has a col direction, but rows alone travel; make it of the rows that came", op,
         argument);
  }
  check_scale_layout(op, argument, q, plan);
  out.parts = row_parts(format, q.cols);
  out.data = Rows(q.row_data);
  out.scales = ScaleRows(q);
  if (format != PayloadFormat::kNVFP4) return out;
  MOIETY_CHECK(q.spec.row_scaled, "{}: {} is not row_scaled, but each row brings its scale", op,
               argument);
  Part{op, text("{}.tensor_scale", argument), q.tensor_scale}.check_vector(out.places);
  out.row_scale = Rows(q.tensor_scale);
  return out;
}

ScaleRows::ScaleRows(const QuantizedView& x)
    : layout_(x.layout), compact_(x.row_scales), rows_(x.rows) {
  const ArraySpec one_row = quantized_sizes(x.spec, 1, x.cols, {}).row_scales;
  cols_ = one_row.sizes[1];
  bytes_ = one_row.bytes();
  if (layout_ == ScaleLayout::kCompact) return;
  const int64_t width = bytes_ / cols_;
  compact_ = Rows::repeated(x.row_scales);
  step_ = width * (quant::layout_index(layout_, rows_, cols_, 0, 4 / width) -
                   quant::layout_index(layout_, rows_, cols_, 0, 0));
}

std::byte* ScaleRows::word(int64_t r) const {
  return compact_[0] + bytes_ / cols_ * quant::layout_index(layout_, rows_, cols_, r, 0);
}

void ScaleRows::zero(int64_t r) const {
  if (layout_ == ScaleLayout::kCompact) {
    std::memset(compact_[r], 0, bytes_);
    return;
  }
  std::byte* to = word(r);
  for (int64_t i = 0; i < bytes_; i += 4, to += step_) std::memset(to, 0, 4);
}

void ScaleRows::zero_pads() const {
  if (layout_ != ScaleLayout::kSm90MnMajor) return;
  for (int64_t r = rows_; r < round_up(rows_, 4); ++r) zero(r);
}

void ExpertRows::zero(int64_t place) const {
  std::memset(data[place], 0, parts.data);
  if (parts.scales > 0) scales.zero(place);
  if (parts.row_scale > 0) std::memset(row_scale[place], 0, parts.row_scale);
}

}  // namespace moiety::moe
