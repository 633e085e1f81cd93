// Activations on GPUs. A warp has a row, and its lanes take octets of columns in turns; the loads of a
// step go out before the results of the step before it are computed and stored. Those of the first
// step do so before the block looks up the groups of its rows.
#include <algorithm>

#include "moiety/base/copy.h"
#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/gemm/activation_block.h"
#include "moiety/quant/amax_device.cuh"
#include "moiety/quant/quantize_group.h"

namespace moiety::gemm {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMaxRows = 4 * kWarps;  // of a block
constexpr int kStep = 32 * kOctet;    // columns of a row that a warp computes at once
constexpr uint32_t kWarp = 0xFFFFFFFFu;

struct Params {
  ActivationBlock block;  // describes all rows
  int64_t rows;
  uint32_t* amax;  // may be null
  // The groups; begin is null if there are none.
  const int64_t *begin, *count;
  uint32_t* status;  // may be null
  int64_t experts, capacity;
  int ffn, interleave, block_rows;
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
__device__ void find_groups(const Params& p, int64_t row0, int (&group)[kMaxRows]) {
  if (threadIdx.x < kMaxRows) group[threadIdx.x] = p.begin ? -1 : 0;
  __syncthreads();
  if (!p.begin) return;
  bool fault = false;
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads) {
    const quant::Claim c = claim_of(p, e);
    fault = fault || !c.valid;
    if (!c.valid) continue;
    const int64_t first = max(c.begin, row0), end = min(c.begin + c.rows, row0 + p.block_rows);
    for (int64_t r = first; r < end; ++r) atomicMax(&group[r - row0], int(e));
  }
  const bool any = __syncthreads_or(fault) != 0;
  if (any && blockIdx.x == 0 && threadIdx.x == 0 && p.status) record_faults(p);
}

// What is read of a row of the buffers; only backward has dA.
template <class T>
struct Row {
  const T *h, *da;
};

template <class T, bool kBackward>
__device__ Row<T> row_of(const ActivationBlock& x, int64_t r) {
  return {static_cast<const T*>(x.h) + r * x.h_stride,
          kBackward ? static_cast<const T*>(x.da) + r * x.da_stride : nullptr};
}

// What a lane reads for one step: both halves of H, and in backward dA.
template <class T>
struct Input {
  Octet<T> a, b, da;
};

template <class T, bool kVector, Kind kKind, bool kBackward>
__device__ Input<T> load_input(const Params& p, const Row<T>& row, int f) {
  const int valid = p.ffn - f;
  Input<T> in = {};
  if constexpr (kKind == Kind::kSquaredRelu) {
    in.a = load_octet<kVector>(row.h + f, valid);
  } else {
    in.a = load_octet<kVector>(row.h + hidden_column(0, f, p.ffn, p.interleave), valid);
    in.b = load_octet<kVector>(row.h + hidden_column(1, f, p.ffn, p.interleave), valid);
  }
  if constexpr (kBackward) in.da = load_octet<kVector>(row.da + f, valid);
  return in;
}

template <Kind kKind>
__device__ float activate(const Activation& activation, float a, float b) {
  return kKind == Kind::kSquaredRelu ? squared_relu(a) : glu(activation, a, b);
}

// The amax of the row's results, if it is asked for.
template <class T, bool kVector, Kind kKind>
__device__ uint32_t forward_row(const Params& p, int64_t r, const Row<T>& row, Input<T> next) {
  const Activation activation = activation_of<kKind>(p);
  const float* prob = static_cast<const float*>(p.block.prob);
  const float weight = prob ? prob[r] : 1;
  T* out = static_cast<T*>(p.block.a) + r * p.block.a_stride;
  uint32_t amax = 0;
  for (int f = threadIdx.x % 32 * kOctet; f < p.ffn; f += kStep) {
    const Input<T> x = next;
    next = load_input<T, kVector, kKind, false>(p, row, f + kStep);
    float v[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float y = activate<kKind>(activation, x.a[i], x.b[i]);
      v[i] = prob ? y * weight : y;
    }
    const Octet<T> a = round_octet<T>(v);
    store_octet_global<kVector>(out + f, a, p.ffn - f);
    if (p.amax) amax = max(amax, a.amax(p.ffn - f));
  }
  return amax;
}

// What a warp turns around for its row dots: two steps are eight segments of four partial sums, one
// for each lane. Rows are as long as keeps lanes in banks of their own.
constexpr int kSegment = 64, kSegments = 2 * kStep / kSegment, kSegmentRow = kSegment + 8;
template <class T>
struct alignas(16) DotBuffer {
  float y[kSegments][kSegmentRow];
  uint32_t da_words[kSegments][kSegmentRow * sizeof(T) / 4];

  __device__ T* da(int segment) { return reinterpret_cast<T*>(da_words[segment]); }
};

// This lane's columns of the first or second step.
template <class T>
__device__ void put_columns(DotBuffer<T>& buffer, int step, const Octet<T>& da,
                            const float (&y)[kOctet]) {
  const int lane = threadIdx.x % 32;
  const int segment = step * (kSegments / 2) + lane / 8, column = lane % 8 * kOctet;
  store_octet<true>(buffer.da(segment) + column, da, kOctet);
  store_octet<true>(&buffer.y[segment][column], round_octet<float>(y), kOctet);
}

// The canonical row dot of the first `segments`, added to `sum`. Columns that do not exist are 0
// and change no bit.
template <class T>
__device__ float add_segments(DotBuffer<T>& buffer, int segments, float sum) {
  const int lane = threadIdx.x % 32, s = lane / 4, first = lane % 4 * 2;
  __syncwarp();
  float part = 0;
  if (s < segments) {
    const T* da = buffer.da(s);
#pragma unroll
    for (int c = 0; c < kSegment; c += 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        part = __fmaf_rn(float(da[c + first + i]), buffer.y[s][c + first + i], part);
      }
    }
  }
  __syncwarp();
  part += __shfl_xor_sync(kWarp, part, 1);
  part += __shfl_xor_sync(kWarp, part, 2);
#pragma unroll
  for (int i = 0; i < kSegments; ++i) sum += __shfl_sync(kWarp, part, 4 * i);
  return sum;
}

// The same. All lanes stay for the dot; outputs are addressed anew in each step, since the registers
// are worth more.
template <class T, bool kVector, Kind kKind>
__device__ uint32_t backward_row(const Params& p, int64_t r, const Row<T>& row, Input<T> next,
                                 DotBuffer<T>& buffer) {
  const ActivationBlock& block = p.block;
  const Activation activation = activation_of<kKind>(p);
  const float* prob = static_cast<const float*>(block.prob);
  const float weight = prob ? prob[r] : 1;
  uint32_t amax = 0;
  float dot = 0;
  for (int base = 0; base < p.ffn; base += kStep) {
    const int f = base + threadIdx.x % 32 * kOctet, valid = p.ffn - f;
    const Input<T> in = next;
    next = load_input<T, kVector, kKind, true>(p, row, f + kStep);
    float y[kOctet], v[kOctet], w[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float t = prob ? in.da[i] * weight : in.da[i];
      if constexpr (kKind == Kind::kSquaredRelu) {
        y[i] = squared_relu(in.a[i]);
        v[i] = squared_relu_gradient(in.a[i], t);
      } else {
        const ActivationGradient<float> g = glu_gradient(activation, in.a[i], in.b[i], t);
        y[i] = g.y;
        v[i] = g.a;
        w[i] = g.b;
      }
    }
    const Octet<T> first = round_octet<T>(v);
    if (p.amax) amax = max(amax, first.amax(valid));
    T* dh = static_cast<T*>(block.dh) + r * block.dh_stride;
    const int interleave = kKind == Kind::kSquaredRelu ? 0 : p.interleave;
    store_octet_global<kVector>(dh + hidden_column(0, f, p.ffn, interleave), first, valid);
    if constexpr (kKind != Kind::kSquaredRelu) {
      const Octet<T> second = round_octet<T>(w);
      if (p.amax) amax = max(amax, second.amax(valid));
      store_octet_global<kVector>(dh + hidden_column(1, f, p.ffn, interleave), second, valid);
    }
    if (block.a) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) v[i] = prob ? y[i] * weight : y[i];
      T* again = static_cast<T*>(block.a) + r * block.a_stride;
      store_octet_global<kVector>(again + f, round_octet<T>(v), valid);
    }
    if (block.dprob) {
      const int step = base / kStep % 2;
      put_columns(buffer, step, in.da, y);
      if (step == 1 || base + kStep >= p.ffn) {
        dot = add_segments(buffer, (step + 1) * (kSegments / 2), dot);
      }
    }
  }
  if (block.dprob && threadIdx.x % 32 == 0) static_cast<float*>(block.dprob)[r] = dot;
  return amax;
}

// As many blocks of an SM as hide the latency of loads, within the registers.
template <class T, bool kVector, Kind kKind, bool kBackward>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 4
                                            : kBackward    ? 7
                                                           : 10)
    activation_rows(const __grid_constant__ Params p) {
  __shared__ int group[kMaxRows];
  const int64_t row0 = int64_t{blockIdx.x} * p.block_rows;
  const int warp = threadIdx.x / 32;
  const auto load = [&](const Row<T>& row) {
    return load_input<T, kVector, kKind, kBackward>(p, row, threadIdx.x % 32 * kOctet);
  };
  Row<T> row = row_of<T, kBackward>(p.block, row0 + warp);
  Input<T> first = {};
  if (row0 + warp < p.rows) first = load(row);
  find_groups(p, row0, group);
  for (int i = warp; i < p.block_rows && row0 + i < p.rows; i += kWarps) {
    if (group[i] < 0) continue;
    if (i != warp) {
      row = row_of<T, kBackward>(p.block, row0 + i);
      first = load(row);
    }
    uint32_t amax;
    if constexpr (kBackward) {
      __shared__ DotBuffer<T> buffers[kWarps];
      amax = backward_row<T, kVector, kKind>(p, row0 + i, row, first, buffers[warp]);
    } else {
      amax = forward_row<T, kVector, kKind>(p, row0 + i, row, first);
    }
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
          g.capacity,
          int(block.ffn),
          int(block.interleave),
          block.ffn > kStep ? kWarps : kMaxRows};
}

// The first block looks for faults of the groups even if there are no rows.
LaunchShape shape_of(const Params& p) {
  return {std::max<int64_t>(blocks_for(p.rows, p.block_rows), p.begin ? 1 : 0), kThreads};
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
