// Attention for any head size, in fp32. A warp has a query (forward, dQ) or a key (dK, dV), its
// lanes have the elements of heads; sums run in ascending order.
#include <type_traits>

#include "moiety/formats/bf16.h"
#include "moiety/nn/attention_device.cuh"

namespace moiety::nn {
namespace {

using namespace device;

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMost = 8;  // elements of a lane, for heads of up to 256

// A row of a head spread over the lanes of a warp: a lane has elements lane + 32 n.
struct LaneRow {
  float v[kMost];

  template <class T>
  __device__ void load(const T* row, int64_t head_dim) {
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int64_t c = threadIdx.x % 32 + 32 * n;
      v[n] = c < head_dim ? float(row[c]) : 0;
    }
  }
  template <class T>
  __device__ void store(T* row, int64_t head_dim) const {
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int64_t c = threadIdx.x % 32 + 32 * n;
      if (c < head_dim) row[c] = T(v[n]);
    }
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (float& x : v) x *= factor;
  }
  __device__ void add(float factor, const LaneRow& other) {
#pragma unroll
    for (int n = 0; n < kMost; ++n) v[n] = fmaf(factor, other.v[n], v[n]);
  }
};

__device__ float dot(const LaneRow& x, const LaneRow& y) {
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kMost; ++n) sum = fmaf(x.v[n], y.v[n], sum);
  return sum_of_warp(sum);
}

// Finds the query of this warp, where `index` counts heads, then queries; false if there is none.
__device__ bool own_row(int64_t rows, int64_t heads, int64_t& row, int64_t& head) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  row = index / heads;
  head = index % heads;
  return row < rows;
}

template <class T>
__global__ void __launch_bounds__(kThreads) attend(AttentionJob job) {
  int64_t i, head;
  if (!own_row(job.queries, job.sequences * job.groups * job.heads, i, head)) return;
  const HeadIndex h(job, head, job.heads);
  const auto keys = h.rows<T>(job.k), values = h.rows<T>(job.v);
  const int32_t* starts = h.starts(job);
  LaneRow q, k, v, o{};
  q.load(h.rows<T>(job.q)[i], job.head_dim);
  float most = -INFINITY, sum = 0;
  const int64_t last = job.keys - job.queries + i;
  for (int64_t j = starts ? starts[i] : 0; j <= last; ++j) {
    k.load(keys[j], job.head_dim);
    v.load(values[j], job.head_dim);
    const float s = job.scale * dot(q, k);
    if (s > most) {
      const float correction = expf(most - s);
      sum *= correction;
      o.scale(correction);
      most = s;
    }
    const float p = expf(s - most);
    sum += p;
    o.add(p, v);
  }
#pragma unroll
  for (float& x : o.v) x /= sum;
  o.store(h.rows<T>(job.o)[i], job.head_dim);
  if (threadIdx.x % 32 == 0) h.statistics(job, job.lse)[i] = most + logf(sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads) query_gradient(AttentionJob job) {
  int64_t i, head;
  if (!own_row(job.queries, job.sequences * job.groups * job.heads, i, head)) return;
  const HeadIndex h(job, head, job.heads);
  const auto keys = h.rows<T>(job.k), values = h.rows<T>(job.v);
  const int32_t* starts = h.starts(job);
  LaneRow q, d_out, o, k, v, dq{};
  q.load(h.rows<T>(job.q)[i], job.head_dim);
  d_out.load(h.rows<T>(job.d_out)[i], job.head_dim);
  o.load(h.rows<T>(job.o)[i], job.head_dim);
  const float lse = h.statistics(job, job.lse)[i], delta = dot(d_out, o);
  const int64_t last = job.keys - job.queries + i;
  for (int64_t j = starts ? starts[i] : 0; j <= last; ++j) {
    k.load(keys[j], job.head_dim);
    v.load(values[j], job.head_dim);
    const float p = expf(job.scale * dot(q, k) - lse);
    dq.add(job.scale * p * (dot(d_out, v) - delta), k);
  }
  dq.store(h.rows<T>(job.dq)[i], job.head_dim);
  if (threadIdx.x % 32 == 0) h.statistics(job, job.delta)[i] = delta;
}

// Runs after query_gradient, which leaves delta.
template <class T>
__global__ void __launch_bounds__(kThreads) key_gradient(AttentionJob job) {
  int64_t j, head;
  if (!own_row(job.keys, job.sequences * job.groups, j, head)) return;
  HeadIndex h(job, head, 1);
  const int32_t* starts = h.starts(job);
  const int64_t first = max(int64_t{0}, j - (job.keys - job.queries));
  const int64_t end = first_query_after(starts, job.queries, j);
  LaneRow k, v, q, d_out, dk{}, dv{};
  k.load(h.rows<T>(job.k)[j], job.head_dim);
  v.load(h.rows<T>(job.v)[j], job.head_dim);
  for (h.head = 0; h.head < job.heads; ++h.head) {
    const auto queries = h.rows<T>(job.q), d_outs = h.rows<T>(job.d_out);
    const float *lse = h.statistics(job, job.lse), *delta = h.statistics(job, job.delta);
    for (int64_t i = first; i < end; ++i) {
      q.load(queries[i], job.head_dim);
      d_out.load(d_outs[i], job.head_dim);
      const float p = expf(job.scale * dot(q, k) - lse[i]);
      dv.add(p, d_out);
      dk.add(job.scale * p * (dot(d_out, v) - delta[i]), q);
    }
  }
  h.head = 0;
  dk.store(h.rows<T>(job.dk)[j], job.head_dim);
  dv.store(h.rows<T>(job.dv)[j], job.head_dim);
}

}  // namespace

AttentionStart plain_attention_start(const AttentionKernel& kernel, const AttentionJob& job) {
  const int64_t groups = job.sequences * job.groups, queries = groups * job.heads * job.queries;
  const auto shape = [](int64_t rows) { return LaunchShape{blocks_for(rows, kWarps), kThreads}; };
  return start_of<kPlainAttention>(kernel, [&]<AttentionKernel k>() -> AttentionStart {
    using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
    if constexpr (k.pass == AttentionPass::kForward) {
      return {attend<T>, shape(queries)};
    } else if constexpr (k.pass == AttentionPass::kQueryGradient) {
      return {query_gradient<T>, shape(queries)};
    } else {
      return {key_gradient<T>, shape(groups * job.keys)};
    }
  });
}

}  // namespace moiety::nn
