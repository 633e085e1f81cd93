#include "moiety/gtp/sharded_weight.h"

#include "moiety/base/error.h"

namespace moiety::gtp {
namespace {

TensorView first_rows(const TensorView& x, const ArraySpec& spec) {
  if (!x.defined()) return x;
  TensorView out = x;
  for (int d = 0; d < spec.dims; ++d) out = out.slice(d, 0, spec.sizes[d]);
  return out;
}

}  // namespace

const TensorView& ShardedWeight::array(Array array) const {
  switch (array) {
    case Array::kRowData:
      return codec.quantized() ? quantized.row_data : data;
    case Array::kRowScales:
      return quantized.row_scales;
    case Array::kColData:
      return quantized.col_data;
    case Array::kColScales:
      return quantized.col_scales;
  }
  return data;
}

void check_weight(const ShardedWeight& w) {
  check_layout(w.name, w.layout);
  const int64_t s = w.layout.shard_rows(), K = w.layout.slice_cols();
  const std::string op = "gtp weight " + w.name;
  MOIETY_CHECK(w.layout.gtp_size == 1 || w.layout.align % w.codec.align() == 0,
               "{}: rows are aligned to {}, expected a multiple of {} for {}", op, w.layout.align,
               w.codec.align(), w.codec.name());
  if (!w.codec.quantized()) {
    check_tensor(op.c_str(), "data", w.data, w.codec.storage(), {s, K});
    MOIETY_CHECK(w.data.contiguous(), "{}: data is {}, expected no gaps", op, w.data.describe());
  } else {
    const QuantizedView& q = w.quantized;
    MOIETY_CHECK(
        q.rows == s && q.cols == K && q.spec == w.codec.spec() && q.layout == ScaleLayout::kCompact,
        "{}: the shard is [{}, {}] of {}, scales {}, expected [{}, {}] of {}, compact", op, q.rows,
        q.cols, name(q.spec.format), name(q.layout), s, K, w.codec.name());
    check_quantized(op.c_str(), q);
    MOIETY_CHECK(q.row_data.defined() && (w.codec.one_payload() || q.col_data.defined()),
                 "{}: {} codes are missing", op, q.row_data.defined() ? "column" : "row");
    MOIETY_CHECK(!is_tensor_scaled(q.spec.format) || (q.amax.defined() && q.tensor_scale.defined()),
                 "{}: {} is missing", op, q.amax.defined() ? "tensor_scale" : "amax");
  }
  if (!w.main_grad.defined()) return;
  const DType main = w.main_grad.dtype();
  check_tensor(op.c_str(), "main_grad", w.main_grad,
               main == DType::kBFloat16 ? main : DType::kFloat32, {s, K});
  MOIETY_CHECK(K <= 1 || w.main_grad.stride(1) == 1,
               "{}: main_grad is {}, expected contiguous columns", op, w.main_grad.describe());
}

QuantizedView first_rows(const QuantizedView& view, int64_t rows) {
  if (rows == view.rows) return view;
  QuantizedView out = view;
  const QuantizedSizes sizes = quantized_sizes(view.spec, rows, view.cols, {true, true});
  out.rows = rows;
  out.row_data = first_rows(view.row_data, sizes.row_data);
  out.col_data = first_rows(view.col_data, sizes.col_data);
  if (view.layout != ScaleLayout::kCompact) return out;
  out.row_scales = first_rows(view.row_scales, sizes.row_scales);
  out.col_scales = first_rows(view.col_scales, sizes.col_scales);
  return out;
}

}  // namespace moiety::gtp
