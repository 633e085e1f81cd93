#include "moiety/gemm/quantized_operand.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "moiety/base/check_devices.h"
#include "moiety/base/copy.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/gemm/grouped_gemm_cuda.h"
#include "moiety/gemm/quantized_operand_cuda.h"
#include "moiety/quant/dequantize.h"
#include "moiety/quant/requantize.h"

namespace moiety::gemm {
namespace {

TensorView place(const ArraySpec& array, Arena& arena) {
  if (array.dims == 0) return {};
  return TensorView(arena.allocate(array.bytes()), array.dtype,
                    std::span(array.sizes.data(), array.dims), arena.device());
}

QuantizedView place(const QuantSpec& spec, int64_t rows, int64_t cols, const QuantizedSizes& sizes,
                    Arena& arena) {
  QuantizedView view;
  view.spec = spec;
  view.rows = rows;
  view.cols = cols;
  view.row_data = place(sizes.row_data, arena);
  view.row_scales = place(sizes.row_scales, arena);
  view.col_data = place(sizes.col_data, arena);
  view.col_scales = place(sizes.col_scales, arena);
  view.amax = place(sizes.amax, arena);
  view.tensor_scale = place(sizes.tensor_scale, arena);
  return view;
}

Directions only(Direction direction) {
  return {direction == Direction::kRow, direction == Direction::kCol};
}

bool lies_transposed(Format format, Direction direction) {
  return direction == Direction::kCol && !is_mxfp8(format);
}

// Whether the operand leaves FP8 block scales to the accumulators.
bool leaves_block_scales(const QuantSpec& spec) {
  return is_fp8_block(spec.format) && !spec.pow2_scales;
}

// `out` := the tensor scales of the direction of a view with `groups` groups.
void keep_tensor_scale(const QuantizedView& view, Direction direction, int64_t groups,
                       TensorView out, Stream stream) {
  const int64_t at = direction == Direction::kCol ? groups : 0;
  copy(out, view.tensor_scale.reshape({2 * groups}).slice(0, at, at + groups), stream);
}

quant::QuantizeOptions options(const QuantSpec& spec, const OperandCast& cast) {
  const RandomBits& random = cast.random;
  quant::QuantizeOptions o;
  o.delayed = cast.delayed;
  if (spec.rounding == Rounding::kNearest) return o;
  o.rng = random.rng;
  o.tensor_id = random.tensor_id;
  o.expert = random.expert;
  o.row0 = random.row0;
  o.full_rows = random.full_rows;
  o.col0 = random.col0;
  o.full_cols = random.full_cols;
  return o;
}

// The rows and columns of the operand of a matrix, with the tail that a transform adds.
struct OperandSize {
  int64_t rows, columns;
};
OperandSize operand_size(const QuantSpec& spec, Direction direction, int64_t rows, int64_t cols) {
  if (!lies_transposed(spec.format, direction)) return {rows, cols};
  return {cols, spec.rht_col ? round_up(rows, 16) : rows};
}

// Allocates the tensors that outlive the codes.
Operand allocate(const QuantSpec& spec, Direction direction, int64_t rows, int64_t cols,
                 int64_t groups, Arena& arena) {
  const OperandSize size = operand_size(spec, direction, rows, cols);
  Operand out;
  out.transposed = lies_transposed(spec.format, direction);
  out.data = arena.tensor(DType::kBFloat16, {size.rows, size.columns});
  if (is_tensor_scaled(spec.format)) out.scale.tensor = arena.tensor(DType::kFloat32, {groups});
  if (leaves_block_scales(spec)) {
    out.scale.block = arena.tensor(DType::kFloat32, {size.rows, ceil_div(size.columns, 128)});
  }
  return out;
}

// Fills `out` with the operand of `view` as a matrix.
void fill(const QuantizedView& view, Direction direction, int64_t groups, const Operand& out,
          Stream stream) {
  quant::dequantize_operand(view, direction, out.data, stream);
  if (out.scale.tensor.defined()) {
    keep_tensor_scale(view, direction, groups, out.scale.tensor, stream);
  }
  if (out.scale.block.defined()) {
    copy(out.scale.block, direction == Direction::kRow ? view.row_scales : view.col_scales, stream);
  }
}

// The whole col data, or row data, of a grouped tensor as the data of one matrix.
QuantizedView ungrouped(QuantizedView view, int64_t rows) {
  view.rows = rows;
  view.amax = view.tensor_scale = view.flags = TensorView();
  return view;
}

// [E, N, K] as [E, K, N].
TensorView transposed(const TensorView& x) {
  return TensorView(x.raw(), x.dtype(), std::array{x.size(0), x.size(2), x.size(1)},
                    std::array{x.stride(0), x.stride(2), x.stride(1)}, x.device());
}

// Whether the codes of a row depend on nothing but the row.
bool rows_alone(const QuantSpec& spec, Direction direction) {
  return direction == Direction::kRow && !is_tensor_scaled(spec.format) &&
         spec.rounding == Rounding::kNearest;
}

// out[r] := x[source[r]], bit for bit; zeros where that is no row of x.
void gather_rows(const GroupedTensor& x, const TensorView& out, const Stream& stream) {
  if (check_devices("quantized operand", {{"x", x.data}, {"source_R", x.source_R}, {"arena", out}},
                    stream)) {
    if constexpr (kCudaBuilt) return gather_rows_cuda(x, out, stream);
    fail_without_cuda("quantized operand");
  }
  stream.run([=] {
    const int64_t bytes = byte_size(out.dtype(), out.size(1)), sources = x.data.size(0);
    const int64_t stride = byte_size(out.dtype(), x.data.stride(0));
    const auto* from = static_cast<const std::byte*>(x.data.raw());
    parallel_for(out.size(0), 64, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int32_t source = x.source_R.data<int32_t>()[r];
        std::byte* to = static_cast<std::byte*>(out.raw()) + r * bytes;
        if (source < 0 || source >= sources) {
          std::memset(to, 0, bytes);
        } else {
          std::memcpy(to, from + source * stride, bytes);
        }
      }
    });
  });
}

// Turns the operand of the rows that a map reads into one of the groups' rows: the product reads
// data through the map, block scales are copied.
void read_through(const TensorView& source_R, Operand& operand, Arena& arena,
                  const Stream& stream) {
  operand.source_R = source_R;
  if (!operand.scale.block.defined()) return;
  const TensorView all = operand.scale.block;
  operand.scale.block = arena.tensor(DType::kFloat32, {source_R.size(0), all.size(1)});
  gather_rows({all, source_R}, operand.scale.block, stream);
}

void record_source_faults(const GroupedTensor& x, const Groups& groups, const Stream& stream) {
  if (stream.device().type == DeviceType::kCuda) {
    if constexpr (kCudaBuilt) {
      return record_faults_cuda(groups, OperationId::kQuantizeGrouped, x, {}, stream);
    }
    fail_without_cuda("quantized operand");
  }
  stream.run(
      [=] { record_faults(groups, OperationId::kQuantizeGrouped, x.source_R, x.data.size(0)); });
}

// Quantizes x in the order of groups.
void quantize_rows(const QuantizedView& view, const GroupedTensor& x, const Groups& groups,
                   const OperandCast& cast, Arena& arena, const Stream& stream) {
  ArenaScope temporaries(arena);
  TensorView ordered = x.data;
  if (x.source_R.defined()) {
    record_source_faults(x, groups, stream);
    ordered = arena.tensor(x.data.dtype(), {groups.capacity, x.data.size(1)});
    gather_rows(x, ordered, stream);
  }
  quant::quantize_grouped(ordered, groups, view, options(view.spec, cast), stream);
}

Operand allocate_grouped(const QuantSpec& spec, Direction direction, int64_t capacity, int64_t cols,
                         int64_t experts, Arena& arena) {
  const int64_t rows = direction == Direction::kRow ? capacity : grouped_columns(capacity, experts);
  return allocate(spec, direction, rows, cols, experts, arena);
}

void fill_grouped(const QuantizedView& view, Direction direction, int64_t experts,
                  const Operand& out, const Stream& stream) {
  if (out.scale.tensor.defined()) {
    keep_tensor_scale(view, direction, experts, out.scale.tensor, stream);
  }
  Operand matrix = out;
  matrix.scale.tensor = TensorView();
  const int64_t rows =
      direction == Direction::kRow ? view.rows : grouped_columns(view.rows, experts);
  fill(ungrouped(view, rows), direction, 1, matrix, stream);
}

int64_t code_bytes(const QuantizedSizes& s) {
  int64_t bytes = 0;
  for (const ArraySpec* a :
       {&s.row_data, &s.row_scales, &s.col_data, &s.col_scales, &s.amax, &s.tensor_scale}) {
    bytes += padded_bytes(a->bytes());
  }
  return bytes;
}

}  // namespace

int64_t LinearWeight::experts() const {
  if (!quantized.empty()) return static_cast<int64_t>(quantized.size());
  return values.dims() == 3 ? values.size(0) : 1;
}
int64_t LinearWeight::rows() const {
  return quantized.empty() ? values.size(-2) : quantized[0].rows;
}
int64_t LinearWeight::columns() const {
  return quantized.empty() ? values.size(-1) : quantized[0].cols;
}

Operand make_operand(const QuantSpec& spec, Direction direction, TensorView x,
                     const OperandCast& cast, Arena& arena, Stream stream) {
  const int64_t rows = x.size(0), cols = x.size(1);
  const Operand out = allocate(spec, direction, rows, cols, 1, arena);
  ArenaScope codes(arena);
  const QuantizedView view =
      place(spec, rows, cols, quantized_sizes(spec, rows, cols, only(direction)), arena);
  quant::quantize(x, view, options(spec, cast), stream);
  fill(view, direction, 1, out, stream);
  return out;
}

Operand make_grouped_operand(const QuantSpec& spec, Direction direction, const GroupedTensor& x,
                             const Groups& groups, const OperandCast& cast, Arena& arena,
                             Stream stream) {
  const int64_t capacity = groups.capacity, cols = x.data.size(1), experts = groups.experts;
  if (x.source_R.defined() && rows_alone(spec, direction)) {
    Operand out = make_operand(spec, direction, x.data, cast, arena, stream);
    read_through(x.source_R, out, arena, stream);
    return out;
  }
  const Operand out = allocate_grouped(spec, direction, capacity, cols, experts, arena);
  ArenaScope codes(arena);
  const QuantizedView view =
      place(spec, capacity, cols,
            quantized_grouped_sizes(spec, capacity, cols, experts, only(direction)), arena);
  quantize_rows(view, x, groups, cast, arena, stream);
  fill_grouped(view, direction, experts, out, stream);
  return out;
}

Operand make_row_operand(const QuantizedView& rows, const TensorView& source_R, Arena& arena,
                         Stream stream) {
  MOIETY_CHECK(!is_tensor_scaled(rows.spec.format), "quantized rows: {} has a scale for a tensor",
               name(rows.spec.format));
  Operand out = allocate(rows.spec, Direction::kRow, rows.rows, rows.cols, 1, arena);
  fill(rows, Direction::kRow, 1, out, stream);
  if (source_R.defined()) read_through(source_R, out, arena, stream);
  return out;
}

QuantizedView allocate_rows(const QuantSpec& spec, int64_t rows, int64_t cols, Arena& arena) {
  return place(spec, rows, cols, quantized_sizes(spec, rows, cols, only(Direction::kRow)), arena);
}

int64_t row_bytes(const QuantSpec& spec, int64_t rows, int64_t cols) {
  return code_bytes(quantized_sizes(spec, rows, cols, only(Direction::kRow)));
}

QuantizedView allocate_columns(const QuantSpec& spec, int64_t capacity, int64_t cols,
                               int64_t experts, Arena& arena) {
  return place(spec, capacity, cols,
               quantized_grouped_sizes(spec, capacity, cols, experts, only(Direction::kCol)),
               arena);
}

int64_t column_bytes(const QuantSpec& spec, int64_t capacity, int64_t cols, int64_t experts) {
  return code_bytes(quantized_grouped_sizes(spec, capacity, cols, experts, only(Direction::kCol)));
}

void fill_columns(const QuantizedView& columns, const GroupedTensor& x, const QuantizedView& rows,
                  const Groups& groups, const OperandCast& cast, Arena& arena, Stream stream) {
  if (rows.row_data.defined() && !x.source_R.defined()) {
    return quant::requantize_col_grouped(rows, groups, columns, options(columns.spec, cast), {},
                                         stream);
  }
  quantize_rows(columns, x, groups, cast, arena, stream);
}

Operand make_column_operand(const QuantizedView& columns, const Groups& groups, Arena& arena,
                            Stream stream) {
  MOIETY_CHECK(columns.rows == groups.capacity, "quantized columns: {} rows, the groups have {}",
               columns.rows, groups.capacity);
  const Operand out = allocate_grouped(columns.spec, Direction::kCol, columns.rows, columns.cols,
                                       groups.experts, arena);
  fill_grouped(columns, Direction::kCol, groups.experts, out, stream);
  return out;
}

Groups grouped_operand_groups(const QuantSpec& spec, const Groups& groups, Arena& arena,
                              Stream stream) {
  Groups out = groups;
  out.count_E = arena.tensor(DType::kInt64, {groups.experts});
  out.begin_E1 = arena.tensor(DType::kInt64, {groups.experts + 1});
  out.capacity = grouped_columns(groups.capacity, groups.experts);
  const int64_t tail = spec.rht_col ? 16 : 1;  // rows of a transform
  if (check_devices("quantized operand", {{"groups", groups.begin_E1}, {"arena", out.begin_E1}},
                    stream)) {
    if constexpr (kCudaBuilt) return operand_groups_cuda(groups, tail, out, stream), out;
    fail_without_cuda("quantized operand");
  }
  stream.run([=] {
    int64_t begin = 0;
    for (int64_t e = 0; e < groups.experts; ++e) {
      const int64_t rows = group_rows(groups, e).rows;
      out.begin_E1.data<int64_t>()[e] = begin;
      out.count_E.data<int64_t>()[e] = round_up(rows, tail);
      begin += round_up(rows, 128);
    }
    out.begin_E1.data<int64_t>()[groups.experts] = begin;
  });
  return out;
}

Operand make_weight_operand(const QuantSpec& spec, Direction wanted, const LinearWeight& w,
                            Arena& arena, Stream stream) {
  const int64_t rows = w.rows(), cols = w.columns(), experts = w.experts();
  const Direction direction = has_one_coding(spec.format) ? Direction::kRow : wanted;
  Operand out;
  out.transposed = lies_transposed(spec.format, direction);
  const OperandSize size = operand_size(spec, direction, rows, cols);
  out.data = arena.tensor(DType::kBFloat16, {experts, size.rows, size.columns});
  if (is_tensor_scaled(spec.format)) out.scale.tensor = arena.tensor(DType::kFloat32, {experts});
  TensorView blocks;
  if (leaves_block_scales(spec)) {
    MOIETY_CHECK(spec.format == Format::kFp8Block128x128,
                 "quantized weight: {} with scales that are no powers of two", name(spec.format));
    blocks = arena.tensor(DType::kFloat32, {experts, ceil_div(rows, 128), ceil_div(cols, 128)});
    out.scale.block = wanted == Direction::kRow ? blocks : transposed(blocks);
    out.scale.block_rows = 128;
  }
  for (int64_t e = 0; e < experts; ++e) {
    ArenaScope codes(arena);
    QuantizedView view;
    if (!w.quantized.empty()) {
      view = w.quantized[e];
    } else {
      const TensorView values = w.values.dims() == 3 ? w.values.select(e) : w.values;
      view = place(spec, rows, cols, quantized_sizes(spec, rows, cols, only(direction)), arena);
      quant::quantize(values, view, {}, stream);
    }
    Operand one{.data = out.data.select(e), .scale = {}, .transposed = out.transposed};
    if (out.scale.tensor.defined()) one.scale.tensor = out.scale.tensor.slice(0, e, e + 1);
    if (blocks.defined()) one.scale.block = blocks.select(e);
    fill(view, direction, 1, one, stream);
  }
  return out;
}

OperandBytes operand_bytes(const QuantSpec& spec, Direction direction, int64_t rows, int64_t cols,
                           int64_t groups, int64_t sources) {
  if (sources > 0 && rows_alone(spec, direction)) {
    OperandBytes out = operand_bytes(spec, direction, sources, cols, 0);
    if (leaves_block_scales(spec)) out.kept += padded_bytes(4 * rows * ceil_div(cols, 128));
    out.peak = std::max(out.peak, out.kept);
    return out;
  }
  const bool padded = groups > 0 && direction == Direction::kCol;
  const OperandSize size =
      operand_size(spec, direction, padded ? grouped_columns(rows, groups) : rows, cols);
  OperandBytes out;
  out.kept = padded_bytes(2 * size.rows * size.columns);
  if (is_tensor_scaled(spec.format)) out.kept += padded_bytes(4 * std::max<int64_t>(groups, 1));
  if (leaves_block_scales(spec))
    out.kept += padded_bytes(4 * size.rows * ceil_div(size.columns, 128));
  out.peak = out.kept + code_bytes(groups > 0 ? quantized_grouped_sizes(spec, rows, cols, groups,
                                                                        only(direction))
                                              : quantized_sizes(spec, rows, cols, only(direction)));
  if (sources > 0) out.peak += padded_bytes(2 * rows * cols);
  return out;
}

OperandBytes weight_operand_bytes(const QuantSpec& spec, Direction wanted, int64_t rows,
                                  int64_t cols, int64_t experts, bool in_format) {
  const Direction direction = has_one_coding(spec.format) ? Direction::kRow : wanted;
  const OperandSize size = operand_size(spec, direction, rows, cols);
  OperandBytes out;
  out.kept = padded_bytes(2 * experts * size.rows * size.columns);
  if (is_tensor_scaled(spec.format)) out.kept += padded_bytes(4 * experts);
  if (leaves_block_scales(spec)) {
    out.kept += padded_bytes(4 * experts * ceil_div(rows, 128) * ceil_div(cols, 128));
  }
  out.peak = out.kept;
  if (!in_format) out.peak += code_bytes(quantized_sizes(spec, rows, cols, only(direction)));
  return out;
}

}  // namespace moiety::gemm
