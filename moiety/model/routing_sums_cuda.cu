#include "moiety/base/launch.cuh"
#include "moiety/model/routing_sums.h"
#include "moiety/moe/prepare.h"
#include "moiety/nn/loss.h"

namespace moiety::model {
namespace {

constexpr int kThreads = 256;

// Leaves the sum of all lanes in lane[0], folded by halves, where every thread may read it.
template <class T>
__device__ void fold(T* lane) {
  for (int half = kLossLanes / 2; half >= 1; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) lane[threadIdx.x] += lane[threadIdx.x + half];
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kLossLanes)
    count_targets_kernel(const int32_t* target, const uint8_t* mask, const uint8_t* routed,
                         int64_t tokens, bool in_scope, int64_t* own, int64_t* scope) {
  __shared__ int64_t lane[kLossLanes];
  int64_t n = 0, unrouted = 0;
  for (int64_t t = threadIdx.x; t < tokens; t += kLossLanes) {
    n += target[t] != nn::kIgnoredTarget && (!mask || mask[t] != 0);
    unrouted += routed && routed[t] == 0;
  }
  lane[threadIdx.x] = n;
  fold(lane);
  n = lane[0];
  if (routed) {
    __syncthreads();
    lane[threadIdx.x] = unrouted;
    fold(lane);
    tokens -= lane[0];
  }
  if (threadIdx.x > 0) return;
  own[0] = n;
  own[1] = tokens;
  scope[0] = in_scope ? n : 0;
  scope[1] = in_scope ? tokens : 0;
}

struct CountSums {
  const int64_t *own, *count, *info;
  int64_t *count_2, *pairs, *layer;
  int64_t layers, segments, experts, info_words;
};

// Adds the counts: a thread has an expert of a layer, and thread l has the words of layer l.
__global__ void __launch_bounds__(kThreads) add_counts_kernel(CountSums a) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < 2 && a.own) a.count_2[i] += a.own[i];
  if (i < a.layers) {
    const int64_t* info = a.info + i * a.info_words;
    int64_t* word = a.layer + i * kLayerWords;
    word[kLayerRequired] = max(word[kLayerRequired], info[moe::kInfoGroupRequired]);
    word[kLayerCapacity] = info[moe::kInfoCapacity];
    word[kLayerDropped] += info[moe::kInfoGroupDropped];
    if (info[moe::kInfoGroupOverflow] != 0) word[kLayerOverflow] = 1;
  }
  if (i >= a.layers * a.experts) return;
  const int64_t l = i / a.experts, columns = a.experts + 1;
  const int64_t* count = a.count + l * a.segments * columns + i % a.experts;
  int64_t n = 0;
  for (int64_t s = 0; s < a.segments; ++s) n += count[s * columns];
  a.pairs[i] += n;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_layers_kernel(const T* x, int64_t layers, int64_t n, T* out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  T sum = 0;
  for (int64_t l = 0; l < layers; ++l) sum += x[l * n + i];
  out[i] = sum;
}

template <class T>
void sum_layers_of(const TensorView& x_LSE, const TensorView& out_SE, const Stream& stream) {
  const int64_t n = out_SE.numel();
  launch("sum_layers", sum_layers_kernel<T>, {blocks_for(n, kThreads), kThreads}, stream,
         x_LSE.data<T>(), x_LSE.size(0), n, out_SE.data<T>());
}

__global__ void add_routing_losses_kernel(const int64_t* weight, const double* loss, double* sum) {
  sum[threadIdx.x] += static_cast<double>(weight[0]) * loss[threadIdx.x];
}

__global__ void __launch_bounds__(kLossLanes)
    add_losses_kernel(const float* loss, int64_t tokens, double* sum) {
  __shared__ double lane[kLossLanes];
  double s = 0;
#pragma unroll 4
  for (int64_t t = threadIdx.x; t < tokens; t += kLossLanes) s += loss[t];
  lane[threadIdx.x] = s;
  fold(lane);
  if (threadIdx.x == 0) *sum += lane[0];
}

}  // namespace

void count_targets_cuda(const TargetCount& a, const Stream& stream) {
  launch("count_targets", count_targets_kernel, {1, kLossLanes}, stream, a.target_T.data<int32_t>(),
         a.mask_T.data<uint8_t>(), a.routed_T.data<uint8_t>(), a.target_T.numel(), a.in_scope,
         a.own_2.data<int64_t>(), a.scope_2.data<int64_t>());
}

void add_counts_cuda(const RoutingCounts& a, const StepSums& sums, const Stream& stream) {
  const TensorView pairs_LE = sums.pairs_LE();
  const CountSums args{.own = a.own_2.data<int64_t>(),
                       .count = a.count_LSE.data<int64_t>(),
                       .info = a.info_LW.data<int64_t>(),
                       .count_2 = sums.count_2().data<int64_t>(),
                       .pairs = pairs_LE.data<int64_t>(),
                       .layer = sums.layer_L4().data<int64_t>(),
                       .layers = pairs_LE.size(0),
                       .segments = a.count_LSE.size(1),
                       .experts = pairs_LE.size(1),
                       .info_words = a.info_LW.size(1)};
  const int64_t threads = std::max<int64_t>(2, pairs_LE.numel());
  launch("add_counts", add_counts_kernel, {blocks_for(threads, kThreads), kThreads}, stream, args);
}

void sum_layers_cuda(TensorView x_LSE, TensorView out_SE, const Stream& stream) {
  out_SE.dtype() == DType::kInt64 ? sum_layers_of<int64_t>(x_LSE, out_SE, stream)
                                  : sum_layers_of<double>(x_LSE, out_SE, stream);
}

void add_routing_losses_cuda(TensorView weight_2, TensorView loss_2, const StepSums& sums,
                             const Stream& stream) {
  launch("add_routing_losses", add_routing_losses_kernel, {1, 2}, stream, weight_2.data<int64_t>(),
         loss_2.data<double>(), sums.loss_3().data<double>() + 1);
}

void add_losses_cuda(TensorView loss_T, const StepSums& sums, const Stream& stream) {
  launch("add_losses", add_losses_kernel, {1, kLossLanes}, stream, loss_T.data<float>(),
         loss_T.numel(), sums.loss_3().data<double>());
}

}  // namespace moiety::model
