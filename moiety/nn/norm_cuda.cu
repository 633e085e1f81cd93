// RMSNorm on GPUs. A group of lanes has a row: the 32 lanes of lane_sum, or as many as a short row
// has octets.
#include <type_traits>

#include "moiety/base/copy.h"
#include "moiety/base/kernel_list.cuh"
#include "moiety/formats/bf16.h"
#include "moiety/nn/norm.h"
#include "moiety/nn/norm_device.cuh"
#include "moiety/nn/norm_kernel.h"
#include "moiety/nn/row_map.cuh"
#include "moiety/nn/rows.h"
#include "moiety/quant/amax_device.cuh"

namespace moiety::nn {
namespace {

constexpr int kThreads = 128;

struct Params {
  const void *x, *weight;
  void* y;
  RowMap<2> map;  // x, y
  int64_t rows, n;
  device::RowLength length;
  float eps;
  uint32_t* amax;  // may be null
};

// A warp normalizes a row, of which a lane keeps kChunks octets in registers; a longer row is read
// twice.
template <class T, bool kVector, int kChunks>
__global__ void __launch_bounds__(kThreads) norm_rows(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32;
  const auto column = [&](int chunk) { return int64_t{chunk * 32 + lane} * kOctet; };
  const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  const int64_t n = row < p.rows ? p.n : 0;
  const auto [from, to] = p.map.offsets(row < p.rows ? row : 0);
  const T* x = static_cast<const T*>(p.x) + from;
  T* y = static_cast<T*>(p.y) + to;
  Octet<T> held[kChunks];
#pragma unroll
  for (int j = 0; j < kChunks; ++j) held[j] = load_octet<kVector>(x + column(j), n - column(j));
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) sum = device::add_products(held[j], held[j], sum);
#pragma unroll 4
  for (int64_t c = column(kChunks); c < n; c += 32 * kOctet) {
    const Octet<T> more = load_octet<kVector>(x + c, n - c);
    sum = device::add_products(more, more, sum);
  }
  const float r = device::inverse_rms(device::fold<32>(sum), p.length, p.eps);
  uint32_t amax = 0;
  const auto store = [&](int64_t c, const Octet<T>& values) {
    const Octet<T> g = load_octet<kVector>(static_cast<const T*>(p.weight) + c, n - c);
    float v[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = values[i] * r * g[i];
    Octet<T> out = round_octet<T>(v);
    store_octet<kVector>(y + c, out, n - c);
    if (p.amax) amax = max(amax, out.amax(n - c));
  };
#pragma unroll
  for (int j = 0; j < kChunks; ++j) store(column(j), held[j]);
#pragma unroll 4
  for (int64_t c = column(kChunks); c < n; c += 32 * kOctet) {
    store(c, load_octet<kVector>(x + c, n - c));
  }
  if (p.amax) quant::device::raise_amax(p.amax, amax);
}

// Normalizes rows of one octet per lane: a group of lanes takes a batch of rows and folds their
// sums together.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads) norm_short_rows(const __grid_constant__ Params p) {
  constexpr int kBatch = 16 / sizeof(T), kSame = kLanes / kBatch;
  const int lane = threadIdx.x % kLanes;
  const int64_t c = lane * kOctet;
  const int64_t group = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t row0 = group * kBatch, named = row0 + lane % kBatch;
  const device::RowOffsets<kLanes, 2> offsets{p.map.offsets(named < p.rows ? named : 0),
                                              p.map.small};
  Octet<T> x[kBatch];
  float sums[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const T* from = static_cast<const T*>(p.x) + offsets.of(0, j) + c;
    x[j] = load_octet<true>(from, row0 + j < p.rows ? p.n - c : 0);
  }
  const Octet<T> g = load_octet<true>(static_cast<const T*>(p.weight) + c, p.n - c);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) sums[j] = device::add_products(x[j], x[j], 0.0f);
  const float known = device::inverse_rms(device::fold_rows<kLanes>(sums), p.length, p.eps);
  uint32_t amax = 0;
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const float r = __shfl_sync(device::kWarp, known, j * kSame, kLanes);
    T* to = static_cast<T*>(p.y) + offsets.of(1, j) + c;
    const int64_t valid = row0 + j < p.rows ? p.n - c : 0;
    float v[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = x[j][i] * r * g[i];
    const Octet<T> out = round_octet<T>(v);
    store_octet<true>(to, out, valid);
    if (p.amax) amax = max(amax, out.amax(valid));
  }
  if (p.amax) quant::device::raise_amax(p.amax, amax);
}

KernelStart<Params> start_norm(const NormKernel& chosen, int64_t rows) {
  return start_of<kNormKernels>(chosen, [&]<NormKernel k>() -> KernelStart<Params> {
    using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
    if constexpr (k.family == NormFamily::kShort) {
      constexpr int kLanes = k.columns / kOctet;
      return {norm_short_rows<T, kLanes>,
              {blocks_for(rows, kThreads / kLanes * (16 / sizeof(T))), kThreads}};
    } else {
      constexpr int kChunks = k.columns / (32 * kOctet);
      return {norm_rows<T, k.family == NormFamily::kLong, kChunks>,
              {blocks_for(rows, kThreads / 32), kThreads}};
    }
  });
}

}  // namespace

void norm_cuda(const NormArgs& a, const Stream& stream) {
  if (a.sink.defined()) fill_bytes(a.sink.amax, 0, stream);
  const Params p{a.x.raw(),
                 a.weight_D.raw(),
                 a.y.raw(),
                 RowMap<2>({&a.x, &a.y}),
                 row_count(a.x),
                 a.x.size(-1),
                 device::row_length(a.x.size(-1)),
                 a.eps,
                 static_cast<uint32_t*>(a.sink.amax.raw())};
  const bool octets = octets_fit({&a.x, &a.y, &a.weight_D});
  const auto start = start_norm(choose_norm({a.x.dtype(), p.n, octets}), p.rows);
  launch("norm", start.kernel, start.shape, stream, p);
}

}  // namespace moiety::nn
