#include "moiety/formats/quantized.h"

#include "moiety/base/copy.h"
#include "moiety/quant/dequantize.h"
#include "moiety/quant/quantize.h"
#include "moiety/quant/scale_layout.h"
#include "moiety/quant/transpose.h"
#include "python/csrc/operators.h"

namespace moiety::torch_ops {
namespace {

QuantSpec spec_of(const Call& call, const std::string& format, const std::string& element,
                  bool pow2, bool row_scaled, bool rht) {
  const std::optional<Format> found = format_of(format);
  MOIETY_CHECK(found.has_value(), "moiety::{}: format is '{}', which is none", call.name(), format);
  MOIETY_CHECK(element == "e4m3" || element == "e5m2" || element == "e2m1",
               "moiety::{}: element is '{}', expected e4m3, e5m2 or e2m1", call.name(), element);
  QuantSpec spec = QuantSpec::of(*found);
  spec.element = element == "e4m3" ? DType::kE4M3 : element == "e5m2" ? DType::kE5M2 : DType::kE2M1;
  spec.pow2_scales = pow2;
  spec.row_scaled = row_scaled;
  spec.rht_col = rht;
  check_spec(call.name(), spec);
  return spec;
}

Direction direction_of(const Call& call, const std::string& direction) {
  MOIETY_CHECK(direction == "row" || direction == "col",
               "moiety::{}: direction is '{}', expected row or col", call.name(), direction);
  return direction == "row" ? Direction::kRow : Direction::kCol;
}

// An array as torch has it: codes and scales of a byte are uint8, which Python shows as what they
// are; flags are int32.
Tensor new_array(const Call& call, const ArraySpec& array) {
  const ScalarType dtype = array.dtype == DType::kFloat32  ? ScalarType::Float
                           : array.dtype == DType::kUInt32 ? ScalarType::Int
                                                           : ScalarType::Byte;
  if (array.dims == 0) return call.absent(dtype);
  return call.empty(Sizes(array.sizes.begin(), array.sizes.begin() + array.dims), dtype);
}

// The view of such a tensor with the core's dtype; undefined if the array is absent.
TensorView array_view(const Call& call, const char* argument, const Tensor& x,
                      const ArraySpec& array) {
  if (array.dims == 0 || (x.numel() == 0 && x.dim() == 1 && array.bytes() != 0)) return {};
  const DType stored = array.dtype == DType::kFloat32  ? DType::kFloat32
                       : array.dtype == DType::kUInt32 ? DType::kInt32
                                                       : DType::kUInt8;
  const TensorView plain = array.dims == 2 ? call.whole(argument, x, stored, {-1, -1})
                                           : call.whole(argument, x, stored, {-1});
  return {plain.raw(), array.dtype, plain.sizes(), plain.device()};
}

// The arrays that tell what a tensor is; absent ones are empty.
struct Arrays {
  const Tensor &row_data, &row_scales, &col_data, &col_scales, &amax, &tensor_scale;
};

QuantizedView view_of(const Call& call, const QuantSpec& spec, int64_t rows, int64_t cols,
                      const QuantizedSizes& sizes, const Arrays& arrays) {
  QuantizedView view;
  view.spec = spec;
  view.rows = rows;
  view.cols = cols;
  view.row_data = array_view(call, "row_data", arrays.row_data, sizes.row_data);
  view.row_scales = array_view(call, "row_scales", arrays.row_scales, sizes.row_scales);
  view.col_data = array_view(call, "col_data", arrays.col_data, sizes.col_data);
  view.col_scales = array_view(call, "col_scales", arrays.col_scales, sizes.col_scales);
  view.amax = array_view(call, "amax", arrays.amax, sizes.amax);
  view.tensor_scale = array_view(call, "tensor_scale", arrays.tensor_scale, sizes.tensor_scale);
  return view;
}

Directions all_of(const QuantSpec& spec) { return {true, !spec.row_scaled}; }

void zero(const Call& call, const TensorView& x) {
  if (x.defined() && x.bytes() > 0) fill_bytes(x, 0, call.stream());
}

// The argument that is quantized, and its groups.
struct Source {
  TensorView x;
  std::optional<gemm::Groups> groups;

  Source(Call& call, const Tensor& tensor, const Optional& splits)
      : x(call.view("x", tensor, call.operand("x", tensor), {-1, -1})) {
    if (splits) groups = call.groups(*splits, x.size(0));
  }
  QuantizedSizes sizes(const QuantSpec& spec, Directions wanted) const {
    return groups ? quantized_grouped_sizes(spec, x.size(0), x.size(1), groups->experts, wanted)
                  : quantized_sizes(spec, x.size(0), x.size(1), wanted);
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize(
    Tensor x, Optional rng, Optional splits, Optional amax, std::string format, std::string element,
    bool pow2, bool row_scaled, bool rht, bool row, bool col, int64_t tensor_id) {
  return guarded("quantize", [&] {
    Call call("quantize", x);
    QuantSpec spec = spec_of(call, format, element, pow2, row_scaled, rht);
    spec.rounding = rng ? Rounding::kStochastic : Rounding::kNearest;
    const Source source(call, x, splits);
    const QuantizedSizes sizes = source.sizes(spec, {row, col});
    ArraySpec flag{DType::kUInt32, 1, {source.groups ? source.groups->experts : 1, 0}};
    const Tensor row_data = new_array(call, sizes.row_data),
                 row_scales = new_array(call, sizes.row_scales),
                 col_data = new_array(call, sizes.col_data),
                 col_scales = new_array(call, sizes.col_scales),
                 amaxes = new_array(call, sizes.amax),
                 tensor_scale = new_array(call, sizes.tensor_scale), flags = new_array(call, flag);
    QuantizedView view =
        view_of(call, spec, source.x.size(0), source.x.size(1), sizes,
                {row_data, row_scales, col_data, col_scales, amaxes, tensor_scale});
    view.flags = array_view(call, "flags", flags, flag);
    for (const TensorView& words : {view.amax, view.tensor_scale, view.flags}) zero(call, words);
    quant::QuantizeOptions options;
    options.tensor_id = static_cast<uint32_t>(tensor_id);
    if (rng) {
      options.rng =
          static_cast<const quant::RngState*>(call.whole("rng", *rng, DType::kInt64, {2}).raw());
    }
    if (amax) {
      MOIETY_CHECK(view.amax.defined(), "moiety::quantize: amax is given, and {} has none", format);
      const TensorView given = array_view(call, "amax", *amax, sizes.amax);
      copy(view.amax, given, call.stream());
      options.amax_given = true;
    }
    if (source.groups) {
      quant::quantize_grouped(source.x, *source.groups, view, options, call.stream());
    } else {
      quant::quantize(source.x, view, options, call.stream());
    }
    call.check_data();
    return std::tuple(row_data, row_scales, col_data, col_scales, amaxes, tensor_scale, flags);
  });
}

Tensor compute_amax(Tensor x, Optional splits, std::string format, std::string element, bool pow2,
                    bool row_scaled, bool rht) {
  return guarded("compute_amax", [&] {
    Call call("compute_amax", x);
    const QuantSpec spec = spec_of(call, format, element, pow2, row_scaled, rht);
    const Source source(call, x, splits);
    const QuantizedSizes sizes = source.sizes(spec, all_of(spec));
    const Tensor amax = new_array(call, sizes.amax);
    QuantizedView view;
    view.spec = spec;
    view.rows = source.x.size(0);
    view.cols = source.x.size(1);
    view.amax = array_view(call, "amax", amax, sizes.amax);
    const Tensor scale = new_array(call, sizes.tensor_scale);  // asked for, and left alone
    view.tensor_scale = array_view(call, "tensor_scale", scale, sizes.tensor_scale);
    zero(call, view.amax);
    if (source.groups) {
      quant::compute_amax_grouped(source.x, *source.groups, view, {}, call.stream());
    } else {
      quant::compute_amax(source.x, view, {}, call.stream());
    }
    call.check_data();
    return amax;
  });
}

Tensor dequantize(Tensor row_data, Tensor row_scales, Tensor col_data, Tensor col_scales,
                  Tensor tensor_scale, std::string format, std::string element, bool pow2,
                  bool row_scaled, bool rht, int64_t rows, int64_t cols, std::string direction,
                  bool undo_rht, bool bfloat16) {
  return guarded("dequantize", [&] {
    Call call("dequantize", tensor_scale);
    const QuantSpec spec = spec_of(call, format, element, pow2, row_scaled, rht);
    const QuantizedView view = view_of(
        call, spec, rows, cols, quantized_sizes(spec, rows, cols, all_of(spec)),
        {row_data, row_scales, col_data, col_scales, call.absent(ScalarType::Float), tensor_scale});
    const Direction side = direction_of(call, direction);
    const quant::DequantizeOptions options{undo_rht};
    const quant::DequantizedShape shape = quant::dequantized_shape(view, side, options);
    const Tensor out =
        call.empty({shape.rows, shape.cols}, bfloat16 ? ScalarType::BFloat16 : ScalarType::Float);
    quant::dequantize(view, side, view_of(out), options, call.stream());
    return out;
  });
}

std::tuple<Tensor, Tensor, Tensor> transpose_quantized(Tensor row_data, Tensor row_scales,
                                                       Tensor amax, Tensor tensor_scale,
                                                       std::string format, std::string element,
                                                       bool pow2, int64_t rows, int64_t cols) {
  return guarded("transpose_quantized", [&] {
    Call call("transpose_quantized", tensor_scale);
    const QuantSpec spec = spec_of(call, format, element, pow2, false, false);
    const QuantizedSizes sizes = quantized_sizes(spec, rows, cols, {true, true});
    const Tensor col_data = new_array(call, sizes.col_data), amaxes = new_array(call, sizes.amax),
                 scales = new_array(call, sizes.tensor_scale);
    const QuantizedView view =
        view_of(call, spec, rows, cols, sizes,
                {row_data, row_scales, col_data, call.absent(ScalarType::Byte), amaxes, scales});
    if (view.amax.defined()) {
      copy(view.amax, array_view(call, "amax", amax, sizes.amax), call.stream());
    }
    copy(view.tensor_scale, array_view(call, "tensor_scale", tensor_scale, sizes.tensor_scale),
         call.stream());
    const quant::QuantizeItem item{{}, view, {}};
    quant::transpose_quantized(quant::QuantizeTable({&item, 1}), call.stream());
    return std::tuple(col_data, amaxes, scales);
  });
}

Tensor convert_scales(Tensor scales, Tensor tensor_scale, std::string format, std::string element,
                      bool pow2, bool rht, int64_t rows, int64_t cols, std::string direction,
                      std::string layout) {
  return guarded("convert_scales", [&] {
    Call call("convert_scales", tensor_scale);
    const QuantSpec spec = spec_of(call, format, element, pow2, false, rht);
    const QuantizedSizes sizes = quantized_sizes(spec, rows, cols, {true, true});
    const Direction side = direction_of(call, direction);
    const bool of_col = side == Direction::kCol && sizes.col_scales.dims > 0;
    const Tensor none = call.absent(ScalarType::Byte), floats = call.absent(ScalarType::Float);
    const QuantizedView view =
        view_of(call, spec, rows, cols, sizes,
                {none, of_col ? none : scales, none, of_col ? scales : none, floats, tensor_scale});
    for (const ScaleLayout known :
         {ScaleLayout::kSm100Swizzled, ScaleLayout::kPadded, ScaleLayout::kSm90MnMajor}) {
      if (layout != name(known)) continue;
      const ArraySpec array = quant::scale_layout_size(view, side, known);
      const Tensor out = new_array(call, array);
      quant::convert_scales(view, side, known, array_view(call, "out", out, array), call.stream());
      return out;
    }
    fail(ErrorKind::kInvalidArgument,
         "moiety::convert_scales: layout is '{}', expected sm100_swizzled, padded or sm90_mn_major",
         layout);
  });
}

}  // namespace moiety::torch_ops
