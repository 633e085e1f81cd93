#include "moiety/base/launch.cuh"
#include "moiety/base/math.h"
#include "moiety/formats/octet.cuh"
#include "moiety/nn/element.h"
#include "moiety/nn/elementwise.h"

namespace moiety::nn {
namespace {

constexpr int kThreads = 256;

// Calls f(i) for i = 0 ... n - 1.
template <class F>
__global__ void __launch_bounds__(kThreads) for_each_element(int64_t n, F f) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) f(i);
}

LaunchShape over(int64_t n) { return {blocks_for(n, kThreads), kThreads}; }

struct DocumentStart {
  const int32_t* position;
  int32_t* start;
  int64_t seq_len;
  __device__ void operator()(int64_t i) const { start[i] = int32_t(i % seq_len) - position[i]; }
};

// Rounds octet i of a tensor.
template <bool kVector>
struct RoundOctet {
  const float* x;
  bf16* out;
  int64_t n;
  bool accumulate;
  __device__ void operator()(int64_t i) const {
    const int64_t first = i * kOctet, valid = n - first;
    const Octet<float> in = load_octet<kVector>(x + first, valid);
    float v[kOctet];
#pragma unroll
    for (int k = 0; k < kOctet; ++k) v[k] = in[k];
    if (accumulate) {
      const Octet<bf16> old = load_octet<kVector>(out + first, valid);
#pragma unroll
      for (int k = 0; k < kOctet; ++k) v[k] = old[k] + v[k];
    }
    store_octet<kVector>(out + first, round_octet<bf16>(v), valid);
  }
};

struct Sigmoid {
  float* x;
  __device__ void operator()(int64_t i) const { x[i] = sigmoid(x[i]); }
};

struct SetRandomState {
  uint64_t* state;
  uint64_t seed, draw;
  const uint64_t* draw_at;
  __device__ void operator()(int64_t) const {
    state[0] = seed;
    state[1] = draw_at ? *draw_at : draw;
  }
};

template <class T>
struct SigmoidGradient {
  const float *s, *dy;
  T* dx;
  __device__ void operator()(int64_t i) const { dx[i] = T(dy[i] * s[i] * (1 - s[i])); }
};

}  // namespace

void document_starts_cuda(TensorView position_BS, TensorView start_BS, const Stream& stream) {
  const int64_t n = position_BS.numel();
  const DocumentStart start{position_BS.data<int32_t>(), start_BS.data<int32_t>(),
                            position_BS.size(1)};
  launch("document_starts", for_each_element<DocumentStart>, over(n), stream, n, start);
}

void round_to_bf16_cuda(TensorView x, TensorView out, bool accumulate, const Stream& stream) {
  const int64_t n = x.numel(), octets = blocks_for(n, kOctet);
  const auto round = [&]<bool kVector>() {
    launch("round_to_bf16", for_each_element<RoundOctet<kVector>>, over(octets), stream, octets,
           RoundOctet<kVector>{x.data<float>(), out.data<bf16>(), n, accumulate});
  };
  octets_fit({&x, &out}) ? round.operator()<true>() : round.operator()<false>();
}

void apply_sigmoid_cuda(TensorView x_T, const Stream& stream) {
  const int64_t n = x_T.numel();
  launch("sigmoid", for_each_element<Sigmoid>, over(n), stream, n, Sigmoid{x_T.data<float>()});
}

void sigmoid_gradient_cuda(TensorView s_T, TensorView dy_T, TensorView dx_T, const Stream& stream) {
  with_storage(dx_T.dtype(), [&](auto element) {
    using T = decltype(element);
    const int64_t n = dx_T.numel();
    launch("sigmoid_gradient", for_each_element<SigmoidGradient<T>>, over(n), stream, n,
           SigmoidGradient<T>{s_T.data<float>(), dy_T.data<float>(), dx_T.data<T>()});
  });
}

void set_random_state_cuda(const RandomState& a, const Stream& stream) {
  const SetRandomState set{a.state_2.data<uint64_t>(), a.seed, a.draw, a.draw_at.data<uint64_t>()};
  launch("set_random_state", for_each_element<SetRandomState>, over(1), stream, int64_t{1}, set);
}

}  // namespace moiety::nn
