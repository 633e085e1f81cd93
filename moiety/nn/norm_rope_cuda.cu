// Norm and rope of q and k on GPUs, in one pass. A group of lanes has a head, and a lane has two
// octets of it, half a head apart, which are rotated with each other. Heads of one token follow each
// other, so that a lane seldom reads other cosines and sines.
#include <type_traits>

#include "moiety/base/kernel_list.cuh"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp32.h"
#include "moiety/nn/norm.h"
#include "moiety/nn/norm_device.cuh"
#include "moiety/nn/norm_kernel.h"
#include "moiety/nn/norm_rope.h"
#include "moiety/nn/norm_sum.cuh"
#include "moiety/nn/row_map.cuh"
#include "moiety/nn/rows.h"

namespace moiety::nn {
namespace {

// The query heads, or the key heads.
struct Heads {
  const void *x, *weight;
  void* out;          // forward: y; backward: dy, which becomes dx
  RowMap<2> map;      // x, out
  int64_t rows;       // heads
  Divisor per_token;  // heads of a token
};

struct Params {
  Heads heads[2];        // queries, keys
  int64_t query_blocks;  // thread blocks of queries, before those of keys
  int64_t first;         // number of the launch's first thread block among these
  const float* table;
  const int32_t* position;  // null: position t is t mod seq_len
  int64_t limit;            // positions of the table
  Divisor seq_len;
  device::RowLength length;
  float eps;
  float* partial;  // backward: [blocks of queries and of keys, C]

  __device__ int position_of(int64_t token) const {
    if (position) return position[token];
    return int(token - seq_len.divide(token) * seq_len.divisor());
  }
};

// The heads that a thread block works on, and its number among their blocks.
struct Task {
  const Heads& heads;
  int64_t block;
};
__device__ Task task(const Params& p) {
  const int64_t block = p.first + blockIdx.x;
  const bool keys = block >= p.query_blocks;
  return {p.heads[keys], block - (keys ? p.query_blocks : 0)};
}

// A lane's elements of a head: an octet of the first half, and its fellow of the second.
template <class T>
struct Turn {
  Octet<T> low, high;
};
template <class T>
__device__ Turn<T> load_turn(const T* low, int64_t half, bool exists) {
  const int64_t valid = exists ? kOctet : 0;
  return {load_octet<true>(low, valid), load_octet<true>(low + half, valid)};
}
template <class T>
__device__ void store_turn(T* low, int64_t half, const Turn<T>& x, bool exists) {
  const int64_t valid = exists ? kOctet : 0;
  store_octet<true>(low, x.low, valid);
  store_octet<true>(low + half, x.high, valid);
}

// The cosines and sines of a lane's elements.
template <int kLanes, bool kInverse>
class Angles {
 public:
  __device__ explicit Angles(const Params& p) : p_(p) {}
  __device__ void turn_to(int position) {
    if (position == held_) return;
    held_ = position;
    constexpr int kHalf = kLanes * kOctet;
    const bool known = position >= 0 && position < p_.limit;
    const float* at =
        p_.table + int64_t{known ? position : 0} * 2 * kHalf + threadIdx.x % kLanes * kOctet;
    const Octet<float> c = load_octet<true>(at, kOctet), s = load_octet<true>(at + kHalf, kOctet);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      cosine_[i] = known ? c[i] : kCanonicalNan;
      sine_[i] = kInverse ? -s[i] : s[i];
    }
  }
  template <class T>
  __device__ Turn<T> rotate(const Turn<T>& x) const {
    float low[kOctet], high[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      low[i] = x.low[i] * cosine_[i] + x.high[i] * -sine_[i];
      high[i] = x.high[i] * cosine_[i] + x.low[i] * sine_[i];
    }
    return {round_octet<T>(low), round_octet<T>(high)};
  }

 private:
  const Params& p_;
  int held_ = -1;
  // An unknown position, also -1, gives NaN.
  float cosine_[kOctet] = {kCanonicalNan, kCanonicalNan, kCanonicalNan, kCanonicalNan,
                           kCanonicalNan, kCanonicalNan, kCanonicalNan, kCanonicalNan};
  float sine_[kOctet] = {};
};

// A lane's elements of some rows; each lane finds the place of one of them.
template <class T, int kLanes>
struct Batch {
  static constexpr int kHalf = kLanes * kOctet;
  const Heads& heads;
  int64_t row0;
  device::RowOffsets<kLanes, 2> offsets;
  int position;

  __device__ Batch(const Params& p, const Heads& h, int64_t row, int count) : heads(h), row0(row) {
    const int64_t named = min(row0 + threadIdx.x % kLanes % count, h.rows - 1);
    offsets = {h.map.offsets(named), h.map.small};
    position = p.position_of(h.per_token.divide(named));
  }
  __device__ bool exists(int j) const { return row0 + j < heads.rows; }
  __device__ int position_of(int j) const {
    return __shfl_sync(device::kWarp, position, j, kLanes);
  }
  __device__ const T* x(int j) const {
    return static_cast<const T*>(heads.x) + offsets.of(0, j) + column();
  }
  __device__ T* out(int j) const {
    return static_cast<T*>(heads.out) + offsets.of(1, j) + column();
  }
  __device__ Turn<T> weight() const {
    return load_turn(static_cast<const T*>(heads.weight) + column(), kHalf, true);
  }
  static __device__ int column() { return threadIdx.x % kLanes * kOctet; }
};

// device::keep_packed for both octets.
template <class T, int kBatch>
__device__ void keep_packed(Turn<T> (&x)[kBatch], Turn<T> (&dy)[kBatch]) {
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    Octet<T> xs[2] = {x[j].low, x[j].high}, dys[2] = {dy[j].low, dy[j].high};
    device::keep_packed(xs, dys);
    x[j] = {xs[0], xs[1]};
    dy[j] = {dys[0], dys[1]};
  }
}
template <class T>
__device__ float squares_of(const Turn<T>& x) {
  return device::add_products(x.low, x.low, 0.0f) + device::add_products(x.high, x.high, 0.0f);
}
template <class T>
__device__ float dot_of(const Turn<T>& g, const Turn<T>& dy, const Turn<T>& x) {
  return device::add_dot(g.low, dy.low, x.low, 0.0f) +
         device::add_dot(g.high, dy.high, x.high, 0.0f);
}

constexpr int kForwardThreads = 128;

template <class T>
constexpr int kForwardBatch = 4 / sizeof(T);  // heads of a group of lanes

template <class T, int kLanes>
__global__ void __launch_bounds__(kForwardThreads)
    norm_rope_rows(const __grid_constant__ Params p) {
  constexpr int kBatch = kForwardBatch<T>, kSame = kLanes / kBatch, kHalf = kLanes * kOctet;
  const auto [heads, block] = task(p);
  const int64_t group = block * (kForwardThreads / kLanes) + threadIdx.x / kLanes;
  const Batch<T, kLanes> batch(p, heads, group * kBatch, kBatch);
  Turn<T> x[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) x[j] = load_turn(batch.x(j), kHalf, batch.exists(j));
  Angles<kLanes, false> angles(p);
  angles.turn_to(batch.position_of(0));
  const Turn<T> g = batch.weight();
  float sums[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) sums[j] = squares_of(x[j]);
  const float known = device::inverse_rms(device::fold_rows<kLanes>(sums), p.length, p.eps);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const float r = __shfl_sync(device::kWarp, known, j * kSame, kLanes);
    angles.turn_to(batch.position_of(j));
    const auto scale = [&](const Octet<T>& values, const Octet<T>& weight) {
      float v[kOctet];
#pragma unroll
      for (int i = 0; i < kOctet; ++i) v[i] = values[i] * r * weight[i];
      return round_octet<T>(v);
    };
    const Turn<T> y{scale(x[j].low, g.low), scale(x[j].high, g.high)};
    store_turn(batch.out(j), kHalf, angles.rotate(y), batch.exists(j));
  }
}

constexpr int kGroups = 16;  // groups of lanes of a thread block in the backward pass

// The memory of a block of rows between its two steps.
template <class T, int kLanes>
struct Kept {
  static constexpr int kColumns = 2 * kLanes * kOctet;
  alignas(16) T x[kNormBlockRows][kColumns], dy[kNormBlockRows][kColumns];
  float r[kNormBlockRows];
};

template <class T>
__device__ float element(uint32_t word, int i) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(word);
  return __uint_as_float(i > 0 ? word & 0xFFFF0000u : word << 16);
}

// A thread adds up the rows' terms of the weight's gradient for a word of columns.
template <class T, int kLanes>
__device__ void add_columns(const Kept<T, kLanes>& kept, int rows, float* partial) {
  constexpr int kEach = 4 / sizeof(T);
  const int c = threadIdx.x * kEach;
  if (c >= Kept<T, kLanes>::kColumns) return;
  float dg[kEach] = {};
#pragma unroll 8
  for (int i = 0; i < rows; ++i) {
    const float r = kept.r[i];
    const uint32_t x = *reinterpret_cast<const uint32_t*>(&kept.x[i][c]),
                   dy = *reinterpret_cast<const uint32_t*>(&kept.dy[i][c]);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      dg[j] = __fmaf_rn(element<T>(dy, j), element<T>(x, j) * r, dg[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) partial[c + j] = dg[j];
}

// Takes a block of rows: first each group of lanes some rows, for dx; then each thread some columns,
// for the gradient of the weight.
template <class T, int kLanes>
__global__ void __launch_bounds__(kGroups* kLanes, 640 / (kGroups * kLanes))
    norm_rope_backward_rows(const __grid_constant__ Params p) {
  constexpr int kBatch = 4 / sizeof(T), kSame = kLanes / kBatch, kHalf = kLanes * kOctet;
  constexpr int kRows = int(kNormBlockRows) / kGroups;  // of a group
  static_assert(kRows % kBatch == 0 && kGroups == 2 * kOctet, "a thread for every column");
  extern __shared__ uint4 memory[];
  auto& kept = *reinterpret_cast<Kept<T, kLanes>*>(memory);
  cudaTriggerProgrammaticLaunchCompletion();
  const auto [heads, block] = task(p);
  const int64_t row0 = block * kNormBlockRows;
  const int group = threadIdx.x / kLanes, column = Batch<T, kLanes>::column();
  Turn<T> g;
  Angles<kLanes, true> angles(p);
#pragma unroll 1
  for (int b = group * kRows; b < (group + 1) * kRows; b += kBatch) {
    const Batch<T, kLanes> batch(p, heads, row0 + b, kBatch);
    Turn<T> x[kBatch], dy[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      x[j] = load_turn(batch.x(j), kHalf, batch.exists(j));
      dy[j] = load_turn(static_cast<const T*>(batch.out(j)), kHalf, batch.exists(j));
    }
    g = batch.weight();
    float squares[kBatch], dots[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      angles.turn_to(batch.position_of(j));
      dy[j] = angles.rotate(dy[j]);
      squares[j] = squares_of(x[j]);
      dots[j] = dot_of(g, dy[j], x[j]);
      store_turn(&kept.x[b + j][column], kHalf, x[j], true);
      store_turn(&kept.dy[b + j][column], kHalf, dy[j], true);
    }
    const float all_squares = device::fold_rows<kLanes>(squares);
    const device::RowSums known =
        device::row_sums(p.length, p.eps, all_squares, device::fold_rows<kLanes>(dots));
    keep_packed(x, dy);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const device::RowSums s{__shfl_sync(device::kWarp, known.r, j * kSame, kLanes),
                              __shfl_sync(device::kWarp, known.factor, j * kSame, kLanes)};
      if (threadIdx.x % kLanes == j) kept.r[b + j] = s.r;
      const Turn<T> dx{device::dx_octet(s, x[j].low, dy[j].low, g.low, false, {}),
                       device::dx_octet(s, x[j].high, dy[j].high, g.high, false, {})};
      store_turn(batch.out(j), kHalf, dx, batch.exists(j));
    }
  }
  __syncthreads();
  add_columns(kept, int(min(kNormBlockRows, heads.rows - row0)),
              p.partial + (p.first + blockIdx.x) * 2 * kHalf);
  // The launch before this one may still add up blocks, and must not outlast this one.
  if (blockIdx.x == gridDim.x - 1) cudaGridDependencySynchronize();
}

// Adding up the blocks of queries is a long chain. While there are many, half of them are added up
// beside the rows of the rest.
constexpr int64_t kManyBlocks = 1024;

template <class Args>
NormKernel chosen_kernel(const Args& a, const TensorView& y) {
  const bool octets = octets_fit({&a.x_TGNC, &a.q_weight_C, &a.k_weight_C, &y, &a.angles.table});
  return choose_norm_rope({a.x_TGNC.dtype(), a.x_TGNC.size(3), octets});
}

// The heads [begin, end) of each group.
Heads heads_of(const TensorView& x_TGNC, const TensorView& weight_C, const TensorView& out_TGNC,
               int64_t begin, int64_t end) {
  const TensorView x = x_TGNC.slice(2, begin, end), out = out_TGNC.slice(2, begin, end);
  const int64_t per_token = x.size(1) * x.size(2);
  return {x.raw(),      weight_C.raw(),
          out.raw(),    RowMap<2>({&x, &out}),
          row_count(x), Divisor(per_token > 0 ? per_token : 1)};
}

template <class Args>
Params params_of(const Args& a, const TensorView& out_TGNC, float* partial) {
  const int64_t keys = a.x_TGNC.size(2) - 1;
  const HeadAngles& angles = a.angles;
  const Heads queries = heads_of(a.x_TGNC, a.q_weight_C, out_TGNC, 0, keys);
  return {{queries, heads_of(a.x_TGNC, a.k_weight_C, out_TGNC, keys, keys + 1)},
          0,
          0,
          angles.table.template data<float>(),
          angles.position_T.template data<int32_t>(),
          angles.table.size(0),
          Divisor(angles.seq_len > 0 ? angles.seq_len : 1),
          device::row_length(a.x_TGNC.size(3)),
          a.eps,
          partial};
}

}  // namespace

bool one_pass(const NormRopeArgs& a) {
  return chosen_kernel(a, a.y_TGNC).family != NormFamily::kAny;
}
bool one_pass(const NormRopeBackwardArgs& a) {
  return chosen_kernel(a, a.d_TGNC).family != NormFamily::kAny;
}

void norm_rope_cuda(const NormRopeArgs& a, const Stream& stream) {
  const NormKernel chosen = chosen_kernel(a, a.y_TGNC);
  Params p = params_of(a, a.y_TGNC, nullptr);
  const auto start = start_of<kNormRopeKernels>(chosen, [&]<NormKernel k>() -> KernelStart<Params> {
    using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
    constexpr int kLanes = k.columns / (2 * kOctet);
    constexpr int kRows = kForwardThreads / kLanes * kForwardBatch<T>;
    p.query_blocks = blocks_for(p.heads[0].rows, kRows);
    return {norm_rope_rows<T, kLanes>,
            {p.query_blocks + blocks_for(p.heads[1].rows, kRows), kForwardThreads}};
  });
  launch("norm_rope", start.kernel, start.shape, stream, p);
}

void norm_rope_backward_cuda(const NormRopeBackwardArgs& a, const Stream& stream) {
  const char* name = "norm_rope_backward";
  const NormKernel chosen = chosen_kernel(a, a.d_TGNC);
  Params p = params_of(a, a.d_TGNC, a.workspace.data<float>());
  p.query_blocks = norm_blocks(p.heads[0].rows);
  const int64_t n = chosen.columns, blocks = a.workspace.size(0);
  auto start = start_of<kNormRopeKernels>(chosen, [&]<NormKernel k>() -> KernelStart<Params> {
    using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
    constexpr int kLanes = k.columns / (2 * kOctet);
    return {norm_rope_backward_rows<T, kLanes>,
            {blocks, kGroups * kLanes, sizeof(Kept<T, kLanes>)}};
  });
  LaunchShape sum{.blocks = blocks_for(n, 32), .threads = device::kSumThreads, .early = true};
  float* queries = p.partial;  // what is to be added up: sums of blocks, then blocks
  while (p.query_blocks - p.first >= kManyBlocks) {
    start.shape.blocks = (p.query_blocks - p.first) / 2;
    launch(name, start.kernel, start.shape, stream, p);
    p.first += start.shape.blocks;
    // The sum of these blocks takes the place of the last of them.
    float* last = p.partial + (p.first - 1) * n;
    launch(name, device::sum_norm_blocks<1>, sum, stream,
           std::array{device::NormSum{queries, (last - queries) / n + 1, last, false}}, n);
    queries = last;
    start.shape.early = true;
  }
  start.shape.blocks = blocks - p.first;
  launch(name, start.kernel, start.shape, stream, p);
  sum.blocks *= 2;
  float* keys = p.partial + p.query_blocks * n;
  const std::array sums{
      device::NormSum{queries, (keys - queries) / n, a.q_grad_C.data<float>(), a.q_accumulate},
      device::NormSum{keys, blocks - p.query_blocks, a.k_grad_C.data<float>(), a.k_accumulate}};
  launch(name, device::sum_norm_blocks<2>, sum, stream, sums, n);
}

}  // namespace moiety::nn
