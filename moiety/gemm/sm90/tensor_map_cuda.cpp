#include <vector>

#include "moiety/base/error.h"
#include "moiety/base/gpu_runtime.h"
#include "moiety/gemm/sm90/tensor_map.cuh"

namespace moiety::gemm::sm90 {
namespace {

struct Dimensions {
  cuuint64_t size[4];
  cuuint64_t stride[3];  // bytes; elements of the first dimension are contiguous

  friend bool operator==(const Dimensions&, const Dimensions&) = default;
};

struct MapKey {
  const void* data;
  DType dtype;
  Dimensions d;
  int box_rows;
  int64_t box_bytes;

  friend bool operator==(const MapKey&, const MapKey&) = default;
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

CUtensorMap encode(const MapKey& key) {
  const auto& [data, dtype, d, box_rows, box_bytes] = key;
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

// A map is a function of its key. A thread keeps those that it has made, at places that follow from the
// key, until another key takes the place.
CUtensorMap map_of(const MapKey& key) {
  constexpr size_t kPlaces = 512;
  struct Kept {
    MapKey key{};
    CUtensorMap map{};
  };
  thread_local std::vector<Kept> kept(kPlaces);
  uint64_t hash = reinterpret_cast<uintptr_t>(key.data) / 16;
  for (const uint64_t word :
       {key.d.size[0], key.d.size[1], key.d.stride[0], static_cast<cuuint64_t>(key.box_rows)}) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15;
  }
  Kept& place = kept[hash >> 55];
  static_assert(kPlaces == size_t{1} << (64 - 55));
  if (place.key != key) place = {key, encode(key)};
  return place.map;
}

}  // namespace

CUtensorMap ragged_map(const void* rows, DType dtype, int64_t columns, int64_t stride, int box_rows,
                       int64_t box_bytes) {
  constexpr cuuint64_t kTaken = uint64_t{1} << 34;  // times kRaggedEnd it is 2^64
  const auto bytes = static_cast<cuuint64_t>(byte_size(dtype, stride));
  return map_of({rows,
                 dtype,
                 {{static_cast<cuuint64_t>(columns), kRaggedEnd, cuuint64_t{kRaggedEnd} + 1,
                   cuuint64_t{kRaggedEnd} * 2},
                  {bytes, kTaken - bytes, bytes}},
                 box_rows,
                 box_bytes});
}

CUtensorMap matrix_map(const MapMatrices& m, int box_rows) {
  const bool packed = m.stride > 0;
  const cuuint64_t near = packed ? m.groups : kNearBytes / 16;
  const cuuint64_t far = packed ? 1 : cuuint64_t{1} << 30;
  return map_of(
      {m.first,
       m.dtype,
       {{static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows), near, far},
        {static_cast<cuuint64_t>(byte_size(m.dtype, m.row_stride)),
         static_cast<cuuint64_t>(packed ? m.stride : 16), static_cast<cuuint64_t>(kNearBytes)}},
       box_rows,
       kBoxBytes});
}

}  // namespace moiety::gemm::sm90
