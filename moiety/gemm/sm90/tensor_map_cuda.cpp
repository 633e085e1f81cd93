#include "moiety/base/error.h"
#include "moiety/base/gpu_runtime.h"
#include "moiety/gemm/sm90/tensor_map.cuh"

namespace moiety::gemm::sm90 {
namespace {

struct Dimensions {
  cuuint64_t size[4];
  cuuint64_t stride[3];  // bytes; elements of the first dimension are contiguous
};

decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto found = [] {
    void* const function = gpu::driver_function("cuTensorMapEncodeTiled");
    if (!function) {
      fail(ErrorKind::kCuda, "grouped_gemm: the driver has no cuTensorMapEncodeTiled of CUDA 12");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

CUtensorMap encode(const void* data, DType dtype, const Dimensions& d, int box_rows,
                   int64_t box_bytes) {
  const bool fp32 = dtype == DType::kFloat32;
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(box_bytes / (fp32 ? 4 : 2)),
                             static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encoder()(
      &map, fp32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      const_cast<void*>(data), d.size, d.stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      box_bytes == kBoxBytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail(ErrorKind::kCuda,
         "grouped_gemm: a map of {} columns, {} rows, strides of {}, {}, {} bytes at {}: error {}",
         d.size[0], d.size[1], d.stride[0], d.stride[1], d.stride[2], data,
         static_cast<int>(result));
  }
  return map;
}

}  // namespace

CUtensorMap ragged_map(const void* rows, DType dtype, int64_t columns, int64_t stride, int box_rows,
                       int64_t box_bytes) {
  constexpr cuuint64_t kTaken = uint64_t{1} << 34;  // times kRaggedEnd it is 2^64
  const auto bytes = static_cast<cuuint64_t>(byte_size(dtype, stride));
  return encode(rows, dtype,
                {{static_cast<cuuint64_t>(columns), kRaggedEnd, cuuint64_t{kRaggedEnd} + 1,
                  cuuint64_t{kRaggedEnd} * 2},
                 {bytes, kTaken - bytes, bytes}},
                box_rows, box_bytes);
}

CUtensorMap matrix_map(const MapMatrices& m, int box_rows) {
  const bool packed = m.stride > 0;
  const cuuint64_t near = packed ? m.groups : kNearBytes / 16;
  const cuuint64_t far = packed ? 1 : cuuint64_t{1} << 30;
  return encode(
      m.first, m.dtype,
      {{static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows), near, far},
       {static_cast<cuuint64_t>(byte_size(m.dtype, m.row_stride)),
        static_cast<cuuint64_t>(packed ? m.stride : 16), static_cast<cuuint64_t>(kNearBytes)}},
      box_rows, kBoxBytes);
}

}  // namespace moiety::gemm::sm90
