#include "moiety/gtp/accumulate.h"

#include <utility>

#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/gtp/accumulate_job.h"

namespace moiety::gtp {

void accumulate(std::span<const TensorView> chunks, TensorView main_grad, int64_t valid_rows,
                bool first, Stream stream) {
  const char* op = "gtp accumulate";
  MOIETY_CHECK(!chunks.empty(), "{}: no chunks", op);
  const DType wire = chunks[0].dtype(), main = main_grad.dtype();
  const bool fits = main == DType::kFloat32 ? wire == DType::kFloat32 || wire == DType::kBFloat16
                                            : main == DType::kBFloat16 && wire == DType::kBFloat16;
  MOIETY_CHECK(fits, "{}: chunks are {}, main_grad is {}, expected float32 or both bfloat16", op,
               name(wire), name(main));
  check_tensor(op, "main_grad", main_grad, main, {-1, -1, -1});
  const int64_t E = main_grad.size(0), rows = main_grad.size(1), cols = main_grad.size(2);
  MOIETY_CHECK(valid_rows >= 0 && valid_rows <= rows, "{}: {} valid rows of {}", op, valid_rows,
               rows);
  const auto check = [&](const char* what, const TensorView& x) {
    check_device(op, what, x, stream);
    MOIETY_CHECK(cols <= 1 || x.stride(2) == 1, "{}: {} is {}, expected contiguous columns", op,
                 what, x.describe());
  };
  check("main_grad", main_grad);
  for (const TensorView& c : chunks) {
    check_tensor(op, "a chunk", c, wire, {E, rows, cols});
    check("a chunk", c);
  }
  AccumulateJob job{{chunks.begin(), chunks.end()}, main_grad, valid_rows, first};
  if (stream.device().type == DeviceType::kCuda) {
    MOIETY_CHECK(std::ssize(chunks) <= kMostGpuChunks, "{}: {} chunks on a GPU, at most {}", op,
                 chunks.size(), kMostGpuChunks);
    if constexpr (kCudaBuilt) return accumulate_cuda(job, stream);
    fail_without_cuda(op);
  }
  stream.run([job = std::move(job)] {
    const TraceSpan span(TraceLane::kCompute, "gtp accumulate",
                         {{"ranks", static_cast<int64_t>(job.chunks.size())}});
    accumulate_cpu(job);
  });
}

}  // namespace moiety::gtp
