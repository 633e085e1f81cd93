// Norm and rope of q and k on GPUs, in one pass. A group of lanes has a head, and a lane has eight
// elements of it; what they are rotated with is half the group away. Heads of one token follow each
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

// The cosines of a lane's elements, and the sines with the sign of their terms.
template <int kLanes, bool kInverse>
class Angles {
 public:
  __device__ explicit Angles(const Params& p) : p_(p) {}
  __device__ void turn_to(int position) {
    if (position == held_) return;
    held_ = position;
    constexpr int kHalf = kLanes / 2 * kOctet;
    const bool known = position >= 0 && position < p_.limit, high = threadIdx.x & kLanes / 2;
    const float* at =
        p_.table + int64_t{known ? position : 0} * 2 * kHalf + threadIdx.x % (kLanes / 2) * kOctet;
    const Octet<float> c = load_octet<true>(at, kOctet), s = load_octet<true>(at + kHalf, kOctet);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      cosine_[i] = known ? c[i] : kCanonicalNan;
      sine_[i] = high == kInverse ? -s[i] : s[i];
    }
  }
  // All lanes of a warp call it.
  template <class T>
  __device__ Octet<T> rotate(const Octet<T>& x) const {
    Octet<T> other;
#pragma unroll
    for (int w = 0; w < Octet<T>::kWords; ++w) {
      other.word[w] = __shfl_xor_sync(device::kWarp, x.word[w], kLanes / 2);
    }
    float v[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = x[i] * cosine_[i] + other[i] * sine_[i];
    return round_octet<T>(v);
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
  static __device__ int column() { return threadIdx.x % kLanes * kOctet; }
};

constexpr int kForwardThreads = 128;

template <class T, int kLanes>
__global__ void __launch_bounds__(kForwardThreads)
    norm_rope_rows(const __grid_constant__ Params p) {
  constexpr int kBatch = 16 / sizeof(T), kSame = kLanes / kBatch;
  const auto [heads, block] = task(p);
  const int64_t group = block * (kForwardThreads / kLanes) + threadIdx.x / kLanes;
  const Batch<T, kLanes> batch(p, heads, group * kBatch, kBatch);
  Octet<T> x[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    x[j] = load_octet<true>(batch.x(j), batch.exists(j) ? kOctet : 0);
  }
  Angles<kLanes, false> angles(p);
  angles.turn_to(batch.position_of(0));
  const Octet<T> g = load_octet<true>(static_cast<const T*>(heads.weight) + batch.column(), kOctet);
  float sums[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) sums[j] = device::add_products(x[j], x[j], 0.0f);
  const float known = device::inverse_rms(device::fold_rows<kLanes>(sums), p.length, p.eps);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const float r = __shfl_sync(device::kWarp, known, j * kSame, kLanes);
    angles.turn_to(batch.position_of(j));
    float v[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = x[j][i] * r * g[i];
    const Octet<T> y = angles.rotate(round_octet<T>(v));
    store_octet<true>(batch.out(j), y, batch.exists(j) ? kOctet : 0);
  }
}

constexpr int kGroups = 8;  // groups of lanes of a thread block in the backward pass

// The memory of a block of rows between its two steps.
template <class T, int kLanes>
struct Kept {
  alignas(16) T x[kNormBlockRows][kLanes * kOctet], dy[kNormBlockRows][kLanes * kOctet];
  float r[kNormBlockRows];
};

// Takes a block of rows: first each group of lanes some rows, for dx; then each thread a column, for
// the gradient of the weight.
template <class T, int kLanes>
__global__ void __launch_bounds__(kGroups* kLanes, 640 / (kGroups * kLanes))
    norm_rope_backward_rows(const __grid_constant__ Params p) {
  constexpr int kBatch = 8 / sizeof(T), kSame = kLanes / kBatch, kColumns = kLanes * kOctet;
  constexpr int kRows = int(kNormBlockRows) / kGroups;  // of a group
  static_assert(kGroups == kOctet, "there are as many threads as columns");
  extern __shared__ uint4 memory[];
  auto& kept = *reinterpret_cast<Kept<T, kLanes>*>(memory);
  cudaTriggerProgrammaticLaunchCompletion();
  const auto [heads, block] = task(p);
  const int64_t row0 = block * kNormBlockRows;
  const int group = threadIdx.x / kLanes, column = Batch<T, kLanes>::column();
  const Octet<T> g = load_octet<true>(static_cast<const T*>(heads.weight) + column, kOctet);
  Angles<kLanes, true> angles(p);
#pragma unroll 1
  for (int b = group * kRows; b < (group + 1) * kRows; b += kBatch) {
    const Batch<T, kLanes> batch(p, heads, row0 + b, kBatch);
    Octet<T> x[kBatch], dy[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t valid = batch.exists(j) ? kOctet : 0;
      x[j] = load_octet<true>(batch.x(j), valid);
      dy[j] = load_octet<true>(static_cast<const T*>(batch.out(j)), valid);
    }
    float squares[kBatch], dots[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      angles.turn_to(batch.position_of(j));
      dy[j] = angles.rotate(dy[j]);
      squares[j] = device::add_products(x[j], x[j], 0.0f);
      dots[j] = device::add_dot(g, dy[j], x[j], 0.0f);
      store_octet<true>(&kept.x[b + j][column], x[j], kOctet);
      store_octet<true>(&kept.dy[b + j][column], dy[j], kOctet);
    }
    const float all_squares = device::fold_rows<kLanes>(squares);
    const device::RowSums known =
        device::row_sums(p.length, p.eps, all_squares, device::fold_rows<kLanes>(dots));
    device::keep_packed(x, dy);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const device::RowSums s{__shfl_sync(device::kWarp, known.r, j * kSame, kLanes),
                              __shfl_sync(device::kWarp, known.factor, j * kSame, kLanes)};
      if (threadIdx.x % kLanes == j) kept.r[b + j] = s.r;
      store_octet<true>(batch.out(j), device::dx_octet(s, x[j], dy[j], g, false, {}),
                        batch.exists(j) ? kOctet : 0);
    }
  }
  __syncthreads();
  const int rows = int(min(kNormBlockRows, heads.rows - row0));
  float dg = 0;
#pragma unroll 16
  for (int i = 0; i < rows; ++i) {
    const float x = float(kept.x[i][threadIdx.x]), dy = float(kept.dy[i][threadIdx.x]);
    dg = __fmaf_rn(dy, x * kept.r[i], dg);
  }
  p.partial[(p.first + blockIdx.x) * kColumns + threadIdx.x] = dg;
  // The launch before this one may still add up blocks, and must not outlast this one.
  if (blockIdx.x == gridDim.x - 1) cudaGridDependencySynchronize();
}

// Adding up the blocks of queries is a long chain. If there are many, most of it runs beside the
// last quarter of the rows.
constexpr int64_t kManyBlocks = 512;
int64_t blocks_ahead(int64_t query_blocks) {
  return query_blocks < kManyBlocks ? 0 : query_blocks / 4 * 3;
}

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

// rows: heads of a thread block
template <class Args>
Params params_of(const Args& a, const TensorView& out_TGNC, int64_t rows, float* partial) {
  const int64_t keys = a.x_TGNC.size(2) - 1;
  const HeadAngles& angles = a.angles;
  const Heads queries = heads_of(a.x_TGNC, a.q_weight_C, out_TGNC, 0, keys);
  return {{queries, heads_of(a.x_TGNC, a.k_weight_C, out_TGNC, keys, keys + 1)},
          blocks_for(queries.rows, rows),
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
  const int64_t rows = kForwardThreads * kOctet / chosen.columns * (128 / bits(chosen.dtype));
  const Params p = params_of(a, a.y_TGNC, rows, nullptr);
  const auto start = start_of<kNormRopeKernels>(chosen, [&]<NormKernel k>() -> KernelStart<Params> {
    using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
    return {norm_rope_rows<T, k.columns / kOctet>,
            {p.query_blocks + blocks_for(p.heads[1].rows, rows), kForwardThreads}};
  });
  launch("norm_rope", start.kernel, start.shape, stream, p);
}

void norm_rope_backward_cuda(const NormRopeBackwardArgs& a, const Stream& stream) {
  const char* name = "norm_rope_backward";
  const NormKernel chosen = chosen_kernel(a, a.d_TGNC);
  Params p = params_of(a, a.d_TGNC, kNormBlockRows, a.workspace.data<float>());
  const int64_t n = chosen.columns, blocks = a.workspace.size(0);
  auto start = start_of<kNormRopeKernels>(chosen, [&]<NormKernel k>() -> KernelStart<Params> {
    using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
    constexpr int kLanes = k.columns / kOctet;
    return {norm_rope_backward_rows<T, kLanes>,
            {blocks, kGroups * kLanes, sizeof(Kept<T, kLanes>)}};
  });
  LaunchShape sum{.blocks = blocks_for(n, 32), .threads = 32, .early = true};
  float* queries = p.partial;
  float* keys = p.partial + p.query_blocks * n;
  int64_t query_sums = p.query_blocks;
  if (const int64_t ahead = blocks_ahead(p.query_blocks); ahead > 0) {
    start.shape.blocks = ahead;
    launch(name, start.kernel, start.shape, stream, p);
    // The sum of these blocks takes the place of the last of them.
    float* last = p.partial + (ahead - 1) * n;
    launch(name, device::sum_norm_blocks<1>, sum, stream,
           std::array{device::NormSum{queries, ahead, last, false}}, n);
    start.shape.blocks = blocks - ahead;
    start.shape.early = true;
    p.first = ahead;
    queries = last;
    query_sums -= ahead - 1;
  }
  launch(name, start.kernel, start.shape, stream, p);
  sum.blocks *= 2;
  const std::array sums{
      device::NormSum{queries, query_sums, a.q_grad_C.data<float>(), a.q_accumulate},
      device::NormSum{keys, blocks - p.query_blocks, a.k_grad_C.data<float>(), a.k_accumulate}};
  launch(name, device::sum_norm_blocks<2>, sum, stream, sums, n);
}

}  // namespace moiety::nn
