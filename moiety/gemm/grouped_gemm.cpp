#include "moiety/gemm/grouped_gemm.h"

#include <algorithm>
#include <vector>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/base/trace.h"
#include "moiety/gemm/grouped_block.h"
#include "moiety/gemm/grouped_gemm_cuda.h"

namespace moiety::gemm {
namespace {

bool is_storage(DType t) { return t == DType::kFloat32 || t == DType::kBFloat16; }

// Whether an output or bias gradient of dtype `t` goes with operands of dtype `operands`.
bool goes_with(DType t, DType operands) {
  return operands == DType::kFloat64 ? t == operands : is_storage(t);
}

DType check_dtype(const char* operation, const TensorView& x) {
  MOIETY_CHECK(x.dims() == 2 && (x.dtype() == DType::kFloat64 || is_storage(x.dtype())),
               "{}: rows are {}, expected float32[*, *] or bfloat16[*, *]", operation,
               x.describe());
  return x.dtype();
}

void check_bias(const GroupedGemmArgs& args, DType dtype, int64_t columns) {
  if (!args.bias_EN.defined()) {
    MOIETY_CHECK(!args.bias_scale_R.defined(), "grouped_gemm: bias_scale_R without bias_EN");
    return;
  }
  MOIETY_CHECK(args.op == GroupedOp::kForward,
               "grouped_gemm: a bias with an op other than kForward");
  check_tensor("grouped_gemm", "bias_EN", args.bias_EN, dtype, {args.groups.experts, columns});
  MOIETY_CHECK(args.bias_EN.contiguous(), "grouped_gemm: bias_EN is {}", args.bias_EN.describe());
  if (args.bias_scale_R.defined()) {
    check_tensor("grouped_gemm", "bias_scale_R", args.bias_scale_R,
                 dtype == DType::kFloat64 ? dtype : DType::kFloat32, {args.groups.capacity});
  }
}

void check_wgrad(const GroupedGemmArgs& args, DType dtype) {
  const char* op = "grouped_gemm";
  const Groups& groups = args.groups;
  const int width = args.transposed ? 0 : 1;  // the dimension that does not belong to the groups
  for (const auto& [argument, x] : {std::pair{"a", &args.a}, std::pair{"b", &args.b}}) {
    if (!args.transposed) {
      check_rows(op, argument, *x, dtype, groups.capacity, -1);
      continue;
    }
    MOIETY_CHECK(!x->source_R.defined(), "grouped_gemm: source_R of the transposed {}", argument);
    check_tensor(op, argument, x->data, dtype, {-1, groups.capacity});
    MOIETY_CHECK(x->data.stride(1) == 1 || groups.capacity <= 1,
                 "grouped_gemm: {} {} has columns that are not contiguous", argument,
                 x->data.describe());
  }
  const int64_t rows = args.a.data.size(width), columns = args.b.data.size(width);
  MOIETY_CHECK(!args.out.defined(), "grouped_gemm: kWgrad writes w, out is {}",
               args.out.describe());
  MOIETY_CHECK(goes_with(args.w.dtype(), dtype) || groups.experts == 0,
               "grouped_gemm: the gradient is {} with {} rows", name(args.w.dtype()), name(dtype));
  args.w.check(op, "w", args.w.dtype(), groups.experts, rows, columns);
  check_scale(op, "a_scale", args.a_scale, {rows, groups.capacity, groups.experts});
  check_scale(op, "b_scale", args.b_scale, {columns, groups.capacity, groups.experts});
  check_scales(op, args.a_scale, args.b_scale, !args.transposed);
}

DType check(const GroupedGemmArgs& args) {
  const char* op = "grouped_gemm";
  const DType dtype = check_dtype(op, args.a.data);
  const Groups& groups = args.groups;
  check_groups(op, groups);
  check_scalar(op, "alpha", args.alpha, groups.experts);
  check_scalar(op, "beta", args.beta, groups.experts);
  check_sm_limit(op, args.sm_limit);
  if (args.op == GroupedOp::kWgrad) {
    check_wgrad(args, dtype);
  } else {
    check_rows(op, "a", args.a, dtype, groups.capacity, -1);
    const int64_t inner = args.a.data.size(1);
    MOIETY_CHECK(!args.transposed, "grouped_gemm: transposed operands are for kWgrad");
    MOIETY_CHECK(!args.b.data.defined(), "grouped_gemm: b is for kWgrad");
    MOIETY_CHECK(goes_with(args.out.dtype(), dtype), "grouped_gemm: out is {} with {} rows",
                 args.out.describe(), name(dtype));
    check_rows(op, "out", {args.out, {}}, args.out.dtype(), groups.capacity, -1);
    const bool forward = args.op == GroupedOp::kForward;
    const int64_t outer = args.out.size(1);
    args.w.check(op, "w", dtype, groups.experts, forward ? outer : inner, forward ? inner : outer);
    check_scale(op, "a_scale", args.a_scale, {groups.capacity, inner, groups.experts});
    check_scale(op, "b_scale", args.b_scale, {outer, inner, groups.experts, true});
    check_scales(op, args.a_scale, args.b_scale, false);
  }
  check_bias(args, dtype, args.op == GroupedOp::kForward ? args.out.size(1) : 0);
  return dtype;
}

// Whether the operation runs on a GPU, and all that it reads and writes with it.
bool on_gpu(const char* operation, const Groups& groups, DType dtype,
            std::initializer_list<NamedView> arguments, const Stream& stream) {
  check_devices(operation, arguments, stream);
  if (!check_devices(operation,
                     {{"groups.begin_E1", groups.begin_E1},
                      {"groups.count_E", groups.count_E},
                      {"groups.status", groups.status}},
                     stream)) {
    return false;
  }
  if (dtype == DType::kFloat64) {
    fail(ErrorKind::kUnsupported, "{}: {} rows are for CPUs alone", operation, name(dtype));
  }
  return true;
}

bool on_gpu(const GroupedGemmArgs& args, DType dtype, const Stream& stream) {
  const TensorView weight = args.w.experts() > 0 ? args.w[0] : TensorView();
  return on_gpu("grouped_gemm", args.groups, dtype,
                {{"a", args.a.data},
                 {"a.source_R", args.a.source_R},
                 {"b", args.b.data},
                 {"b.source_R", args.b.source_R},
                 {"w", weight},
                 {"out", args.out},
                 {"bias_EN", args.bias_EN},
                 {"bias_scale_R", args.bias_scale_R},
                 {"alpha", args.alpha.per_group},
                 {"beta", args.beta.per_group},
                 {"a_scale.tensor", args.a_scale.tensor},
                 {"a_scale.block", args.a_scale.block},
                 {"b_scale.tensor", args.b_scale.tensor},
                 {"b_scale.block", args.b_scale.block}},
                stream);
}

}  // namespace

void check_rows(const char* operation, const char* argument, const GroupedTensor& x, DType dtype,
                int64_t capacity, int64_t columns) {
  if (x.source_R.defined()) {
    check_tensor(operation, "source_R", x.source_R, DType::kInt32, {capacity});
    MOIETY_CHECK(x.source_R.contiguous(), "{}: source_R is {}", operation, x.source_R.describe());
  }
  check_tensor(operation, argument, x.data, dtype, {x.source_R.defined() ? -1 : capacity, columns});
  MOIETY_CHECK(x.data.stride(1) == 1 || x.data.size(1) <= 1,
               "{}: {} {} has columns that are not contiguous", operation, argument,
               x.data.describe());
}

void check_scalar(const char* operation, const char* argument, const GroupScalar& scalar,
                  int64_t experts) {
  const TensorView& x = scalar.per_group;
  if (!x.defined()) return;
  check_tensor(operation, argument, x, DType::kFloat32, {-1});
  MOIETY_CHECK((x.size(0) == 1 || x.size(0) == experts) && x.contiguous(),
               "{}: {} is {}, expected [1] or [{}]", operation, argument, x.describe(), experts);
}

void check_sm_limit(const char* operation, int sm_limit) {
  MOIETY_CHECK(sm_limit >= 0, "{}: sm_limit is {}, expected a number of multiprocessors, or 0",
               operation, sm_limit);
}

void trace_rows(TraceSpan& span, const Groups& groups, double flops_per_row) {
  if (!span.recording()) return;
  const int64_t rows = live_rows(groups);
  span.add({"experts", groups.experts});
  span.add({"rows", rows});
  span.add({"flops", flops_per_row * double(rows)});
}

int64_t even_tile(int64_t rows, int64_t height) {
  const int64_t pieces = std::max<int64_t>((rows + height / 2) / height, 1);
  return std::max(round_up(ceil_div(rows, pieces), kTileGrain), kTileGrain);
}

std::span<const RowTile> row_tiles(const Groups& groups, int64_t height) {
  thread_local std::vector<RowTile> tiles;
  tiles.clear();
  for (int64_t e = 0; e < groups.experts; ++e) {
    const RowRange range = group_rows(groups, e);
    const int64_t step = even_tile(range.rows, height);
    for (int64_t r = 0; r < range.rows; r += step) {
      tiles.push_back({e, range.begin + r, std::min(step, range.rows - r)});
    }
  }
  return tiles;
}

int64_t tile_height(int64_t rows, DType dtype) {
  constexpr int64_t kTilesOfAThread = 4;
  const bool enough = rows >= kTilesOfAThread * thread_budget() * 2 * kTileRows;
  return enough && automatic_engine(dtype) != GemmEngine::kOneDnn ? 2 * kTileRows : kTileRows;
}

int64_t live_rows(const Groups& groups) {
  int64_t rows = 0;
  for (int64_t e = 0; e < groups.experts; ++e) rows += group_rows(groups, e).rows;
  return rows;
}

ProductOperand block_operand(const GroupedTensor& x) {
  const int32_t* source = x.source_R.defined() ? x.source_R.data<int32_t>() : nullptr;
  return {x.data.raw(), x.data.stride(0), source, x.data.size(0)};
}

namespace {

ProductFactor factor(const GroupScalar& x) {
  if (!x.per_group.defined()) return {x.value};
  return {x.value, x.per_group.data<float>(), x.per_group.numel() == 1 ? 0 : 1};
}

// kWgrad: everything but the matrices that are written.
void set_wgrad(const GroupedGemmArgs& args, Product& g) {
  const int width = args.transposed ? 0 : 1;
  g.ragged = Ragged::kReduction;
  g.op = args.transposed ? GemmOp::kTN : GemmOp::kNT;
  g.m = args.a.data.size(width);
  g.n = args.b.data.size(width);
  g.b = block_operand(args.b);
  g.b_scales = block_scales(args.b_scale, args.b_scale.block);
}

// kForward and kDgrad: everything but the weights.
void set_rows(const GroupedGemmArgs& args, Product& g) {
  g.ragged = Ragged::kRows;
  g.op = args.op == GroupedOp::kForward ? GemmOp::kTN : GemmOp::kNN;
  g.n = args.out.size(1);
  g.k = args.a.data.size(1);
  set_output(g.epilogue, args.out.raw(), args.out.dtype(), args.out.stride(0));
  if (const TensorView& b = args.b_scale.block; b.defined()) {
    g.b_scales = {b.data<float>(), b.stride(1), b.stride(2), args.b_scale.block_rows};
    g.b_scales_group = b.stride(0);
  }
  if (!args.bias_EN.defined()) return;
  g.epilogue.bias = args.bias_EN.raw();
  g.epilogue.bias_dtype = args.bias_EN.dtype();
  g.epilogue.bias_scale = args.bias_scale_R.raw();
}

}  // namespace

void set_output(Epilogue& e, void* out, DType dtype, int64_t stride) {
  e.out = out;
  e.old = out;
  e.out_dtype = e.old_dtype = dtype;
  e.out_stride = e.old_stride = stride;
}

Product product_of(const GroupedGemmArgs& args) {
  const Groups& groups = args.groups;
  Product g;
  g.dtype = args.a.data.dtype();
  g.groups = {.begin = groups.begin_E1.data<int64_t>(),
              .count = groups.count_E.defined() ? groups.count_E.data<int64_t>() : nullptr,
              .groups = groups.experts,
              .capacity = groups.capacity};
  g.a = block_operand(args.a);
  g.a_scales = block_scales(args.a_scale, args.a_scale.block);
  args.op == GroupedOp::kWgrad ? set_wgrad(args, g) : set_rows(args, g);
  g.epilogue.a_scale = tensor_scale(args.a_scale);
  g.epilogue.b_scale = tensor_scale(args.b_scale);
  g.epilogue.alpha = factor(args.alpha);
  g.epilogue.beta = factor(args.beta);
  g.sm_limit = args.sm_limit;
  return g;
}

Product group_product(const GroupedGemmArgs& args, int64_t e) {
  Product g = product_of(args);
  const RowRange range = group_rows(args.groups, e);
  const TensorView w = args.w[e];
  g.read_factors(e);
  if (g.ragged == Ragged::kRows) {
    g.row = range.begin;
    g.m = range.rows;
    g.b = {w.raw(), w.stride(0)};
    if (g.b_scales.data) g.b_scales.data += e * g.b_scales_group;
    if (g.epilogue.bias) g.epilogue.bias = args.bias_EN.select(e).raw();
  } else {
    g.k = range.rows;
    set_output(g.epilogue, w.raw(), w.dtype(), w.stride(0));
    for (ProductOperand* x : {&g.a, &g.b}) {
      if (args.transposed) {
        x->data = static_cast<const std::byte*>(x->data) + byte_size(g.dtype, range.begin);
      } else {
        x->first = range.begin;
      }
    }
    for (BlockScales* s : {&g.a_scales, &g.b_scales}) {
      if (s->data) s->data += range.begin / kScaledSlice * s->slice_stride;
    }
  }
  g.ragged = Ragged::kNone;
  g.groups = {};
  return g;
}

Product tile_product(const GroupedGemmArgs& args, const RowTile& tile) {
  Product g = group_product(args, tile.group);
  g.row = tile.begin;
  g.m = tile.rows;
  return g;
}

void grouped_gemm(const GroupedGemmArgs& args, Stream stream) {
  const DType dtype = check(args);
  if (on_gpu(args, dtype, stream)) {
    if constexpr (kCudaBuilt) {
      record_faults_cuda(args.groups, OperationId::kGroupedGemm, args.a, args.b, stream);
      return grouped_gemm_cuda(args, TileKernels::kFastest, stream);
    }
    fail_without_cuda("grouped_gemm");
  }
  stream.run([args, dtype] {
    TraceSpan span(TraceLane::kCompute, "grouped_gemm");
    trace_rows(
        span, args.groups,
        2.0 * args.a.data.size(args.transposed ? 0 : 1) *
            (args.op == GroupedOp::kWgrad ? args.b.data : args.out).size(args.transposed ? 0 : 1));
    for (const GroupedTensor* x : {&args.a, &args.b}) {
      record_faults(args.groups, OperationId::kGroupedGemm, x->source_R, x->data.size(0));
    }
    if (dtype == DType::kFloat64) {
      grouped_gemm_reference(args);
    } else {
      grouped_gemm_cpu(args, GemmEngine::kAuto);
    }
  });
}

void grouped_bias_grad(const GroupedBiasGradArgs& args, Stream stream) {
  const char* op = "grouped_bias_grad";
  const DType dtype = check_dtype(op, args.dy.data);
  check_groups(op, args.groups);
  check_scalar(op, "beta", args.beta, args.groups.experts);
  check_rows(op, "dy", args.dy, dtype, args.groups.capacity, -1);
  MOIETY_CHECK(goes_with(args.dbias_EN.dtype(), dtype), "{}: dbias_EN is {} with {} rows", op,
               args.dbias_EN.describe(), name(dtype));
  check_tensor(op, "dbias_EN", args.dbias_EN, args.dbias_EN.dtype(),
               {args.groups.experts, args.dy.data.size(1)});
  MOIETY_CHECK(args.dbias_EN.contiguous(), "{}: dbias_EN is {}", op, args.dbias_EN.describe());
  if (args.scale_R.defined()) {
    check_tensor(op, "scale_R", args.scale_R, dtype == DType::kFloat64 ? dtype : DType::kFloat32,
                 {args.groups.capacity});
  }
  if (on_gpu(op, args.groups, dtype,
             {{"dy", args.dy.data},
              {"dy.source_R", args.dy.source_R},
              {"scale_R", args.scale_R},
              {"dbias_EN", args.dbias_EN},
              {"beta", args.beta.per_group}},
             stream)) {
    if constexpr (kCudaBuilt) return grouped_bias_grad_cuda(args, stream);
    fail_without_cuda(op);
  }
  stream.run([args] {
    record_faults(args.groups, OperationId::kGroupedBiasGrad, args.dy.source_R,
                  args.dy.data.size(0));
    grouped_bias_grad_reference(args);
  });
}

void grouped_scale_grad(const GroupedScaleGradArgs& args, Stream stream) {
  const char* op = "grouped_scale_grad";
  const DType dtype = check_dtype(op, args.dy.data);
  check_groups(op, args.groups);
  check_rows(op, "dy", args.dy, dtype, args.groups.capacity, -1);
  check_tensor(op, "bias_EN", args.bias_EN, dtype, {args.groups.experts, args.dy.data.size(1)});
  check_tensor(op, "dscale_R", args.dscale_R, dtype == DType::kFloat64 ? dtype : DType::kFloat32,
               {args.groups.capacity});
  MOIETY_CHECK(args.bias_EN.contiguous(), "{}: bias_EN is {}", op, args.bias_EN.describe());
  if (on_gpu(op, args.groups, dtype,
             {{"dy", args.dy.data},
              {"dy.source_R", args.dy.source_R},
              {"bias_EN", args.bias_EN},
              {"dscale_R", args.dscale_R}},
             stream)) {
    if constexpr (kCudaBuilt) return grouped_scale_grad_cuda(args, stream);
    fail_without_cuda(op);
  }
  stream.run([args] {
    record_faults(args.groups, OperationId::kGroupedBiasGrad, args.dy.source_R,
                  args.dy.data.size(0));
    grouped_scale_grad_reference(args);
  });
}

}  // namespace moiety::gemm
