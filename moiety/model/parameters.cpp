#include "moiety/model/parameters.h"

#include <cmath>

#include "moiety/model/weight_layout.h"

namespace moiety::model {

optim::ParamSpec matrix_spec(const std::string& name, int64_t rows, int64_t columns, float std) {
  optim::ParamSpec spec;
  spec.name = name;
  spec.tensors = {{name, {rows, columns}}};
  spec.row_map = {{.memory_row = 0, .tensor = 0, .logical_row = 0, .rows = rows}};
  spec.rows = rows;
  spec.row_elements = columns;
  spec.shape = {rows, columns};
  spec.init_std = std;
  return spec;
}

optim::ParamSpec weight_spec(const std::string& name, const gtp::Layout& layout, float std) {
  const gtp::Box slice = tp_slice(layout);
  optim::ParamSpec spec = matrix_spec(name, layout.slice_rows(), slice.cols.size(), std);
  spec.tensors[0].shape = {layout.rows, layout.cols};
  spec.row_map.clear();
  if (!slice.rows.empty()) spec.row_map = {{0, 0, slice.rows.begin, slice.rows.size()}};
  spec.first_column = slice.cols.begin;
  if (layout.tp_size > 1) spec.domain = {gtp::Axis::kGtp, gtp::Axis::kDp};
  spec.layout = layout;
  return spec;
}

optim::ParamSpec norm_spec(const std::string& name, int64_t n) {
  optim::ParamSpec spec = matrix_spec(name, 1, n, 0);
  spec.tensors[0].shape = {n};
  spec.shape = {n};
  spec.init = optim::InitKind::kOnes;
  spec.decay = false;
  return spec;
}

float residual_std(const Config& c) {
  return c.residual_scale ? c.init_std / std::sqrt(2 * static_cast<float>(c.layers)) : c.init_std;
}

optim::Parameter* ParameterCursor::next(const std::string& name) {
  MOIETY_CHECK(next_ < parameters_.size(), "model: parameter {} is missing", name);
  optim::Parameter& p = parameters_[next_++];
  MOIETY_CHECK(p.spec.name == name, "model: parameter {} stands in the place of {}", p.spec.name,
               name);
  const TensorView& w = p.weight;
  bool fits = w.defined() && w.contiguous() && w.dims() == static_cast<int>(p.spec.shape.size());
  for (int d = 0; fits && d < w.dims(); ++d) fits = w.size(d) == p.spec.shape[d];
  if (w.defined() || p.quantized.empty()) {
    MOIETY_CHECK(fits, "model: weight of {} is {}", name, w.describe());
  }
  MOIETY_CHECK(!p.grad.defined() ||
                   ((p.grad.dtype() == DType::kFloat32 || p.grad.dtype() == DType::kBFloat16) &&
                    p.grad.contiguous() && p.grad.numel() == p.spec.numel()),
               "model: gradient of {} is {}", name, p.grad.describe());
  return &p;
}

}  // namespace moiety::model
