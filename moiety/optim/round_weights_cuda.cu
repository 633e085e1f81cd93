#include "moiety/base/copy.h"
#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/optim/initialize.h"

namespace moiety::optim {
namespace {

constexpr int kThreads = 256;

// Rounds one octet per thread.
template <bool kVector>
__global__ void __launch_bounds__(kThreads)
    round_octets(const float* __restrict__ from, bf16* __restrict__ to, int64_t n) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kOctet, valid = n - first;
  if (valid <= 0) return;
  const auto store = [&]<bool kWhole>(std::bool_constant<kWhole>) {
    const Octet<float> x = load_octet<kWhole>(from + first, valid);
    float v[kOctet];
#pragma unroll
    for (int k = 0; k < kOctet; ++k) v[k] = x[k];
    store_octet<kWhole>(to + first, round_octet<bf16>(v), valid);
  };
  if (kVector && valid >= kOctet) return store(std::true_type());
  store(std::false_type());
}

}  // namespace

void round_weights_cuda(TensorView master, TensorView weight, const Stream& stream) {
  if (weight.dtype() == DType::kFloat32) return copy(weight, master, stream);
  const int64_t n = master.numel();
  const auto aligned = [](const TensorView& x) {
    return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  };
  launch("round_weights",
         aligned(master) && aligned(weight) ? round_octets<true> : round_octets<false>,
         {blocks_for(n, kThreads * kOctet), kThreads}, stream, master.data<float>(),
         weight.data<bf16>(), n);
}

}  // namespace moiety::optim
