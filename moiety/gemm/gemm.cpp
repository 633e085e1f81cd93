#include "moiety/gemm/gemm.h"

#include <algorithm>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/base/trace.h"
#include "moiety/gemm/gemm_block.h"
#include "moiety/gemm/gemm_cuda.h"

namespace moiety::gemm {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 256;

struct Shape {
  int64_t m, n, k;
};

Shape check(const GemmArgs& args) {
  const TensorView &a = args.a, &b = args.b, &out = args.out;
  MOIETY_CHECK(a.dims() == 2 && b.dims() == 2 && out.dims() == 2,
               "gemm: a is {}, b is {}, out is {}", a.describe(), b.describe(), out.describe());
  const bool a_transposed = args.op == GemmOp::kNT, b_transposed = args.op == GemmOp::kTN;
  const Shape s = {a.size(a_transposed ? 1 : 0), b.size(b_transposed ? 0 : 1),
                   a.size(a_transposed ? 0 : 1)};
  MOIETY_CHECK(b.size(b_transposed ? 1 : 0) == s.k, "gemm: a is {}, b is {}: reduction {} and {}",
               a.describe(), b.describe(), s.k, b.size(b_transposed ? 1 : 0));
  MOIETY_CHECK(out.size(0) == s.m && out.size(1) == s.n, "gemm: out is {}, expected [{}, {}]",
               out.describe(), s.m, s.n);

  const DType dtype = a.dtype();
  const bool fp64 = dtype == DType::kFloat64;
  MOIETY_CHECK(fp64 || dtype == DType::kFloat32 || dtype == DType::kBFloat16,
               "gemm: a is {}, expected float32 or bfloat16", a.describe());
  MOIETY_CHECK(b.dtype() == dtype, "gemm: a is {}, b is {}: dtypes differ", a.describe(),
               b.describe());
  const auto check_side = [&](const char* what, const TensorView& x) {
    const bool ok =
        fp64 ? x.dtype() == dtype : x.dtype() == DType::kFloat32 || x.dtype() == DType::kBFloat16;
    MOIETY_CHECK(ok, "gemm: {} is {} with operands {}", what, x.describe(), name(dtype));
  };
  check_side("out", out);
  if (args.beta != 0 && args.c.defined()) {
    check_side("c", args.c);
    MOIETY_CHECK(args.c.dims() == 2 && args.c.size(0) == s.m && args.c.size(1) == s.n,
                 "gemm: c is {}, expected [{}, {}]", args.c.describe(), s.m, s.n);
  }
  for (const TensorView* x : {&a, &b, &out, &args.c}) {
    MOIETY_CHECK(x->dims() < 2 || x->stride(1) == 1 || x->size(1) <= 1,
                 "gemm: {} has columns that are not contiguous", x->describe());
  }
  if (const TensorView& x = args.workspace; x.defined()) {
    check_tensor("gemm", "workspace", x, DType::kUInt8, {-1});
    MOIETY_CHECK(x.contiguous() && reinterpret_cast<uintptr_t>(x.raw()) % kWorkspaceAlignment == 0,
                 "gemm: workspace {} at {} is not contiguous and aligned to {}", x.describe(),
                 x.raw(), kWorkspaceAlignment);
  }
  check_scales("gemm", args.a_scale, args.b_scale, args.op == GemmOp::kNT);
  check_scale("gemm", "a_scale", args.a_scale, {.rows = s.m, .reduction = s.k});
  check_scale("gemm", "b_scale", args.b_scale, {.rows = s.n, .reduction = s.k});
  return s;
}

Product product_of(const GemmArgs& args, const Shape& s) {
  const TensorView& old = args.c.defined() ? args.c : args.out;
  return {.op = args.op,
          .dtype = args.a.dtype(),
          .m = s.m,
          .n = s.n,
          .k = s.k,
          .a = {args.a.raw(), args.a.stride(0)},
          .b = {args.b.raw(), args.b.stride(0)},
          .a_scales = block_scales(args.a_scale, args.a_scale.block),
          .b_scales = block_scales(args.b_scale, args.b_scale.block),
          .epilogue = {.a_scale = tensor_scale(args.a_scale),
                       .b_scale = tensor_scale(args.b_scale),
                       .alpha = {args.alpha},
                       .beta = {args.beta},
                       .out = args.out.raw(),
                       .out_dtype = args.out.dtype(),
                       .out_stride = args.out.stride(0),
                       .old = old.raw(),
                       .old_dtype = old.dtype(),
                       .old_stride = old.stride(0)}};
}

// Whether the product runs on a GPU, and all that it reads and writes with it.
bool on_gpu(const GemmArgs& args, const Stream& stream) {
  return check_devices("gemm",
                       {{"a", args.a},
                        {"b", args.b},
                        {"out", args.out},
                        {"c", args.c},
                        {"a_scale.tensor", args.a_scale.tensor},
                        {"a_scale.block", args.a_scale.block},
                        {"b_scale.tensor", args.b_scale.tensor},
                        {"b_scale.block", args.b_scale.block},
                        {"workspace", args.workspace}},
                       stream);
}

// The least work (multiply-adds), rows and columns of a task.
constexpr int64_t kTaskWork = 1 << 18;
constexpr int64_t kTaskRows = 96;
constexpr int64_t kTaskColumns = 64;

void spread(const Product& whole) {
  const int64_t work = whole.m * whole.n * std::max<int64_t>(whole.k, 1);
  const int64_t wanted = std::clamp<int64_t>(work / kTaskWork, 1, thread_budget());
  // Rows are divided first: every block of rows packs its columns of b again, which many rows
  // amortize.
  const int64_t row_tasks = std::clamp<int64_t>(whole.m / kTaskRows, 1, wanted);
  const int64_t column_tasks =
      std::clamp<int64_t>(whole.n / kTaskColumns, 1, ceil_div(wanted, row_tasks));
  const int64_t rows = ceil_div(whole.m, row_tasks), columns = ceil_div(whole.n, column_tasks);
  parallel_tasks(row_tasks * column_tasks, [&](int64_t task) {
    Product part = whole;
    part.row = task / column_tasks * rows;
    part.column = task % column_tasks * columns;
    part.m = std::clamp<int64_t>(whole.m - part.row, 0, rows);
    part.n = std::clamp<int64_t>(whole.n - part.column, 0, columns);
    block_gemm(part);
  });
}

}  // namespace

const char* name(GemmEngine engine) {
  switch (engine) {
    case GemmEngine::kAuto:
      return "auto";
    case GemmEngine::kReference:
      return "reference";
    case GemmEngine::kVector:
      return avx512_available() ? "avx512" : "avx2";
    case GemmEngine::kBf16:
      return "avx512_bf16";
    case GemmEngine::kAmx:
      return "amx";
    case GemmEngine::kOneDnn:
      return "onednn";
  }
  return "?";
}

bool engine_available(GemmEngine engine, DType dtype) {
  switch (engine) {
    case GemmEngine::kVector:
      return dtype != DType::kFloat64 && (avx512_available() || avx2_available());
    case GemmEngine::kBf16:
      return dtype == DType::kBFloat16 && avx512_bf16_available();
    case GemmEngine::kAmx:
      return dtype == DType::kBFloat16 && amx_available();
    case GemmEngine::kOneDnn:
      return onednn_available(dtype);
    default:
      return true;
  }
}

bool has_reference_bits(GemmEngine engine, DType dtype) {
  if (engine == GemmEngine::kAuto) engine = automatic_engine(dtype);
  return engine != GemmEngine::kAmx && engine != GemmEngine::kOneDnn;
}

GemmEngine automatic_engine(DType dtype) {
  for (GemmEngine engine :
       {GemmEngine::kAmx, GemmEngine::kBf16, GemmEngine::kVector, GemmEngine::kOneDnn}) {
    if (engine_available(engine, dtype)) return engine;
  }
  return GemmEngine::kReference;
}

void block_gemm(const Product& block, GemmEngine engine) {
  if (block.m == 0 || block.n == 0) return;
  if (block.a_scales.data) return block_gemm_scaled(block, engine);
  if (engine == GemmEngine::kAuto) engine = automatic_engine(block.dtype);
  if (!engine_available(engine, block.dtype)) {
    fail(ErrorKind::kUnsupported, "gemm: engine {} does not multiply {} on this machine",
         name(engine), name(block.dtype));
  }
  switch (engine) {
    case GemmEngine::kVector:
      return avx512_available() ? block_gemm_avx512(block) : block_gemm_avx2(block);
    case GemmEngine::kBf16:
      return block_gemm_avx512_bf16(block);
    case GemmEngine::kAmx:
      return block_gemm_amx(block);
    case GemmEngine::kOneDnn:
      return block_gemm_onednn(block);
    default:
      return block_gemm_reference(block);
  }
}

void gemm(const GemmArgs& args, Stream stream) {
  const Shape s = check(args);
  const bool gpu = on_gpu(args, stream);
  const Product product = product_of(args, s);
  if (gpu) {
    if constexpr (kCudaBuilt) return gemm_cuda(product, args.workspace, stream);
    fail_without_cuda("gemm");
  }
  stream.run([g = product]() mutable {
    g.read_factors(0);
    const TraceSpan span(TraceLane::kCompute, "gemm",
                         {{"m", g.m}, {"n", g.n}, {"k", g.k}, {"flops", 2.0 * g.m * g.n * g.k}});
    spread(g);
  });
}

int64_t gemm_workspace(const GemmArgs& args, Stream stream) {
  const Shape s = check(args);
  if (!on_gpu(args, stream) || s.m == 0 || s.n == 0) return 0;
  return cublaslt_workspace(product_of(args, s), stream);
}

}  // namespace moiety::gemm
