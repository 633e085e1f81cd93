// RMSNorm on GPUs. A group of lanes has a row: the 32 lanes of lane_sum, or as many as a short row
// has octets.
#include "moiety/base/copy.h"
#include "moiety/base/launch.cuh"
#include "moiety/nn/element.h"
#include "moiety/nn/norm.h"
#include "moiety/nn/norm_device.cuh"
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

// Normalizes rows of which a lane keeps kChunks octets in registers; a longer row is read twice.
// kRows rows wait for memory together.
template <class T, bool kVector, int kLanes, int kChunks, int kRows>
__global__ void __launch_bounds__(kThreads) norm_rows(const __grid_constant__ Params p) {
  constexpr int kGroups = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const auto column = [&](int chunk) { return int64_t{chunk * kLanes + lane} * kOctet; };
  const int64_t row0 = int64_t{blockIdx.x} * kGroups * kRows + group;
  const T* x[kRows];
  T* y[kRows];
  int64_t n[kRows];
  Octet<T> held[kRows][kChunks];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = row0 + k * kGroups;
    n[k] = row < p.rows ? p.n : 0;
    const auto [from, to] = p.map.offsets(row < p.rows ? row : 0);
    x[k] = static_cast<const T*>(p.x) + from;
    y[k] = static_cast<T*>(p.y) + to;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      held[k][j] = load_octet<kVector>(x[k] + column(j), n[k] - column(j));
    }
  }
  uint32_t amax = 0;
  const auto store = [&](int k, int64_t c, const Octet<T>& values, float r) {
    const Octet<T> g = load_octet<kVector>(static_cast<const T*>(p.weight) + c, n[k] - c);
    float v[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = values[i] * r * g[i];
    Octet<T> out = round_octet<T>(v);
    store_octet<kVector>(y[k] + c, out, n[k] - c);
    if (p.amax) amax = max(amax, out.amax(n[k] - c));
  };
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) sum = device::add_products(held[k][j], held[k][j], sum);
#pragma unroll 4
    for (int64_t c = column(kChunks); c < n[k]; c += kLanes * kOctet) {
      const Octet<T> more = load_octet<kVector>(x[k] + c, n[k] - c);
      sum = device::add_products(more, more, sum);
    }
    const float r = device::inverse_rms(device::fold<kLanes>(sum), p.length, p.eps);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) store(k, column(j), held[k][j], r);
#pragma unroll 4
    for (int64_t c = column(kChunks); c < n[k]; c += kLanes * kOctet) {
      store(k, c, load_octet<kVector>(x[k] + c, n[k] - c), r);
    }
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

template <class T, int kLanes>
void launch_short(const Params& p, const Stream& stream) {
  launch("norm", norm_short_rows<T, kLanes>,
         {blocks_for(p.rows, kThreads / kLanes * (16 / sizeof(T))), kThreads}, stream, p);
}

template <class T, bool kVector, int kLanes, int kChunks, int kRows>
void launch_rows(const Params& p, const Stream& stream) {
  launch("norm", norm_rows<T, kVector, kLanes, kChunks, kRows>,
         {blocks_for(p.rows, kThreads / kLanes * kRows), kThreads}, stream, p);
}

template <class T>
void launch_norm(const NormArgs& a, const Params& p, const Stream& stream) {
  if (!octets_fit({&a.x, &a.y, &a.weight_D})) {
    launch_rows<T, false, 32, 1, 1>(p, stream);
  } else if (p.n <= 8 * kOctet) {
    launch_short<T, 8>(p, stream);
  } else if (p.n <= 16 * kOctet) {
    launch_short<T, 16>(p, stream);
  } else if (p.n <= 32 * kOctet) {
    launch_short<T, 32>(p, stream);
  } else if (p.n * int64_t{sizeof(T)} <= 4096) {
    launch_rows<T, true, 32, 16 / sizeof(T), 1>(p, stream);
  } else if (p.n * int64_t{sizeof(T)} <= 8192) {
    launch_rows<T, true, 32, 32 / sizeof(T), 1>(p, stream);
  } else {
    launch_rows<T, true, 32, 64 / sizeof(T), 1>(p, stream);
  }
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
  with_storage(a.x.dtype(), [&](auto element) { launch_norm<decltype(element)>(a, p, stream); });
}

}  // namespace moiety::nn
