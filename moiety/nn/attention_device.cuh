// Heads and their rows, for the kernels of attention, and the launches of those.
#pragma once

#include "moiety/base/kernel_list.cuh"
#include "moiety/nn/attention_kernel.h"

namespace moiety::nn {

using AttentionStart = KernelStart<AttentionJob>;
AttentionStart tile_attention_start(const AttentionKernel& kernel, const AttentionJob& job);
AttentionStart plain_attention_start(const AttentionKernel& kernel, const AttentionJob& job);

namespace device {

constexpr float kLog2E = 1.44269504f;

// The rows of one head: row r is at data + r * stride.
template <class T>
struct HeadRows {
  T* data;
  int64_t stride;
  __device__ T* operator[](int64_t r) const { return data + r * stride; }
};

// The place of a query head or, with M = 1, of a key head. Heads of a sequence are neighbours.
struct HeadIndex {
  int64_t sequence, group, head;

  __device__ HeadIndex(const AttentionJob& job, int64_t index, int64_t heads) {
    head = index % heads;
    group = index / heads % job.groups;
    sequence = index / heads / job.groups;
  }
  template <class T>
  __device__ HeadRows<T> rows(const HeadStrides& x) const {
    return {static_cast<T*>(x.data) + sequence * x.sequence + group * x.group + head * x.head,
            x.row};
  }
  // This head's row of `x`, which is lse or delta.
  __device__ float* statistics(const AttentionJob& job, float* x) const {
    return x + ((sequence * job.groups + group) * job.heads + head) * job.queries;
  }
  // The document starts of this sequence's queries; null if there are no documents.
  __device__ const int32_t* starts(const AttentionJob& job) const {
    return job.document_start ? job.document_start + sequence * job.queries : nullptr;
  }
};

// The first query whose document begins after key j; `queries` if there is none.
__device__ inline int64_t first_query_after(const int32_t* starts, int64_t queries, int64_t j) {
  if (!starts) return queries;
  int64_t low = 0, high = queries;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (starts[middle] > j) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

__device__ inline float sum_of_warp(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

}  // namespace device
}  // namespace moiety::nn
