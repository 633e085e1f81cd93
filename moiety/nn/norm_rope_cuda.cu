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
  int64_t query_blocks;  // thread blocks of queries, before those of keys; backward: their runs
  const float* table;
  const int32_t* position;  // null: position t is t mod seq_len
  int64_t limit;            // positions of the table
  Divisor seq_len;
  device::RowLength length;
  float eps;
  float* partial;  // backward: [runs of queries and of keys, C]

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
  const int64_t block = blockIdx.x;
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

// Rotates by a lane's cosines (low) and sines (high). An unknown position gives NaN.
template <bool kInverse, class T>
__device__ Turn<T> rotate(const Turn<T>& x, const Turn<float>& angles, bool known) {
  float low[kOctet], high[kOctet];
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const float cosine = known ? angles.low[i] : kCanonicalNan;
    const float sine = kInverse ? -angles.high[i] : angles.high[i];
    low[i] = x.low[i] * cosine + x.high[i] * -sine;
    high[i] = x.high[i] * cosine + x.low[i] * sine;
  }
  return {round_octet<T>(low), round_octet<T>(high)};
}

// The angles of a lane's elements, kept while the position stays.
template <int kLanes>
class Angles {
 public:
  __device__ explicit Angles(const Params& p) : p_(p) {}
  __device__ void turn_to(int position) {
    if (position == held_) return;
    held_ = position;
    known_ = position >= 0 && position < p_.limit;
    constexpr int kHalf = kLanes * kOctet;
    const int64_t row = int64_t{known_ ? position : 0} * 2 * kHalf;
    angles_ = load_turn(p_.table + row + threadIdx.x % kLanes * kOctet, kHalf, true);
  }
  template <class T>
  __device__ Turn<T> rotate(const Turn<T>& x) const {
    return nn::rotate<false>(x, angles_, known_);
  }

 private:
  const Params& p_;
  int held_ = -1;  // an unknown position too
  bool known_ = false;
  Turn<float> angles_{};
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
  Angles<kLanes> angles(p);
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

// ---- backward

constexpr NormOrder kOrder = norm_order(256);
constexpr int kGroups = kOrder.run;  // of lanes; each has a class of rows
static_assert(kGroups == 2 * kOctet, "a thread for every column");

// Rows wait in shared memory, where copies bring them some rows ahead. A lane brings and reads the
// elements that it needs itself.
template <class T, int kLanes>
struct Ahead {
  static constexpr int kStages = sizeof(T) == 2 ? 3 : 2, kThreads = kGroups * kLanes;
  static constexpr int kHeads = 2 * sizeof(Octet<T>) / 16;  // pieces of a lane's x, and of its dy
  static constexpr int kPieces = 2 * kHeads + 4;            // and of its cosines and sines
  struct Place {
    int64_t out;
    bool known;  // the position
  };
  uint4 piece[kStages][kPieces][kThreads];
  Place place[kStages][kGroups];
};

// The rows of a class of q or k heads, by a group of lanes.
template <class T, int kLanes>
class ClassRows {
 public:
  using Memory = Ahead<T, kLanes>;
  using Place = typename Memory::Place;
  static constexpr int kHalf = kLanes * kOctet;

  __device__ ClassRows(const Params& p, const Heads& heads, Memory& memory)
      : p_(p), heads_(heads), memory_(memory) {}
  __device__ int rows() const { return rows_; }

  // Begins to bring row i of the class; all lanes of the warp call it for every i in turn.
  __device__ void bring(int i) {
    const int turn = i % kLanes;
    if (turn == 0) look(i + lane());
    const int64_t x = offsets_.of(0, turn), out = offsets_.of(1, turn);
    const int position = __shfl_sync(device::kWarp, position_, turn, kLanes);
    if (i < rows_) {
      const int stage = i % Memory::kStages;
      const bool known = position >= 0 && position < p_.limit;
      if (lane() == 0) memory_.place[stage][group()] = {out, known};
      copy(stage, 0, static_cast<const T*>(heads_.x) + x + column());
      copy(stage, Memory::kHeads, static_cast<const T*>(heads_.out) + out + column());
      copy(stage, 2 * Memory::kHeads,
           p_.table + int64_t{known ? position : 0} * 2 * kHalf + column());
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Waits for row i, behind which the next ones have been begun. Angles: cosines, then sines.
  __device__ Place wait(int i, Turn<T>& x, Turn<T>& dy, Turn<float>& angles) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(Memory::kStages - 1) : "memory");
    __syncwarp();
    const int stage = i % Memory::kStages;
    take(stage, 0, x);
    take(stage, Memory::kHeads, dy);
    take(stage, 2 * Memory::kHeads, angles);
    const Place place = memory_.place[stage][group()];
    __syncwarp();
    return place;
  }
  static __device__ int lane() { return threadIdx.x % kLanes; }
  static __device__ int column() { return lane() * kOctet; }

 private:
  static __device__ int group() { return threadIdx.x / kLanes; }
  __device__ void look(int i) {
    const int64_t row = first_ + min(i, max(rows_ - 1, 0)) * kOrder.classes;
    const int64_t named = min(row, heads_.rows - 1);
    offsets_ = {heads_.map.offsets(named), heads_.map.small};
    position_ = p_.position_of(heads_.per_token.divide(named));
  }
  // Through the cache of the multiprocessor, since heads of a token have the same angles.
  template <class U>
  __device__ void copy(int stage, int piece, const U* low) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < int(sizeof(Octet<U>) / 16); ++i, ++piece) {
        const U* from = low + half * kHalf + i * (16 / sizeof(U));
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(
                         __cvta_generic_to_shared(&memory_.piece[stage][piece][threadIdx.x]))),
                     "l"(from)
                     : "memory");
      }
    }
  }
  template <class U>
  __device__ void take(int stage, int piece, Turn<U>& out) const {
    for (Octet<U>* octet : {&out.low, &out.high}) {
#pragma unroll
      for (int i = 0; i < int(sizeof(Octet<U>) / 16); ++i, ++piece) {
        const uint4 four = memory_.piece[stage][piece][threadIdx.x];
        octet->word[4 * i] = four.x;
        octet->word[4 * i + 1] = four.y;
        octet->word[4 * i + 2] = four.z;
        octet->word[4 * i + 3] = four.w;
      }
    }
  }

  const Params& p_;
  const Heads& heads_;
  Memory& memory_;
  int64_t first_ = int64_t{blockIdx.x} * kGroups + group();
  int rows_ = device::class_rows(heads_.rows, first_, kOrder.classes);
  device::RowOffsets<kLanes, 2> offsets_{};
  int position_ = 0;
};

// The sums of a row's squares and of its dot product, folded together over its lanes.
template <int kLanes>
__device__ device::RowSums known_of(const Params& p, float squares, float dot) {
  float sums[2] = {squares, dot};
  const float mine = device::fold_rows<kLanes>(sums);
  return device::row_sums(p.length, p.eps, __shfl_sync(device::kWarp, mine, 0, kLanes),
                          __shfl_sync(device::kWarp, mine, kLanes / 2, kLanes));
}

template <class T>
__device__ void add_terms(const Octet<T>& dy, const Octet<T>& x, float r, float* sum) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) sum[i] = __fmaf_rn(dy[i], x[i] * r, sum[i]);
}

// dx of the rows of a class; `sum` becomes the class's sum for the gradient of the weight, of the
// low and the high octet.
template <class T, int kLanes>
__device__ void take_class(const Params& p, const Heads& heads, Ahead<T, kLanes>& memory,
                           float (&sum)[2 * kOctet]) {
  constexpr int kHalf = kLanes * kOctet, kStages = Ahead<T, kLanes>::kStages;
  ClassRows<T, kLanes> rows(p, heads, memory);
  const Turn<T> g = load_turn(static_cast<const T*>(heads.weight) + rows.column(), kHalf, true);
#pragma unroll
  for (float& v : sum) v = 0;
  const int most = __shfl_sync(device::kWarp, rows.rows(), 0);  // the most of the warp's classes
  for (int i = 0; i + 1 < kStages; ++i) rows.bring(i);
#pragma unroll 1
  for (int i = 0; i < most; ++i) {
    rows.bring(i + kStages - 1);
    Turn<T> x, dy;
    Turn<float> angles;
    const auto place = rows.wait(i, x, dy, angles);
    const bool exists = i < rows.rows();
    dy = rotate<true>(dy, angles, place.known);
    const device::RowSums s = known_of<kLanes>(p, squares_of(x), dot_of(g, dy, x));
    if (!exists) continue;
    const Turn<T> dx{device::dx_octet(s, x.low, dy.low, g.low, false, {}),
                     device::dx_octet(s, x.high, dy.high, g.high, false, {})};
    store_turn(static_cast<T*>(heads.out) + place.out + rows.column(), kHalf, dx, true);
    add_terms(dy.low, x.low, s.r, sum);
    add_terms(dy.high, x.high, s.r, sum + kOctet);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// The sum of the run's classes.
template <class T, int kLanes>
__device__ void add_classes(const float (&sum)[2 * kOctet], Ahead<T, kLanes>& memory, float* out) {
  constexpr int kHalf = kLanes * kOctet;
  static_assert(sizeof(memory.piece) >= sizeof(float) * kGroups * 2 * kHalf);
  auto& kept = reinterpret_cast<float(&)[kGroups][2 * kHalf]>(memory.piece);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    kept[threadIdx.x / kLanes][threadIdx.x % kLanes * kOctet + i] = sum[i];
    kept[threadIdx.x / kLanes][threadIdx.x % kLanes * kOctet + i + kHalf] = sum[i + kOctet];
  }
  __syncthreads();
  float total = 0;
#pragma unroll
  for (const auto& row : kept) total += row[threadIdx.x];
  out[threadIdx.x] = total;
  __syncthreads();
}

// A thread block takes a run of classes of the queries, then one of the keys.
template <class T, int kLanes>
__global__ void __launch_bounds__(kGroups* kLanes, 512 / (kGroups * kLanes))
    norm_rope_backward_rows(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  auto& memory = *reinterpret_cast<Ahead<T, kLanes>*>(shared);
  cudaTriggerProgrammaticLaunchCompletion();
  constexpr int64_t kColumns = 2 * kLanes * kOctet;
  float sum[2 * kOctet];
  const auto take = [&](const Heads& heads, int64_t block) {
    take_class(p, heads, memory, sum);
    add_classes(sum, memory, p.partial + block * kColumns);
  };
  take(p.heads[0], blockIdx.x);
  const int64_t first_key = int64_t{blockIdx.x} * kGroups;
  if (first_key < p.heads[1].rows) take(p.heads[1], p.query_blocks + blockIdx.x);
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

template <class Args>
Params params_of(const Args& a, const TensorView& out_TGNC, float* partial) {
  const int64_t keys = a.x_TGNC.size(2) - 1;
  const HeadAngles& angles = a.angles;
  const Heads queries = heads_of(a.x_TGNC, a.q_weight_C, out_TGNC, 0, keys);
  return {{queries, heads_of(a.x_TGNC, a.k_weight_C, out_TGNC, keys, keys + 1)},
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
  const int64_t n = chosen.columns, blocks = a.workspace.size(0);
  p.query_blocks = norm_blocks(p.heads[0].rows, n);
  const auto start = start_of<kNormRopeKernels>(chosen, [&]<NormKernel k>() -> KernelStart<Params> {
    using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
    constexpr int kLanes = k.columns / (2 * kOctet);
    return {norm_rope_backward_rows<T, kLanes>,
            {p.query_blocks, kGroups * kLanes, sizeof(Ahead<T, kLanes>)}};
  });
  launch(name, start.kernel, start.shape, stream, p);
  const std::array sums{
      device::NormSum{p.partial, p.query_blocks, a.q_grad_C.data<float>(), a.q_accumulate},
      device::NormSum{p.partial + p.query_blocks * n, blocks - p.query_blocks,
                      a.k_grad_C.data<float>(), a.k_accumulate}};
  launch(name, device::sum_norm_blocks<2>,
         {.blocks = 2 * blocks_for(n, 32), .threads = device::kSumThreads, .early = true}, stream,
         sums, n);
}

}  // namespace moiety::nn
