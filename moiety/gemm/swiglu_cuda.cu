// Activations on GPUs. A warp has a row, and its lanes take octets of columns in turns. A block has
// some rows of the buffers, and first looks up the groups they belong to.
#include <algorithm>

#include "moiety/base/copy.h"
#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/gemm/activation_block.h"
#include "moiety/quant/amax_device.cuh"
#include "moiety/quant/quantize_group.h"

namespace moiety::gemm {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 2 * kWarps;  // rows of a block: more for one search, fewer to fill the GPU
constexpr uint32_t kWarp = 0xFFFFFFFFu;

struct Params {
  ActivationBlock block;  // describes all rows
  int64_t rows;
  uint32_t* amax;  // may be null
  // The groups; begin is null if there are none.
  const int64_t *begin, *count;
  uint32_t* status;  // may be null
  int64_t experts, capacity;
};

// kPlainGlu is kGlu without limit, alpha and offset, which the compiler then knows.
enum class Kind { kPlainGlu, kGlu, kSquaredRelu };

template <Kind kKind>
__device__ Activation activation_of(const Params& p) {
  return kKind == Kind::kPlainGlu ? swiglu() : p.block.activation;
}

__device__ quant::Claim claim_of(const Params& p, int64_t e) {
  return quant::claim(p.begin[e], p.begin[e + 1], p.count ? p.count + e : nullptr, p.capacity);
}

// The device's version of record_faults, for one thread.
__device__ void record_faults(const Params& p) {
  for (int64_t e = 0; e < p.experts; ++e) {
    const quant::Claim c = claim_of(p, e);
    if (c.valid) continue;
    if (p.status[0] == 0) {
      p.status[1] = uint32_t(OperationId::kActivation);
      p.status[2] = uint32_t(e);
      p.status[3] = uint32_t(c.rows);
    }
    p.status[0] |= kFaultGroup;
  }
}

// group[i] := the group of row row0 + i, or -1. All threads of a block call it.
__device__ void find_groups(const Params& p, int64_t row0, int (&group)[kRows]) {
  if (threadIdx.x < kRows) group[threadIdx.x] = p.begin ? -1 : 0;
  __syncthreads();
  if (!p.begin) return;
  bool fault = false;
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads) {
    const quant::Claim c = claim_of(p, e);
    fault = fault || !c.valid;
    if (!c.valid) continue;
    const int64_t first = max(c.begin, row0), end = min(c.begin + c.rows, row0 + kRows);
    for (int64_t r = first; r < end; ++r) atomicMax(&group[r - row0], int(e));
  }
  const bool any = __syncthreads_or(fault) != 0;
  if (any && blockIdx.x == 0 && threadIdx.x == 0 && p.status) record_faults(p);
}

template <class T>
struct Hidden {
  Octet<T> a, b;
};
template <class T, bool kVector, Kind kKind>
__device__ Hidden<T> load_hidden(const Params& p, const T* row, int64_t f) {
  const ActivationBlock& block = p.block;
  const int64_t valid = block.ffn - f;
  if constexpr (kKind == Kind::kSquaredRelu) return {load_octet<kVector>(row + f, valid), {}};
  return {load_octet<kVector>(row + hidden_column(0, f, block.ffn, block.interleave), valid),
          load_octet<kVector>(row + hidden_column(1, f, block.ffn, block.interleave), valid)};
}

template <Kind kKind>
__device__ float activate(const Activation& activation, float a, float b) {
  return kKind == Kind::kSquaredRelu ? squared_relu(a) : glu(activation, a, b);
}

template <class T, bool kVector, Kind kKind>
__device__ uint32_t forward_row(const Params& p, int64_t r) {
  const ActivationBlock& block = p.block;
  const Activation activation = activation_of<kKind>(p);
  const T* h = static_cast<const T*>(block.h) + r * block.h_stride;
  T* out = static_cast<T*>(block.a) + r * block.a_stride;
  const float* prob = static_cast<const float*>(block.prob);
  uint32_t amax = 0;
#pragma unroll 2
  for (int64_t f = threadIdx.x % 32 * kOctet; f < block.ffn; f += 32 * kOctet) {
    const Hidden<T> x = load_hidden<T, kVector, kKind>(p, h, f);
    float v[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float y = activate<kKind>(activation, x.a[i], x.b[i]);
      v[i] = prob ? y * prob[r] : y;
    }
    const Octet<T> a = round_octet<T>(v);
    store_octet_global<kVector>(out + f, a, block.ffn - f);
    if (p.amax) amax = max(amax, a.amax(block.ffn - f));
  }
  return amax;
}

// The canonical row dot of 256 columns, added to `sum`: eight lanes are a segment, through which
// the four partial sums go. Columns that do not exist are 0 and change no bit.
template <class T>
__device__ float add_segments(const Octet<T>& da, const float (&y)[kOctet], float sum) {
  const int place = threadIdx.x % 8;
  float part[4] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (place == j) {
        part[q] = __fmaf_rn(da[2 * q], y[2 * q], part[q]);
        part[q] = __fmaf_rn(da[2 * q + 1], y[2 * q + 1], part[q]);
      }
      part[q] = __shfl_sync(kWarp, part[q], j, 8);
    }
  }
  const float segment = (part[0] + part[1]) + (part[2] + part[3]);
#pragma unroll
  for (int s = 0; s < 4; ++s) sum += __shfl_sync(kWarp, segment, 8 * s);
  return sum;
}

template <class T, bool kVector, Kind kKind>
__device__ uint32_t backward_row(const Params& p, int64_t r) {
  const ActivationBlock& block = p.block;
  const Activation activation = activation_of<kKind>(p);
  const T* h = static_cast<const T*>(block.h) + r * block.h_stride;
  const T* da = static_cast<const T*>(block.da) + r * block.da_stride;
  T* dh = static_cast<T*>(block.dh) + r * block.dh_stride;
  T* again = block.a ? static_cast<T*>(block.a) + r * block.a_stride : nullptr;
  const float* prob = block.prob ? static_cast<const float*>(block.prob) + r : nullptr;
  uint32_t amax = 0;
  float dprob = 0;
  // All lanes stay for the dot.
  for (int64_t base = 0; base < block.ffn; base += 32 * kOctet) {
    const int64_t f = base + threadIdx.x % 32 * kOctet, valid = block.ffn - f;
    const Hidden<T> x = valid > 0 ? load_hidden<T, kVector, kKind>(p, h, f) : Hidden<T>{};
    const Octet<T> d = load_octet<kVector>(da + f, valid);
    float y[kOctet], v[kOctet], w[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float t = prob ? d[i] * *prob : d[i];
      if constexpr (kKind == Kind::kSquaredRelu) {
        y[i] = squared_relu(x.a[i]);
        v[i] = squared_relu_gradient(x.a[i], t);
      } else {
        const ActivationGradient<float> g = glu_gradient(activation, x.a[i], x.b[i], t);
        y[i] = g.y;
        v[i] = g.a;
        w[i] = g.b;
      }
    }
    if (block.dprob) dprob = add_segments(d, y, dprob);
    const Octet<T> first = round_octet<T>(v);
    if (p.amax) amax = max(amax, first.amax(valid));
    if (valid > 0) {
      const int64_t interleave = kKind == Kind::kSquaredRelu ? 0 : block.interleave;
      store_octet_global<kVector>(dh + hidden_column(0, f, block.ffn, interleave), first, valid);
    }
    if constexpr (kKind != Kind::kSquaredRelu) {
      const Octet<T> second = round_octet<T>(w);
      if (p.amax) amax = max(amax, second.amax(valid));
      if (valid > 0) {
        store_octet_global<kVector>(dh + hidden_column(1, f, block.ffn, block.interleave), second,
                                    valid);
      }
    }
    if (again) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) v[i] = prob ? y[i] * *prob : y[i];
      store_octet_global<kVector>(again + f, round_octet<T>(v), valid);
    }
  }
  if (block.dprob && threadIdx.x % 32 == 0) static_cast<float*>(block.dprob)[r] = dprob;
  return amax;
}

template <class T, bool kVector, Kind kKind, bool kBackward>
__global__ void __launch_bounds__(kThreads) activation_rows(const __grid_constant__ Params p) {
  __shared__ int group[kRows];
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  find_groups(p, row0, group);
  for (int i = threadIdx.x / 32; i < kRows && row0 + i < p.rows; i += kWarps) {
    if (group[i] < 0) continue;
    const uint32_t amax = kBackward ? backward_row<T, kVector, kKind>(p, row0 + i)
                                    : forward_row<T, kVector, kKind>(p, row0 + i);
    if (p.amax) quant::device::raise_amax(p.amax + group[i], amax);
  }
}

using Kernel = void (*)(Params);

template <class T, bool kVector>
Kernel kernel_of(const Activation& x, bool backward) {
  const auto of = [&](auto kind) -> Kernel {
    return backward ? activation_rows<T, kVector, kind.value, true>
                    : activation_rows<T, kVector, kind.value, false>;
  };
  if (x.kind == ActivationKind::kSquaredRelu) {
    return of(std::integral_constant<Kind, Kind::kSquaredRelu>());
  }
  const bool plain = x.alpha == 1 && x.offset == 0 && x.limit == swiglu().limit;
  return plain ? of(std::integral_constant<Kind, Kind::kPlainGlu>())
               : of(std::integral_constant<Kind, Kind::kGlu>());
}

Kernel kernel_of(const ActivationBlock& block, bool vector, bool backward) {
  const Activation& x = block.activation;
  if (block.dtype == DType::kBFloat16) {
    return vector ? kernel_of<bf16, true>(x, backward) : kernel_of<bf16, false>(x, backward);
  }
  return vector ? kernel_of<float, true>(x, backward) : kernel_of<float, false>(x, backward);
}

Params params_of(const ActivationArgs& args, const ActivationBlock& block) {
  const auto pointer = [](const TensorView& x, auto* type) {
    return static_cast<decltype(type)>(x.raw());
  };
  const Groups& g = args.groups;
  return {block,
          args.h.size(0),
          pointer(args.sink.amax, (uint32_t*)nullptr),
          pointer(g.begin_E1, (const int64_t*)nullptr),
          pointer(g.count_E, (const int64_t*)nullptr),
          pointer(g.status, (uint32_t*)nullptr),
          g.experts,
          g.capacity};
}

// The first block looks for faults of the groups even if there are no rows.
LaunchShape shape_of(const Params& p) {
  return {std::max<int64_t>(blocks_for(p.rows, kRows), p.begin ? 1 : 0), kThreads};
}

}  // namespace

void activation_forward_cuda(const ActivationArgs& args, const ActivationBlock& block, TensorView a,
                             const Stream& stream) {
  if (args.sink.defined()) fill_bytes(args.sink.amax, 0, stream);
  const Params p = params_of(args, block);
  const Kernel kernel = kernel_of(block, octets_fit({&args.h, &a}), false);
  launch("activation_forward", kernel, shape_of(p), stream, p);
}

void activation_backward_cuda(const ActivationArgs& args, const ActivationBlock& block,
                              TensorView da, TensorView dh, TensorView a, const Stream& stream) {
  if (args.sink.defined()) fill_bytes(args.sink.amax, 0, stream);
  const Params p = params_of(args, block);
  const Kernel kernel = kernel_of(block, octets_fit({&args.h, &da, &dh, &a}), true);
  launch("activation_backward", kernel, shape_of(p), stream, p);
}

}  // namespace moiety::gemm
