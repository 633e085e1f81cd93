#include "moiety/base/launch.cuh"
#include "moiety/base/math.h"
#include "tests/base_gpu/kernels.h"

namespace moiety {
namespace {

__global__ void add_one_kernel(int32_t* x, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1;
}

__global__ void add_amount_kernel(int32_t* x, const int32_t* amount, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) x[i] += *amount;
}

__global__ void spin_kernel(int64_t cycles) {
  const int64_t begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

__device__ void mark_block(int32_t* x, int64_t shared_bytes) {
  extern __shared__ char shared[];
  if (shared_bytes > 0) {
    // The last byte is there.
    volatile char* last = shared + shared_bytes - 1;
    *last = 1;
    x[blockIdx.x] += *last;
  } else {
    x[blockIdx.x] += 1;
  }
}

__global__ void mark_blocks_kernel(int32_t* x, int64_t shared_bytes) {
  mark_block(x, shared_bytes);
}

__global__ void mark_blocks_again_kernel(int32_t* x, int64_t shared_bytes) {
  mark_block(x, shared_bytes);
}

__global__ void count_wrong_reciprocals_kernel(int32_t* wrong, uint32_t last) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const float d = __uint_as_float(__float_as_uint(1.0f) + min(i, last));
  if (reciprocal_of_1_to_2(d) != __frcp_rn(d)) atomicAdd(wrong, 1);
}

}  // namespace

void add_one(TensorView x, Stream stream) {
  launch("add_one", add_one_kernel, {.blocks = blocks_for(x.numel(), 256)}, stream,
         x.data<int32_t>(), x.numel());
}

void add_amount(TensorView x, TensorView amount, Stream stream) {
  launch("add_amount", add_amount_kernel, {.blocks = blocks_for(x.numel(), 256)}, stream,
         x.data<int32_t>(), amount.data<int32_t>(), x.numel());
}

void count_wrong_reciprocals(TensorView wrong, Stream stream) {
  constexpr uint32_t kLast = 1 << 23;  // 2
  launch("count_wrong_reciprocals", count_wrong_reciprocals_kernel,
         {.blocks = blocks_for(kLast + 1, 256)}, stream, wrong.data<int32_t>(), kLast);
}

void spin(int64_t cycles, Stream stream) {
  launch("spin", spin_kernel, {.blocks = 1, .threads = 1}, stream, cycles);
}

void mark_blocks(TensorView x, int64_t blocks, int64_t shared_bytes, Stream stream) {
  launch("mark_blocks", mark_blocks_kernel,
         {.blocks = blocks, .threads = 1, .shared_bytes = shared_bytes}, stream, x.data<int32_t>(),
         shared_bytes);
}

void mark_blocks_again(TensorView x, int64_t blocks, int64_t shared_bytes, Stream stream) {
  launch("mark_blocks", mark_blocks_again_kernel,
         {.blocks = blocks, .threads = 1, .shared_bytes = shared_bytes}, stream, x.data<int32_t>(),
         shared_bytes);
}

int64_t resident_mark_blocks(int64_t shared_bytes, const Stream& stream) {
  return resident_blocks(mark_blocks_kernel, 1, shared_bytes, stream);
}

void launch_too_many_threads(TensorView x, Stream stream) {
  launch("add_one", add_one_kernel, {.blocks = 1, .threads = 2048}, stream, x.data<int32_t>(),
         x.numel());
}

void* make_cuda_stream() {
  cudaStream_t stream = nullptr;
  MOIETY_CUDA_CHECK(cudaStreamCreate(&stream));
  return stream;
}

bool destroy_cuda_stream(void* stream) {
  return cudaStreamDestroy(static_cast<cudaStream_t>(stream)) == cudaSuccess;
}

}  // namespace moiety
