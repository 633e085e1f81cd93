#include "moiety/base/launch.cuh"
#include "moiety/formats/bf16.h"
#include "moiety/model/tensor_parallel_sum.h"
#include "moiety/nn/element.h"

namespace moiety::model {
namespace {

constexpr int kThreads = 256;

// The addend is of type A; null for none.
template <class P, class A, class O>
__global__ void __launch_bounds__(kThreads)
    add_parts_kernel(const P* parts, int64_t ranks, const A* addend, O* out, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  float sum = static_cast<float>(parts[i]);
  for (int64_t r = 1; r < ranks; ++r) sum += static_cast<float>(parts[r * n + i]);
  if (addend) sum += static_cast<float>(addend[i]);
  out[i] = static_cast<O>(sum);
}

}  // namespace

void add_parts_cuda(TensorView parts, int64_t ranks, TensorView addend, TensorView out,
                    const Stream& stream) {
  const int64_t n = out.numel();
  const DType addend_dtype = addend.defined() ? addend.dtype() : out.dtype();
  nn::with_storage(parts.dtype(), [&](auto p) {
    nn::with_storage(addend_dtype, [&](auto a) {
      nn::with_storage(out.dtype(), [&](auto o) {
        using P = decltype(p);
        using A = decltype(a);
        using O = decltype(o);
        launch("add_parts", add_parts_kernel<P, A, O>, {blocks_for(n, kThreads), kThreads}, stream,
               parts.data<P>(), ranks, addend.data<A>(), out.data<O>(), n);
      });
    });
  });
}

}  // namespace moiety::model
