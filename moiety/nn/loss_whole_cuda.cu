// Cross-entropy on GPUs of rows that are read once. A cluster of thread blocks has a row in its
// registers while bulk copies bring the next one to its shared memory.
//
// Every warp owns a run of groups of logits, brings them itself and keeps them from a row's first
// pass to its last: for the maximum; for the exponentials, which replace the logits, and the sum of
// each group; for the gradient. Between passes the warps of the cluster tell each other maxima, then
// sums, and each adds up the row for itself.
#include <algorithm>
#include <iterator>

#include "moiety/base/math.h"
#include "moiety/base/per_device.h"
#include "moiety/nn/barrier.cuh"
#include "moiety/nn/element.h"
#include "moiety/nn/loss_device.cuh"

namespace moiety::nn {
namespace {

using device::Barrier, device::kAllLanes, device::LossTarget;
constexpr int kGroup = device::kLossGroup, kEach = device::kLossEach;

// What a kernel's clusters look like.
struct WholeShape {
  int blocks;  // of a cluster
  int warps;   // of a block
  int groups;  // of a warp, at most
  constexpr int threads() const { return 32 * warps; }
  constexpr int all_warps() const { return blocks * warps; }
  constexpr int64_t most() const { return int64_t{kGroup} * groups * all_warps(); }
};

template <WholeShape kShape>
struct State {
  static constexpr int kWords = (kShape.all_warps() * kShape.groups + kGroup - 1) / kGroup * kGroup;
  float slots[kShape.warps][kShape.groups][kGroup];  // of the next row
  float sums[kWords];                                // of the row's groups, then 0
  float maxima[kShape.all_warps()];
  Barrier full[kShape.warps];  // a use is a row
};

// The same variable in the shared memory of another block of the cluster.
__device__ uint32_t address_in(const float* p, int block) {
  uint32_t out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(out)
      : "r"(device::shared_address(p)), "r"(block));
  return out;
}
__device__ void store_in_cluster(uint32_t address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

// The rows of a cluster that have a target, one after the other. Lanes look at 32 rows at a time.
struct RowWalk {
  const LossParams& p;
  int64_t first, step;  // of the rows not looked at yet
  uint32_t left = 0;    // rows among those looked at
  LossTarget mine{};

  // The next row, or -1; calls constant(row, value) for those that it passes over. All lanes of a
  // warp call it.
  template <class Constant>
  __device__ int64_t next(int32_t& target, const Constant& constant) {
    while (left == 0 && first < p.rows) {
      const int64_t row = first + int64_t(threadIdx.x % 32) * step;
      const bool exists = row < p.rows;
      if (exists) mine = device::loss_target(p, row);
      left = __ballot_sync(kAllLanes, exists && mine.valid);
      uint32_t others = __ballot_sync(kAllLanes, exists && !mine.valid);
      for (; others != 0; others &= others - 1) {
        const int lane = __ffs(others) - 1;
        constant(first + lane * step, __shfl_sync(kAllLanes, mine.constant(), lane));
      }
      first += 32 * step;
    }
    if (left == 0) return -1;
    const int lane = __ffs(left) - 1;
    left &= left - 1;
    target = __shfl_sync(kAllLanes, mine.word, lane);
    return first - (32 - lane) * step;
  }
};

template <class T, WholeShape kShape>
class Warp {
 public:
  __device__ Warp(const LossParams& p, State<kShape>& state)
      : p_(p), state_(state), full_(state.full[threadIdx.x / 32]) {
    const int logits = int(p.vocabulary), groups = (logits + kGroup - 1) / kGroup;
    const auto begin = [&](int warp) { return warp * groups / kShape.all_warps(); };
    number_ = int(blockIdx.x) % kShape.blocks * kShape.warps + warp();
    first_ = begin(number_);
    groups_ = begin(number_ + 1) - first_;
    columns_ = max(0, min(groups_ * kGroup, logits - first_ * kGroup));
    row_groups_ = groups;
  }

  __device__ void run() {
    prepare();
    RowWalk walk{p_, blockIdx.x / kShape.blocks, gridDim.x / kShape.blocks};
    const auto constant = [&](int64_t row, float value) { fill(row, value); };
    int32_t next_target = -1;
    int64_t next = walk.next(next_target, constant);
    bring(next);
    for (int use = 0; next >= 0; ++use) {
      const int64_t row = next;
      const int32_t target = next_target;
      // Read before any warp can write a gradient over it.
      const float at_target = speaks() ? p_.logits[row * p_.logits_stride + target] : 0;
      float v[kShape.groups][kEach];
      full_.wait(use);
      const float own = take(v);
      next = walk.next(next_target, constant);
      bring(next);
      const float max = row_max(own);
      exponentials(max, v);
      tell_sums(v);
      const float sum = row_sum();
      const auto lse = [&] { return max + log(sum); };
      const float factor = (p_.z_coef != 0 ? 1 + 2 * p_.z_coef * lse() : 1) * (1 / sum);
      if (p_.dlogits) gradient(row, target, factor, v);
      if (speaks()) p_.loss[row] = lse() - at_target;
    }
  }

 private:
  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int warp() { return threadIdx.x / 32; }
  // The one thread that reads and writes for the row.
  __device__ bool speaks() const { return number_ == 0 && lane() == 0; }
  static __device__ void meet() {
    if constexpr (kShape.blocks == 1) {
      __syncthreads();
    } else {
      asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
    }
  }
  __device__ int begin() const { return first_ * kGroup; }
  __device__ T* gradient_of(int64_t row) const {
    return static_cast<T*>(p_.dlogits) + row * p_.dlogits_stride + begin();
  }

  // Logits past the end are -inf, whose exponential is 0; no copy comes there. Sums of groups that do
  // not exist are 0.
  __device__ void prepare() const {
    float* slots = state_.slots[warp()][0];
    for (int i = columns_ + lane(); i < groups_ * kGroup; i += 32) slots[i] = -INFINITY;
    for (int i = threadIdx.x; i < State<kShape>::kWords; i += kShape.threads()) state_.sums[i] = 0;
    if (lane() == 0) full_.init(1);
    device::fence_init();
    __syncwarp();
    meet();
  }
  // Brings a row to the shared memory that this warp has read.
  __device__ void bring(int64_t row) const {
    device::fence_for_bulk();
    __syncwarp();
    if (row < 0 || lane() > 0) return;
    full_.arrive_expecting(uint32_t(4 * columns_));
    if (columns_ == 0) return;
    device::bulk_copy(state_.slots[warp()], p_.logits + row * p_.logits_stride + begin(),
                      uint32_t(4 * columns_), full_);
  }
  // A lane has eight neighbours of each group. Half of the lanes read their second four first, so
  // that a warp reads from all banks.
  __device__ float take(float (&v)[kShape.groups][kEach]) const {
    const bool second = lane() & 4;
    float max = -INFINITY;
#pragma unroll
    for (int j = 0; j < kShape.groups; ++j) {
      if (j >= groups_) break;
      const auto* from = reinterpret_cast<const float4*>(state_.slots[warp()][j]) + 2 * lane();
      const float4 a = from[second], b = from[!second];
      const float4 low = second ? b : a, high = second ? a : b;
      v[j][0] = low.x, v[j][1] = low.y, v[j][2] = low.z, v[j][3] = low.w;
      v[j][4] = high.x, v[j][5] = high.y, v[j][6] = high.z, v[j][7] = high.w;
#pragma unroll
      for (const float x : v[j]) max = fmaxf(max, x);  // fmaxf passes over NaN
    }
    return max;
  }
  __device__ float row_max(float max) const {
    max = device::fold_max(max);
    if (lane() < kShape.blocks) store_in_cluster(address_in(&state_.maxima[number_], lane()), max);
    meet();
#pragma unroll
    for (int i = 0; i < kShape.all_warps(); i += 32) {
      max = fmaxf(max, state_.maxima[min(i + lane(), kShape.all_warps() - 1)]);
    }
    return device::fold_max(max);
  }
  __device__ void exponentials(float max, float (&v)[kShape.groups][kEach]) const {
#pragma unroll
    for (int j = 0; j < kShape.groups; ++j) {
      if (j >= groups_) break;
#pragma unroll
      for (float& x : v[j]) x = exp_nonpositive(x - max);
    }
  }
  // The sums of kCount groups from group kFrom of the warp on.
  template <int kFrom, int kCount>
  __device__ void tell(const float (&v)[kShape.groups][kEach]) const {
    if constexpr (kFrom < kShape.groups) {
      float sums[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sums[i] = 0;
        if (kFrom + i >= kShape.groups || kFrom + i >= groups_) continue;
        const auto& e = v[min(kFrom + i, kShape.groups - 1)];
#pragma unroll
        for (const float x : e) sums[i] += x;
      }
      const float sum = device::fold_rows<32>(sums);
      const int group = kFrom + lane() / (32 / kCount);
      if (lane() % (32 / kCount) != 0 || group >= groups_) return;
#pragma unroll
      for (int b = 0; b < kShape.blocks; ++b) {
        store_in_cluster(address_in(&state_.sums[first_ + group], b), sum);
      }
    }
  }
  __device__ void tell_sums(const float (&v)[kShape.groups][kEach]) const {
    tell<0, 16>(v);
    tell<16, kShape.groups - 16 <= 1 ? 1 : 16>(v);
  }
  __device__ float row_sum() const {
    meet();
    float sum = 0;
    for (int base = 0; base < row_groups_; base += kGroup) {
      sum = device::add_neighbours(&state_.sums[base], sum);
    }
    return device::fold<32>(sum);
  }
  // It may lie in the memory of the logits, of which all have been read by now.
  __device__ void gradient(int64_t row, int target, float factor,
                           float (&v)[kShape.groups][kEach]) const {
    T* dz = gradient_of(row) + kEach * lane();
#pragma unroll
    for (int j = 0; j < kShape.groups; ++j) {
      if (j >= groups_) break;
#pragma unroll
      for (float& x : v[j]) x = factor * x;
      const int in_group = target - begin() - j * kGroup;
      if (in_group >= 0 && in_group < kGroup) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (kEach * lane() + i == in_group) v[j][i] = v[j][i] - 1;
        }
      }
      if (j * kGroup + kEach * lane() >= columns_) continue;
      store_octet<true>(dz + j * kGroup, round_octet<T>(v[j]), kOctet);
    }
  }
  // A row that has no target.
  __device__ void fill(int64_t row, float value) const {
    if (speaks()) p_.loss[row] = value;
    if (!p_.dlogits) return;
    T* dz = gradient_of(row);
    for (int i = lane(); i < columns_; i += 32) dz[i] = T(value);
  }

  const LossParams& p_;
  State<kShape>& state_;
  Barrier& full_;
  int number_;      // among the warps of the cluster
  int first_;       // group
  int groups_;      // of this warp
  int columns_;     // logits that exist of them
  int row_groups_;  // of the row
};

// A kernel's parameters are numbers, since nvcc cannot name others.
template <class T, int kBlocks, int kWarps, int kGroups>
__global__ void __cluster_dims__(kBlocks) __launch_bounds__(32 * kWarps, 1)
    loss_whole(const __grid_constant__ LossParams p) {
  extern __shared__ float4 memory[];
  constexpr WholeShape kShape{kBlocks, kWarps, kGroups};
  Warp<T, kShape>(p, *reinterpret_cast<State<kShape>*>(memory)).run();
}

// The clusters that the GPU holds at a time.
template <class Kernel>
int64_t resident_clusters(Kernel* kernel, const WholeShape& whole, int64_t shared, int device) {
  if (whole.blocks == 1) return gpu_properties(device).multiprocessors;
  const CudaDeviceGuard guard(device);
  detail::allow_shared(reinterpret_cast<const void*>(kernel), device, shared);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(whole.blocks));
  config.blockDim = dim3(static_cast<unsigned>(whole.threads()));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  cudaLaunchAttribute size{};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {static_cast<unsigned>(whole.blocks), 1, 1};
  config.attrs = &size;
  config.numAttrs = 1;
  int clusters = 0;
  MOIETY_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  return std::max(clusters, 1);
}

// By the most logits of a row. Eight warps have 255 registers a thread, 200 of them for logits.
constexpr WholeShape kShapes[] = {{1, 8, 25}, {2, 8, 25}, {4, 16, 10}, {4, 8, 25}};
constexpr int kShapeCount = std::size(kShapes);

template <class T, int kNumber = 0>
void launch_whole(const LossParams& p, const Stream& stream) {
  constexpr WholeShape kShape = kShapes[kNumber];
  if constexpr (kNumber + 1 < kShapeCount) {
    if (p.vocabulary > kShape.most()) return launch_whole<T, kNumber + 1>(p, stream);
  }
  constexpr int64_t kShared = sizeof(State<kShape>);
  const auto kernel = loss_whole<T, kShape.blocks, kShape.warps, kShape.groups>;
  const int device = stream.device().index;
  const int64_t clusters = per_device<KernelNumbers>(device).of(
      reinterpret_cast<const void*>(kernel), kShape.threads(), kShared,
      [&] { return resident_clusters(kernel, kShape, kShared, device); });
  launch("cross_entropy", kernel,
         {kShape.blocks * std::min(p.rows, clusters), kShape.threads(), kShared}, stream, p);
}

}  // namespace

bool loss_whole_takes(int64_t vocabulary) { return vocabulary <= kShapes[kShapeCount - 1].most(); }

void loss_whole_cuda(const LossParams& p, DType dlogits, const Stream& stream) {
  with_storage(dlogits, [&](auto element) { launch_whole<decltype(element)>(p, stream); });
}

}  // namespace moiety::nn
