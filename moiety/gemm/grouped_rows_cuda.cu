// Operations beside grouped products on GPUs: faults of the data, gradients of the bias and of its
// scale.
#include "moiety/base/launch.cuh"
#include "moiety/gemm/gemm_block.h"
#include "moiety/gemm/grouped_block.h"
#include "moiety/gemm/grouped_gemm_cuda.h"
#include "moiety/gemm/offsets_scan.h"
#include "moiety/gemm/row_dot.h"
#include "moiety/quant/quantize_group.h"

namespace moiety::gemm {
namespace {

struct GroupList {
  const int64_t* begin;
  const int64_t* count;
  int64_t groups, capacity;

  explicit GroupList(const Groups& g)
      : begin(g.begin_E1.data<int64_t>()),
        count(g.count_E.defined() ? g.count_E.data<int64_t>() : nullptr),
        groups(g.experts),
        capacity(g.capacity) {}
  __device__ quant::Claim claim(int64_t e) const {
    return quant::claim(begin[e], begin[e + 1], count ? count + e : nullptr, capacity);
  }
  // The rows of group e; a faulty group is empty.
  __device__ RowRange rows(int64_t e) const {
    const quant::Claim c = claim(e);
    return c.valid ? RowRange{c.begin, c.rows} : RowRange{};
  }
};

struct Sources {
  const int32_t* source;  // null if there are none
  int64_t count;

  explicit Sources(const GroupedTensor& x)
      : source(x.source_R.defined() ? x.source_R.data<int32_t>() : nullptr),
        count(x.source_R.defined() ? x.data.size(0) : 0) {}
  __device__ bool faulty(int64_t r) const { return source[r] < -1 || source[r] >= count; }
};

constexpr int kFaultThreads = 512;
constexpr long long kNone = 0x7FFFFFFFFFFFFFFF;

// The device's version of record_fault (row_groups.h), for one thread.
__device__ void keep_first(uint32_t* status, uint32_t bit, OperationId operation, int64_t group,
                           int64_t value) {
  if (status[0] == 0) {
    status[1] = static_cast<uint32_t>(operation);
    status[2] = static_cast<uint32_t>(group);
    status[3] = static_cast<uint32_t>(value);
  }
  status[0] |= bit;
}

// Finds the first faulty row of a tensor, group after group, a warp for each. One block.
__global__ void __launch_bounds__(kFaultThreads)
    find_faults(GroupList groups, Sources a, Sources b, OperationId operation, uint32_t* status) {
  __shared__ long long first_group, first[2];
  if (threadIdx.x == 0) first_group = first[0] = first[1] = kNone;
  __syncthreads();
  for (int64_t e = threadIdx.x; e < groups.groups; e += kFaultThreads) {
    if (!groups.claim(e).valid) atomicMin(&first_group, static_cast<long long>(e));
  }
  const int lane = threadIdx.x % 32;
  for (int which = 0; which < 2; ++which) {
    const Sources& x = which ? b : a;
    if (!x.source) continue;
    for (int64_t e = threadIdx.x / 32; e < groups.groups; e += kFaultThreads / 32) {
      const RowRange range = groups.rows(e);
      for (int64_t i = lane; i < range.rows; i += 32) {
        if (!x.faulty(range.begin + i)) continue;
        atomicMin(&first[which], static_cast<long long>(e << 32 | i));
        break;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (first_group != kNone) {
    keep_first(status, kFaultGroup, operation, first_group, groups.claim(first_group).rows);
  }
  for (int which = 0; which < 2; ++which) {
    if (first[which] == kNone) continue;
    const int64_t e = first[which] >> 32, i = first[which] & 0xFFFFFFFF;
    keep_first(status, kFaultIndex, operation, e, (which ? b : a).source[groups.rows(e).begin + i]);
  }
}

template <class T>
__device__ const T* row_of(const ProductOperand& x, int64_t r) {
  if (x.source) {
    r = x.source[r];
    if (r < 0 || r >= x.sources) return nullptr;
  }
  return static_cast<const T*>(x.data) + r * x.stride;
}

constexpr int kBiasRows = 128;  // rows that are summed before the blocks' sums are
constexpr int kBiasColumns = 32, kBiasBlocks = 8;

struct BiasGrad {
  GroupList groups;
  ProductOperand dy;
  const float* scale;
  int64_t columns, pieces;
  void* out;
  DType out_dtype;
  float beta;
  const float* betas;
  int64_t beta_stride;
};

// A block has 32 columns of a group; each of its warps sums a block of rows.
template <class T>
__global__ void __launch_bounds__(kBiasColumns* kBiasBlocks) sum_bias_grad(BiasGrad p) {
  __shared__ float sums[kBiasBlocks][kBiasColumns];
  const int64_t e = blockIdx.x / p.pieces;
  const int64_t c = (blockIdx.x - e * p.pieces) * kBiasColumns + threadIdx.x % kBiasColumns;
  const int warp = threadIdx.x / kBiasColumns;
  const RowRange range = p.groups.rows(e);
  float total = 0;
  for (int64_t base = 0; base < range.rows; base += kBiasRows * kBiasBlocks) {
    const int64_t begin = base + warp * kBiasRows;
    float sum = 0;
    for (int64_t i = begin; i < min(range.rows, begin + kBiasRows); ++i) {
      const int64_t r = range.begin + i;
      const T* row = row_of<T>(p.dy, r);
      const float v = row && c < p.columns ? float(row[c]) : 0.0f;
      sum = p.scale ? fmaf(v, p.scale[r], sum) : __fadd_rn(sum, v);
    }
    sums[warp][threadIdx.x % kBiasColumns] = sum;
    __syncthreads();
    for (int i = 0; i < kBiasBlocks && base + i * kBiasRows < range.rows; ++i) {
      total = __fadd_rn(total, sums[i][threadIdx.x % kBiasColumns]);
    }
    __syncthreads();
  }
  if (warp != 0 || c >= p.columns) return;
  const float beta = p.betas ? p.betas[e * p.beta_stride] : p.beta;
  const int64_t at = e * p.columns + c;
  auto* wide = static_cast<float*>(p.out);
  auto* narrow = static_cast<bf16*>(p.out);
  const bool is_wide = p.out_dtype == DType::kFloat32;
  if (beta != 0) total = fmaf(beta, is_wide ? wide[at] : float(narrow[at]), total);
  if (is_wide) {
    wide[at] = total;
  } else {
    narrow[at] = bf16(total);
  }
}

struct ScaleGrad {
  GroupList groups;
  ProductOperand dy;
  const void* bias;
  int64_t columns;
  float* out;
  bool accumulate;
};
constexpr int kScaleThreads = 256;

// Four threads have a row: the four lanes of the canonical row dot. A block has a group.
template <class T>
__global__ void __launch_bounds__(kScaleThreads) sum_scale_grad(ScaleGrad p) {
  const int64_t e = blockIdx.x;
  const RowRange range = p.groups.rows(e);
  const T* bias = static_cast<const T*>(p.bias) + e * p.columns;
  const int q = threadIdx.x % 4;
  for (int64_t base = 0; base < range.rows; base += kScaleThreads / 4) {
    const int64_t i = base + threadIdx.x / 4;
    const bool live = i < range.rows;
    const T* row = live ? row_of<T>(p.dy, range.begin + i) : nullptr;
    float dot = 0;
    for (int64_t segment = 0; segment < p.columns; segment += kDotSegment) {
      const int64_t n = min(kDotSegment, p.columns - segment);
      float lane = 0;
      for (int64_t c = 2 * q; c < n; c += c % 2 ? 7 : 1) {
        const int64_t at = segment + c;
        lane = fmaf(row ? float(row[at]) : 0.0f, float(bias[at]), lane);
      }
      lane = __fadd_rn(lane, __shfl_xor_sync(~0u, lane, 1));
      lane = __fadd_rn(lane, __shfl_xor_sync(~0u, lane, 2));
      dot = __fadd_rn(dot, lane);
    }
    if (!live || q != 0) continue;
    float& out = p.out[range.begin + i];
    out = p.accumulate ? __fadd_rn(out, dot) : dot;
  }
}

constexpr int kSegmentThreads = 128;

// A thread has a row, `blocks` blocks a group.
__global__ void __launch_bounds__(kSegmentThreads)
    sum_segments(GroupList groups, const float* segments, int64_t count, float* dprob,
                 int64_t blocks) {
  const int64_t e = blockIdx.x / blocks;
  const RowRange range = groups.rows(e);
  for (int64_t i = (blockIdx.x - e * blocks) * kSegmentThreads + threadIdx.x; i < range.rows;
       i += blocks * kSegmentThreads) {
    const float* row = segments + (range.begin + i) * count;
    float sum = 0;
    for (int64_t s = 0; s < count; ++s) sum = __fadd_rn(sum, row[s]);
    dprob[range.begin + i] = sum;
  }
}

}  // namespace

void sum_segments_cuda(const Groups& groups, const float* segments, int64_t count, float* dprob,
                       const Stream& stream) {
  constexpr int64_t kBlocks = 1024;
  const int64_t each = blocks_for(kBlocks, std::max<int64_t>(groups.experts, 1));
  launch("sum segments", sum_segments, {groups.experts * each, kSegmentThreads}, stream,
         GroupList(groups), segments, count, dprob, each);
}

void record_faults_cuda(const Groups& groups, OperationId operation, const GroupedTensor& rows,
                        const GroupedTensor& more, const Stream& stream) {
  if (!groups.status.defined()) return;
  launch("record faults", find_faults, {1, kFaultThreads}, stream, GroupList(groups), Sources(rows),
         Sources(more), operation, groups.status.data<uint32_t>());
}

void grouped_bias_grad_cuda(const GroupedBiasGradArgs& args, const Stream& stream) {
  const TensorView &dy = args.dy.data, &out = args.dbias_EN, &beta = args.beta.per_group;
  record_faults_cuda(args.groups, OperationId::kGroupedBiasGrad, args.dy, {}, stream);
  const BiasGrad p{GroupList(args.groups),
                   block_operand(args.dy),
                   args.scale_R.defined() ? args.scale_R.data<float>() : nullptr,
                   out.size(1),
                   blocks_for(out.size(1), kBiasColumns),
                   out.raw(),
                   out.dtype(),
                   args.beta.value,
                   beta.defined() ? beta.data<float>() : nullptr,
                   beta.numel() == 1 ? 0 : 1};
  const LaunchShape shape{args.groups.experts * p.pieces, kBiasColumns * kBiasBlocks};
  launch("grouped_bias_grad",
         dy.dtype() == DType::kBFloat16 ? sum_bias_grad<bf16> : sum_bias_grad<float>, shape, stream,
         p);
}

void grouped_scale_grad_cuda(const GroupedScaleGradArgs& args, const Stream& stream) {
  record_faults_cuda(args.groups, OperationId::kGroupedBiasGrad, args.dy, {}, stream);
  const ScaleGrad p{GroupList(args.groups), block_operand(args.dy),      args.bias_EN.raw(),
                    args.bias_EN.size(1),   args.dscale_R.data<float>(), args.accumulate};
  const bool half = args.dy.data.dtype() == DType::kBFloat16;
  launch("grouped_scale_grad", half ? sum_scale_grad<bf16> : sum_scale_grad<float>,
         {args.groups.experts, kScaleThreads}, stream, p);
}

}  // namespace moiety::gemm
