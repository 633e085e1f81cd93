// Launches of kernels: sizes in 64 bits, the stream's device made current, errors that name the
// kernel.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>
#include <type_traits>

#include "moiety/base/cuda_check.cuh"
#include "moiety/base/gpu.h"
#include "moiety/base/stream.h"

namespace moiety {

// The shape of a launch. Kernels have one grid dimension, the only one that may exceed 65535, and
// find their tile from it.
struct LaunchShape {
  int64_t blocks = 0;  // 0 launches nothing
  int threads = 256;
  int64_t shared_bytes = 0;  // dynamic shared memory
  // The kernel may begin while the kernel before it on the stream still runs, if that one allows
  // it. Then memory that the other writes must not be touched before
  // cudaGridDependencySynchronize(), which some block must call.
  bool early = false;
};

constexpr int64_t blocks_for(int64_t items, int64_t items_a_block) {
  return (items + items_a_block - 1) / items_a_block;
}

namespace detail {
// Allows a kernel so much dynamic shared memory on the GPU, which is current: more than 48 KiB, with
// what the kernel declares itself, must be asked for. Asked once, since that costs 1 to 3 us.
void allow_shared(const void* kernel, int device, int64_t bytes);
// The number of blocks that run on the GPU at a time; asked once, too.
int64_t resident_blocks(const void* kernel, int threads, int64_t shared_bytes, int device);
// `arguments` point to values of the kernel's very types.
void launch(const char* name, const void* kernel, const LaunchShape& shape, const Stream& stream,
            void** arguments);
}  // namespace detail

// Launches a kernel. `name` stands in profiles, where the launch is a span of the host, and in
// errors: "quantize_rows: launch of 3 blocks of 2048 threads: ...". Arguments become what the kernel
// takes; those that are of its type, such as maps of kilobytes, are not copied.
template <class... Params>
void launch(const char* name, void (*kernel)(Params...), const LaunchShape& shape,
            const Stream& stream, const std::type_identity_t<Params>&... arguments) {
  void* list[] = {const_cast<Params*>(&arguments)..., nullptr};
  detail::launch(name, reinterpret_cast<const void*>(kernel), shape, stream, list);
}

// Number of the kernel's blocks that run on the stream's GPU at a time: the grid of a persistent
// kernel.
template <class... Params>
int64_t resident_blocks(void (*kernel)(Params...), int threads, int64_t shared_bytes,
                        const Stream& stream) {
  return detail::resident_blocks(reinterpret_cast<const void*>(kernel), threads, shared_bytes,
                                 stream.device().index);
}

}  // namespace moiety
