#include "moiety/base/launch.cuh"
#include "moiety/base/math.h"
#include "moiety/formats/octet.cuh"
#include "moiety/nn/element.h"
#include "moiety/nn/elementwise.h"

namespace moiety::nn {
namespace {

constexpr int kThreads = 256;

template <class F>
__global__ void __launch_bounds__(kThreads) for_each_element(int64_t n, F f) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) f(i);
}

// Calls f(i) for i = 0 ... n - 1.
template <class F>
void for_each(const char* name, int64_t n, const Stream& stream, const F& f) {
  launch(name, for_each_element<F>, {blocks_for(n, kThreads), kThreads}, stream, n, f);
}

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
  for_each(
      "document_starts", position_BS.numel(), stream,
      DocumentStart{position_BS.data<int32_t>(), start_BS.data<int32_t>(), position_BS.size(1)});
}

void round_to_bf16_cuda(TensorView x, TensorView out, bool accumulate, const Stream& stream) {
  const int64_t n = x.numel(), octets = blocks_for(n, kOctet);
  const auto run = [&](auto round) { for_each("round_to_bf16", octets, stream, round); };
  const float* from = x.data<float>();
  bf16* to = out.data<bf16>();
  octets_fit({&x, &out}) ? run(RoundOctet<true>{from, to, n, accumulate})
                         : run(RoundOctet<false>{from, to, n, accumulate});
}

void apply_sigmoid_cuda(TensorView x_T, const Stream& stream) {
  for_each("sigmoid", x_T.numel(), stream, Sigmoid{x_T.data<float>()});
}

void sigmoid_gradient_cuda(TensorView s_T, TensorView dy_T, TensorView dx_T, const Stream& stream) {
  with_storage(dx_T.dtype(), [&](auto element) {
    using T = decltype(element);
    for_each("sigmoid_gradient", dx_T.numel(), stream,
             SigmoidGradient<T>{s_T.data<float>(), dy_T.data<float>(), dx_T.data<T>()});
  });
}

void set_random_state_cuda(const RandomState& a, const Stream& stream) {
  for_each("set_random_state", 1, stream,
           SetRandomState{a.state_2.data<uint64_t>(), a.seed, a.draw, a.draw_at.data<uint64_t>()});
}

}  // namespace moiety::nn
