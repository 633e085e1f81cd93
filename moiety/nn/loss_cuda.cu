// Cross-entropy on GPUs. Most long rows are read once (loss_whole_cuda.cu). Over others a thread block
// goes three times: for the maximum, the sum of exponentials and the gradient. The first logits of a
// row stay in shared memory.
#include <algorithm>

#include "moiety/nn/element.h"
#include "moiety/nn/loss_device.cuh"

namespace moiety::nn {
namespace {

constexpr int kThreads = device::kRowThreads;

using Params = LossParams;
using Shared = device::LossRowMemory;

// Fills a row that has no target, or an invalid one.
template <class T>
__device__ void store_constant(const Params& p, int64_t n, float value) {
  if (threadIdx.x == 0) p.loss[n] = value;
  if (!p.dlogits) return;
  T* dz = static_cast<T*>(p.dlogits) + n * p.dlogits_stride;
  for (int64_t i = threadIdx.x; i < p.vocabulary; i += kThreads) dz[i] = T(value);
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads, 2) loss_rows(const __grid_constant__ Params p) {
  extern __shared__ float4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  float* held = reinterpret_cast<float*>(memory + sizeof(Shared) / sizeof(float4));
  const int64_t n = blockIdx.x;
  const device::LossTarget target = device::loss_target(p, n);
  if (!target.valid) return store_constant<T>(p, n, target.constant());
  const float* z = p.logits + n * p.logits_stride;
  const device::LossRow<kVector> row{z, held, p.vocabulary, p.held};
  const float max = device::row_max(row, shared.maxima);
  const float sum = device::row_sum(row, max, shared);
  if (threadIdx.x == 0) {
    const float lse = max + log(sum);
    p.loss[n] = lse - z[target.word];
    shared.factor = (1 + 2 * p.z_coef * lse) * (1 / sum);
  }
  if (!p.dlogits) return;
  __syncthreads();
  device::store_gradient(row, max, shared.factor, target.word,
                         static_cast<T*>(p.dlogits) + n * p.dlogits_stride);
}

}  // namespace

void cross_entropy_cuda(const CrossEntropyArgs& a, const Stream& stream) {
  const TensorView& dz = a.dlogits_NV;
  const int64_t vocabulary = a.logits_NV.size(1);
  const Params p{a.logits_NV.data<float>(),
                 a.logits_NV.stride(0),
                 a.target_N.data<int32_t>(),
                 a.mask_N.data<uint8_t>(),
                 a.loss_N.data<float>(),
                 dz.raw(),
                 dz.defined() ? dz.stride(0) : 0,
                 a.logits_NV.size(0),
                 vocabulary,
                 device::held_of_row(vocabulary),
                 a.z_coef};
  // Whether rows of `x` are whole vectors of 16 bytes, and of so many elements.
  const auto fit = [](const TensorView& x, int64_t elements) {
    return !x.defined() || (x.size(1) % elements == 0 && x.stride(0) % elements == 0 &&
                            reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0);
  };
  const bool vector = fit(a.logits_NV, 4) && fit(dz, 4);
  const DType dtype = dz.defined() ? dz.dtype() : DType::kBFloat16;
  if (vector && fit(dz, kOctet) && vocabulary % kOctet == 0 && vocabulary > device::kRowHeld &&
      loss_whole_takes(vocabulary)) {
    return loss_whole_cuda(p, dtype, stream);
  }
  const LaunchShape shape{p.rows, kThreads, int64_t{sizeof(Shared)} + 4 * p.held};
  with_storage(dtype, [&](auto element) {
    using T = decltype(element);
    launch("cross_entropy", vector ? loss_rows<T, true> : loss_rows<T, false>, shape, stream, p);
  });
}

}  // namespace moiety::nn
