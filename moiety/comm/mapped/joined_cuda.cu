#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/comm/mapped/joined_device.cuh"
#include "moiety/comm/mapped/sum_device.cuh"
#include "moiety/comm/packs.cuh"

namespace moiety::comm::mapped {
namespace {

constexpr int kThreads = 512, kWarp = 32;
constexpr int kFlight = 8;
// Blocks of all ranks of a group that wait at a time: those that share a GPU must fit on it.
constexpr int kBlocksOfAll = 64;
constexpr int64_t kMost = int64_t{4} << 20;

struct Moves {
  uint4* to[kMostMoves];
  const uint4* from[kMostMoves];
  int64_t packs[kMostMoves];
  int count;
};
static_assert(sizeof(Region) + sizeof(Meeting) + sizeof(Moves) < 4096);

__global__ void __launch_bounds__(kThreads)
    copies_kernel(const __grid_constant__ Region region, const __grid_constant__ Meeting meeting,
                  const __grid_constant__ Moves moves, bool leave) {
  join_meetings(region, meeting, leave, [&] {
    constexpr int kTile = kThreads * kFlight;
    for (int m = 0; m < moves.count; ++m) {
      for (int64_t tile = int64_t{blockIdx.x} * kTile; tile < moves.packs[m];
           tile += int64_t{gridDim.x} * kTile) {
        carry_packs<kThreads, kFlight>(
            tile + threadIdx.x, moves.packs[m], [&](int64_t i) { return moves.from[m][i]; },
            [&](int64_t i, const uint4& x) { moves.to[m][i] = x; });
      }
    }
  });
}

// Where peers get the sum, too.
struct Targets {
  std::byte* at[kMaxRanks];
  int count;
};

// A warp's next piece of work. Multiprocessors are not equally fast, and who is done early takes more.
class Pieces {
 public:
  // Few pieces are divided among all blocks.
  __device__ explicit Pieces(Control& control)
      : control_(control), now_(threadIdx.x / kWarp * gridDim.x + blockIdx.x) {}
  __device__ int64_t now() const { return now_; }
  // Asks for the next one; it is there when next() is called.
  __device__ void ask() {
    if (threadIdx.x % kWarp == 0) asked_ = atomicAdd(&control_.drawn, 1u);
  }
  __device__ void next() { now_ = gridDim.x * (kThreads / kWarp) + __shfl_sync(~0u, asked_, 0); }

 private:
  Control& control_;
  uint32_t now_, asked_ = 0;
};

// Sums n elements; operands lie at multiples of 16 bytes.
template <class T, ReduceOp op>
__device__ void sum_pieces(Control& control, T* to, const Targets& also, const Sources& sources,
                           int64_t n) {
  constexpr int N = kWide<T>, kPiece = kWarp * kPacksInFlight<N>;
  using P = Pack<T, N>;
  const auto at = [&](int r) { return reinterpret_cast<const T*>(sources.at[r]); };
  const int64_t packs = n / N;
  for (Pieces pieces(control); pieces.now() * kPiece < packs; pieces.next()) {
    pieces.ask();
    const int64_t begin = pieces.now() * kPiece * N;
    const int lane = threadIdx.x % kWarp, left = int(std::min<int64_t>(packs - begin / N, kPiece));
    sum_packs<T, op, N>(
        to + begin, [&](int r) { return at(r) + begin; }, sources.count, left, lane, kWarp);
    for (int t = 0; t < also.count; ++t) {
      P* const there = reinterpret_cast<P*>(also.at[t]) + begin / N;
      for (int i = lane; i < left; i += kWarp) there[i] = reinterpret_cast<P*>(to + begin)[i];
    }
  }
  const int64_t tail = packs * N + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (tail >= n) return;
  sum_packs<T, op, 1>(
      to + tail, [&](int r) { return at(r) + tail; }, sources.count, 1, 0, 1);
  for (int t = 0; t < also.count; ++t) reinterpret_cast<T*>(also.at[t])[tail] = to[tail];
}

template <class T, ReduceOp op>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ Region region, const __grid_constant__ Meeting meeting,
               const __grid_constant__ Sources sources, const __grid_constant__ Targets also, T* to,
               int64_t n, bool leave) {
  join_meetings(region, meeting, leave,
                [&] { sum_pieces<T, op>(*region.control, to, also, sources, n); });
}

int64_t blocks_of(const Region& region, int most, int64_t bytes) {
  const int64_t fit = std::clamp(kBlocksOfAll / region.ranks, 1, most);
  return std::clamp<int64_t>(blocks_for(bytes, kThreads * 16), 1, fit);
}

}  // namespace

bool joins_copy(const CopyStep& copy) { return copies_by_kernel(copy) && copy.bytes <= kMost; }

bool joins_sum(const SumStep& step) {
  auto bits = uintptr_t{0};
  for (const std::byte* to : step.also) bits |= reinterpret_cast<uintptr_t>(to);
  return bits % 16 == 0 && sums_wide(step);
}

void join_copies(const Region& region, const Meeting& meeting, std::span<const Step> copies,
                 bool leave, int blocks, const Stream& stream) {
  Moves moves{};
  int64_t bytes = 0;
  for (const Step& step : copies) {
    moves.to[moves.count] = reinterpret_cast<uint4*>(step.copy.to);
    moves.from[moves.count] = reinterpret_cast<const uint4*>(step.copy.from);
    moves.packs[moves.count++] = step.copy.bytes / 16;
    bytes += step.copy.bytes;
  }
  launch("comm_copies", copies_kernel, {blocks_of(region, blocks, bytes), kThreads}, stream, region,
         meeting, moves, leave);
}

void join_sum(const Region& region, const Meeting& meeting, const SumStep& step, DType dtype,
              ReduceOp op, bool leave, int blocks, const Stream& stream) {
  const int64_t grid = blocks_of(region, blocks, byte_size(dtype, step.elements));
  Targets also{.at = {}, .count = static_cast<int>(step.also.size())};
  std::copy(step.also.begin(), step.also.end(), also.at);
  for_reduction(dtype, op, [&]<class T, ReduceOp o>() {
    launch("comm_joined_sum", sum_kernel<T, o>, {grid, kThreads}, stream, region, meeting,
           sources_of(step), also, reinterpret_cast<T*>(step.to), step.elements, leave);
  });
}

void load_joined_kernels() {
  cudaFuncAttributes unused{};
  MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, copies_kernel));
  for_all_reductions([&]<class T, ReduceOp o>() {
    MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, sum_kernel<T, o>));
  });
}

}  // namespace moiety::comm::mapped
