// Rope on GPUs. A thread takes eight pairs of a few heads at one position, whose cosines and sines
// it reads once.
#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/formats/fp32.h"
#include "moiety/formats/octet.cuh"
#include "moiety/nn/element.h"
#include "moiety/nn/rope.h"
#include "moiety/nn/row_map.cuh"

namespace moiety::nn {
namespace {

constexpr int kThreads = 256, kHeads = 4;

struct Params {
  void* x;
  const float* table;
  const int32_t* position;  // null: position t is t mod seq_len
  int64_t stride_t, stride_g, stride_n;
  int64_t items, heads, half, limit;
  Divisor octets, parts, seq_len, per_group;  // octets of a half head; parts of a token's heads
  bool inverse;
};

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) rotate_heads(const __grid_constant__ Params p) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= p.items) return;
  // An item is an octet of a part of the heads of a token.
  const int64_t rest = p.octets.divide(item), t = p.parts.divide(rest);
  const int64_t i0 = (item - rest * p.octets.divisor()) * kOctet;
  const int64_t head0 = (rest - t * p.parts.divisor()) * kHeads;
  const int64_t valid = p.half - i0;
  const int64_t position =
      p.position ? p.position[t] : t - p.seq_len.divide(t) * p.seq_len.divisor();
  const bool known = position >= 0 && position < p.limit;
  const float* cosine = p.table + (known ? position : 0) * 2 * p.half + i0;
  const Octet<float> c = load_octet<kVector>(cosine, valid),
                     s = load_octet<kVector>(cosine + p.half, valid);
  T* at[kHeads];
  Octet<T> low[kHeads], high[kHeads];
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    if (head0 + k >= p.heads) continue;
    const int64_t g = p.per_group.divide(head0 + k), n = head0 + k - g * p.per_group.divisor();
    at[k] = static_cast<T*>(p.x) + t * p.stride_t + g * p.stride_g + n * p.stride_n + i0;
    low[k] = load_octet<kVector>(at[k], valid);
    high[k] = load_octet<kVector>(at[k] + p.half, valid);
  }
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    if (head0 + k >= p.heads) continue;
    float v[kOctet], w[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float sine = p.inverse ? -s[i] : s[i];
      v[i] = known ? low[k][i] * c[i] - high[k][i] * sine : kCanonicalNan;
      w[i] = known ? high[k][i] * c[i] + low[k][i] * sine : kCanonicalNan;
    }
    store_octet<kVector>(at[k], round_octet<T>(v), valid);
    store_octet<kVector>(at[k] + p.half, round_octet<T>(w), valid);
  }
}

}  // namespace

void rope_cuda(const RopeArgs& a, const Stream& stream) {
  const TensorView& x = a.x_TGNC;
  const int64_t half = x.size(3) / 2, heads = x.size(1) * x.size(2);
  const int64_t octets = blocks_for(half, kOctet), parts = blocks_for(heads, kHeads);
  const Params p{x.raw(),
                 a.table.data<float>(),
                 a.position_T.data<int32_t>(),
                 x.stride(0),
                 x.stride(1),
                 x.stride(2),
                 x.size(0) * parts * octets,
                 heads,
                 half,
                 a.table.size(0),
                 Divisor(std::max<int64_t>(octets, 1)),
                 Divisor(std::max<int64_t>(parts, 1)),
                 Divisor(std::max<int64_t>(a.seq_len, 1)),
                 Divisor(std::max<int64_t>(x.size(2), 1)),
                 a.inverse};
  const bool vector = half % kOctet == 0 && octets_fit({&x, &a.table});
  with_storage(x.dtype(), [&](auto element) {
    using T = decltype(element);
    launch("rope", vector ? rotate_heads<T, true> : rotate_heads<T, false>,
           {blocks_for(p.items, kThreads), kThreads}, stream, p);
  });
}

}  // namespace moiety::nn
