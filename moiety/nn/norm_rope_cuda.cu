// Norm and rope of q and k on GPUs, in one pass. A group of lanes has a head, and a lane has two
// octets of it, half a head apart, which are rotated with each other. Thread blocks stay: the rows
// of a group, which are heads, come one after the other, by copies that are some rows ahead.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "moiety/base/kernel_list.cuh"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp32.h"
#include "moiety/nn/barrier.cuh"
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
  int64_t query_blocks;  // backward: runs of queries, before those of keys
  const float* table;
  const int32_t* position;  // null: position t is t mod seq_len
  int limit;                // positions of the table
  Divisor seq_len;
  device::RowLength length;
  float eps;
  float* partial;  // backward: [runs of queries and of keys, C]

  __device__ int position_of(int64_t token) const {
    if (position) return position[token];
    return int(token - seq_len.divide(token) * seq_len.divisor());
  }
  __device__ bool knows(int position) const { return position >= 0 && position < limit; }
};

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
    known_ = p_.knows(position);
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

template <class T>
__device__ float squares_of(const Turn<T>& x) {
  return device::add_products(x.low, x.low, 0.0f) + device::add_products(x.high, x.high, 0.0f);
}
template <class T>
__device__ float dot_of(const Turn<T>& g, const Turn<T>& dy, const Turn<T>& x) {
  return device::add_dot(g.low, dy.low, x.low, 0.0f) +
         device::add_dot(g.high, dy.high, x.high, 0.0f);
}

constexpr NormOrder kOrder = norm_order(256);
static_assert(kOrder.run == 2 * kOctet, "backward a block has a thread for every column");

// A pass, and what its rows need of shared memory. A group of lanes takes kRows rows at a time.
// Angles come through shared memory only backward; forward kRows neighbours mostly have the same
// ones, which stay in registers.
template <class T, int kLanes, bool kBackward>
struct Pass {
  static constexpr bool kSmall = sizeof(T) == 2;
  static constexpr int kGroups = kBackward ? kOrder.run : 128 / kLanes;  // backward: classes
  static constexpr int kThreads = kGroups * kLanes, kHalf = kLanes * kOctet;
  static constexpr int kRows = kSmall && (!kBackward || kLanes == 4) ? 2 : 1;
  static constexpr int kStages = kBackward ? (kSmall ? kRows + 2 : 2) : (kSmall ? 4 : 3);
  static constexpr int kNeighbours = kBackward ? 1 : kRows;
  static constexpr int kBlocks = kBackward ? (kLanes == 16 ? 2 : 4) : (kSmall ? 5 : 4);  // of an SM

  static constexpr int kHead = 2 * sizeof(Octet<T>) / 16;  // pieces of a lane's x, and of its dy
  static constexpr int kAngles = kBackward ? 2 * kHead : kHead;  // the first piece of its angles
  static constexpr int kPieces = kAngles + (kBackward ? 4 : 0);
  struct alignas(16) Place {
    T* out;  // null: there is no such row
    int position;
    bool shared;  // the angles, by all groups of the warp
  };
  uint4 piece[kStages][kPieces][kThreads];
  Place place[kStages][kGroups];
};

// The rows of a group of lanes, of the queries and then of the keys. Forward the groups of the grid
// take kNeighbours rows each, in turns; backward a group has a class. All groups of a block read
// equally many rows, some of which do not exist.
template <class T, int kLanes, bool kBackward>
class Rows {
 public:
  using Memory = Pass<T, kLanes, kBackward>;
  using Place = typename Memory::Place;

  __device__ Rows(const Params& p, Memory& memory) : p_(p), memory_(memory), most_(most(false)) {
    for (int i = 0; i + kRows < kStages; ++i) bring();
  }
  // The most rows of queries or keys that a group of the block has, a multiple of kRows.
  __device__ int most(bool keys) const {
    const int steps = device::class_rows(p_.heads[keys].rows, first(0), step());
    return kBackward ? (steps + kRows - 1) / kRows * kRows : steps * kRows;
  }
  // Begins to bring the next kRows rows, and waits for those that are to be read now. After they
  // are read, the warp has to be synchronized.
  __device__ void next() {
#pragma unroll
    for (int j = 0; j < kRows; ++j) bring();
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - kRows) : "memory");
    __syncwarp();
  }
  __device__ Place read(Turn<T>& x, Turn<T>* dy = nullptr, Turn<float>* angles = nullptr) {
    const Place place = memory_.place[read_][group()];
    take(0, threadIdx.x, x);
    if constexpr (kBackward) {
      take(Memory::kHead, threadIdx.x, *dy);
      take(Memory::kAngles, place.shared ? first_of_warp() + lane() : threadIdx.x, *angles);
    }
    if (++read_ == kStages) read_ = 0;
    return place;
  }
  // Memory that is free until the next call of next().
  __device__ void* unused() { return memory_.piece[write_]; }

  static __device__ int group() { return threadIdx.x / kLanes; }
  static __device__ int lane() { return threadIdx.x % kLanes; }
  static __device__ int column() { return lane() * kOctet; }

 private:
  static constexpr int kRows = Memory::kRows, kStages = Memory::kStages, kHalf = Memory::kHalf,
                       kNeighbours = Memory::kNeighbours;

  static __device__ int first_of_warp() { return threadIdx.x / 32 * 32; }
  // A group's first row, and the distance to its next ones.
  static __device__ int64_t first(int group) {
    return (int64_t{blockIdx.x} * Memory::kGroups + group) * kNeighbours;
  }
  static __device__ int64_t step() {
    return kBackward ? kOrder.classes : int64_t{gridDim.x} * Memory::kGroups * kNeighbours;
  }
  // Begins to bring the group's next row.
  __device__ void bring() {
    if (i_ == most_ && !keys_) keys_ = true, i_ = 0, most_ = most(true);
    const int turn = i_ % kLanes;
    if (turn == 0) find(i_ + lane());
    const auto of_turn = [&](auto* mine) {
      return reinterpret_cast<decltype(mine)>(
          __shfl_sync(device::kWarp, reinterpret_cast<uint64_t>(mine), turn, kLanes));
    };
    const T *x = of_turn(x_), *dy = kBackward ? of_turn(out_) : nullptr;
    const int position = kBackward ? __shfl_sync(device::kWarp, position_, turn, kLanes) : 0;
    const bool shared = shared_ >> turn & 1;
    if (lane() == turn) {
      memory_.place[write_][group()] = {exists_ ? out_ : nullptr, position_, shared};
    }
    if (i_ < most_) {
      copy<false>(0, x + column());
      if constexpr (kBackward) {
        copy<false>(Memory::kHead, dy + column());
        bring_angles(position, shared);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    ++i_;
    if (++write_ == kStages) write_ = 0;
  }
  // Shared angles are brought once: a lane brings a piece for all groups.
  __device__ void bring_angles(int position, bool shared) {
    const float* angles = p_.table + int64_t{p_.knows(position) ? position : 0} * 2 * kHalf;
    if (!shared) {
      copy<true>(Memory::kAngles, angles + column());
      return;
    }
#pragma unroll
    for (int i = threadIdx.x % 32; i < 4 * kLanes; i += 32) {
      const int piece = i / kLanes;
      send<true>(memory_.piece[write_][Memory::kAngles + piece][first_of_warp() + lane()],
                 angles + piece / 2 * kHalf + piece % 2 * 4 + column());
    }
  }
  // Finds row i of the group; each lane finds one. A row that does not exist lies where the last
  // one does, so that it can be brought.
  __device__ void find(int i) {
    const Heads& heads = p_.heads[keys_];
    const int64_t row = first(group()) + i / kNeighbours * step() + i % kNeighbours;
    const int64_t named = max(int64_t{0}, min(row, heads.rows - 1));
    const auto offset = heads.map.offsets(named);
    x_ = static_cast<const T*>(heads.x) + offset[0];
    out_ = static_cast<T*>(heads.out) + offset[1];
    exists_ = row < heads.rows;
    position_ = p_.position_of(heads.per_token.divide(named));
    if constexpr (kBackward) {
      bool same = true;
#pragma unroll
      for (int o = kLanes; o < 32; o *= 2) {
        const int other = __shfl_xor_sync(device::kWarp, position_, o);
        same = same && position_ == other;
      }
      shared_ = __ballot_sync(device::kWarp, same);
#pragma unroll
      for (int o = kLanes; o < 32; o *= 2) shared_ &= shared_ >> o;
    }
  }
  // Angles pass through the cache of the multiprocessor, since heads of a token have the same ones.
  template <bool kCached>
  static __device__ void send(uint4& to, const void* from) {
    const uint32_t address = device::shared_address(&to);
    if constexpr (kCached) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from)
                   : "memory");
    } else {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from)
                   : "memory");
    }
  }
  template <bool kCached, class U>
  __device__ void copy(int piece, const U* low) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < int(sizeof(Octet<U>) / 16); ++i, ++piece) {
        send<kCached>(memory_.piece[write_][piece][threadIdx.x],
                      low + half * kHalf + i * (16 / sizeof(U)));
      }
    }
  }
  template <class U>
  __device__ void take(int piece, int thread, Turn<U>& out) const {
    for (Octet<U>* octet : {&out.low, &out.high}) {
#pragma unroll
      for (int i = 0; i < int(sizeof(Octet<U>) / 16); ++i, ++piece) {
        const uint4 four = memory_.piece[read_][piece][thread];
        octet->word[4 * i] = four.x;
        octet->word[4 * i + 1] = four.y;
        octet->word[4 * i + 2] = four.z;
        octet->word[4 * i + 3] = four.w;
      }
    }
  }

  const Params& p_;
  Memory& memory_;
  bool keys_ = false;
  int i_ = 0, most_;          // the row that is brought next, and the number of rows
  int write_ = 0, read_ = 0;  // stages
  // The row that this lane has found.
  const T* x_ = nullptr;
  T* out_ = nullptr;
  bool exists_ = false;
  int position_ = 0;
  uint32_t shared_ = 0;  // bit t: whether the rows that lanes t of the groups found share angles
};

template <class T, int kLanes>
__global__ void __launch_bounds__(Pass<T, kLanes, false>::kThreads, Pass<T, kLanes, false>::kBlocks)
    norm_rope_rows(const __grid_constant__ Params p) {
  using Memory = Pass<T, kLanes, false>;
  constexpr int kRows = Memory::kRows, kSame = kLanes / kRows, kHalf = Memory::kHalf;
  extern __shared__ uint4 shared[];
  Rows<T, kLanes, false> rows(p, *reinterpret_cast<Memory*>(shared));
  Angles<kLanes> angles(p);
#pragma unroll 1
  for (int keys = 0; keys < 2; ++keys) {
    const Turn<T> g =
        load_turn(static_cast<const T*>(p.heads[keys].weight) + rows.column(), kHalf, true);
    const int most = rows.most(keys);
#pragma unroll 1
    for (int i = 0; i < most; i += kRows) {
      rows.next();
      typename Memory::Place place[kRows];
      Turn<T> x[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        place[j] = rows.read(x[j]);
        if (j == 0) angles.turn_to(place[j].position);
      }
      __syncwarp();
      float sums[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) sums[j] = squares_of(x[j]);
      const float known = device::inverse_rms(device::fold_rows<kLanes>(sums), p.length, p.eps);
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const float r = __shfl_sync(device::kWarp, known, j * kSame, kLanes);
        angles.turn_to(place[j].position);
        const auto scale = [&](const Octet<T>& values, const Octet<T>& weight) {
          float v[kOctet];
#pragma unroll
          for (int c = 0; c < kOctet; ++c) v[c] = values[c] * r * weight[c];
          return round_octet<T>(v);
        };
        const Turn<T> y{scale(x[j].low, g.low), scale(x[j].high, g.high)};
        store_turn(place[j].out + rows.column(), kHalf, angles.rotate(y), place[j].out != nullptr);
      }
    }
  }
}

// ---- backward

// The numbers of rows, of which `sums` are the squares of one and its dot product, then those of
// the next.
template <int kLanes, int kRows>
__device__ void row_numbers(const Params& p, const float (&sums)[2 * kRows],
                            device::RowSums (&out)[kRows]) {
  constexpr int kSame = kLanes / (2 * kRows);  // lanes that get the same sum
  const float mine = device::fold_rows<kLanes>(sums);
  const float other = __shfl_xor_sync(device::kWarp, mine, kSame);
  const bool dot = threadIdx.x & kSame;
  const auto known = device::row_sums(p.length, p.eps, dot ? other : mine, dot ? mine : other);
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    out[j] = {__shfl_sync(device::kWarp, known.r, 2 * j * kSame, kLanes),
              __shfl_sync(device::kWarp, known.factor, 2 * j * kSame, kLanes)};
  }
}

template <class T>
__device__ void add_terms(const Octet<T>& dy, const Octet<T>& x, float r, float* sum) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) sum[i] = __fmaf_rn(dy[i], x[i] * r, sum[i]);
}

// dx of the queries or keys of a class; `sum` becomes the class's sum for the gradient of the
// weight, of the low and the high octet.
template <class T, int kLanes>
__device__ void take_class(const Params& p, const Heads& heads, int most,
                           Rows<T, kLanes, true>& rows, float (&sum)[2 * kOctet]) {
  using Memory = Pass<T, kLanes, true>;
  constexpr int kRows = Memory::kRows, kHalf = Memory::kHalf;
  const Turn<T> g = load_turn(static_cast<const T*>(heads.weight) + rows.column(), kHalf, true);
#pragma unroll
  for (float& v : sum) v = 0;
#pragma unroll 1
  for (int i = 0; i < most; i += kRows) {
    rows.next();
    Turn<T> x[kRows], dy[kRows];
    T* out[kRows];
    float sums[2 * kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      Turn<float> angles;
      const auto place = rows.read(x[j], &dy[j], &angles);
      out[j] = place.out;
      dy[j] = rotate<true>(dy[j], angles, p.knows(place.position));
      sums[2 * j] = squares_of(x[j]);
      sums[2 * j + 1] = dot_of(g, dy[j], x[j]);
    }
    __syncwarp();
    device::RowSums s[kRows];
    row_numbers<kLanes>(p, sums, s);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (!out[j]) continue;
      const Turn<T> dx{device::dx_octet(s[j], x[j].low, dy[j].low, g.low, false, {}),
                       device::dx_octet(s[j], x[j].high, dy[j].high, g.high, false, {})};
      store_turn(out[j] + rows.column(), kHalf, dx, true);
      add_terms(dy[j].low, x[j].low, s[j].r, sum);
      add_terms(dy[j].high, x[j].high, s[j].r, sum + kOctet);
    }
  }
}

// The sum of the run's classes.
template <class Memory>
__device__ void add_classes(const float (&sum)[2 * kOctet], void* unused, float* out) {
  constexpr int kHalf = Memory::kHalf, kLanes = kHalf / kOctet;
  using Kept = float[kOrder.run][2 * kHalf];
  static_assert(sizeof(Memory::piece[0]) >= sizeof(Kept));
  auto& kept = *static_cast<Kept*>(unused);
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
__global__ void __launch_bounds__(Pass<T, kLanes, true>::kThreads, Pass<T, kLanes, true>::kBlocks)
    norm_rope_backward_rows(const __grid_constant__ Params p) {
  using Memory = Pass<T, kLanes, true>;
  extern __shared__ uint4 shared[];
  cudaTriggerProgrammaticLaunchCompletion();
  Rows<T, kLanes, true> rows(p, *reinterpret_cast<Memory*>(shared));
#pragma unroll 1
  for (int keys = 0; keys < 2; ++keys) {
    const int most = rows.most(keys);
    if (most == 0) continue;
    float sum[2 * kOctet];
    take_class<T, kLanes>(p, p.heads[keys], most, rows, sum);
    const int64_t run = blockIdx.x + (keys ? p.query_blocks : 0);
    add_classes<Memory>(sum, rows.unused(), p.partial + run * (2 * Memory::kHalf));
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
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

constexpr int64_t kMostPositions = std::numeric_limits<int>::max();

template <class Args>
Params params_of(const Args& a, const TensorView& out_TGNC, float* partial) {
  const int64_t keys = a.x_TGNC.size(2) - 1;
  const HeadAngles& angles = a.angles;
  const Heads queries = heads_of(a.x_TGNC, a.q_weight_C, out_TGNC, 0, keys);
  return {{queries, heads_of(a.x_TGNC, a.k_weight_C, out_TGNC, keys, keys + 1)},
          0,
          angles.table.template data<float>(),
          angles.position_T.template data<int32_t>(),
          static_cast<int>(std::min<int64_t>(angles.table.size(0), kMostPositions)),
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
  const Params p = params_of(a, a.y_TGNC, nullptr);
  const auto start = start_of<kNormRopeKernels>(chosen, [&]<NormKernel k>() -> KernelStart<Params> {
    using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
    constexpr int kLanes = k.columns / (2 * kOctet);
    using Memory = Pass<T, kLanes, false>;
    const auto kernel = norm_rope_rows<T, kLanes>;
    const int64_t rows = std::max(p.heads[0].rows, p.heads[1].rows);
    const int64_t most = resident_blocks(kernel, Memory::kThreads, sizeof(Memory), stream);
    return {kernel,
            {std::min(most, blocks_for(rows, Memory::kGroups * Memory::kRows)), Memory::kThreads,
             sizeof(Memory)}};
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
    using Memory = Pass<T, kLanes, true>;
    return {norm_rope_backward_rows<T, kLanes>, {p.query_blocks, Memory::kThreads, sizeof(Memory)}};
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
