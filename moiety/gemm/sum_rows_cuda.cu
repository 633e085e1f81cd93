// Sums of rows on GPUs: a warp has a token, and its lanes take octets of columns in turns.
#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/gemm/mlp_steps.h"

namespace moiety::gemm {
namespace {

constexpr int kThreads = 256, kTerms = 4;  // kTerms rows are loaded at a time

struct Params {
  const void* rows;
  const int32_t* row_TK;
  void* out;
  uint32_t* status;  // may be null
  int64_t rows_stride, index_stride, out_stride;
  int64_t tokens, topk, columns, limit;
};

// Records the fault of an index if no earlier one is faulty: of all faults the first is kept.
__device__ void record_index(const Params& p, int64_t t, int64_t k) {
  const auto faulty = [&](int64_t i) {
    const int32_t index = p.row_TK[i / p.topk * p.index_stride + i % p.topk];
    return index < -1 || index >= p.limit;
  };
  const int64_t here = t * p.topk + k;
  for (int64_t i = 0; i < here; ++i) {
    if (faulty(i)) return;
  }
  if (p.status[0] == 0) {
    p.status[1] = uint32_t(OperationId::kSumRows);
    p.status[2] = uint32_t(t);
    p.status[3] = uint32_t(p.row_TK[t * p.index_stride + k]);
  }
  p.status[0] |= kFaultIndex;
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) sum_token_rows(const __grid_constant__ Params p) {
  const int64_t t = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (t >= p.tokens) return;
  const int lane = threadIdx.x % 32;
  const int32_t* index = p.row_TK + t * p.index_stride;
  for (int64_t k = 0; p.status && k < p.topk; ++k) {
    if (lane == 0 && (index[k] < -1 || index[k] >= p.limit)) record_index(p, t, k);
  }
  for (int64_t c = lane * kOctet; c < p.columns; c += 32 * kOctet) {
    const int64_t valid = p.columns - c;
    float sum[kOctet] = {};
    bool first = true;
    for (int64_t k0 = 0; k0 < p.topk; k0 += kTerms) {
      Octet<T> term[kTerms];
      bool alive[kTerms];
#pragma unroll
      for (int j = 0; j < kTerms; ++j) {
        const int32_t row = k0 + j < p.topk ? index[k0 + j] : -1;
        alive[j] = row >= 0 && row < p.limit;
        if (!alive[j]) continue;
        const T* from = static_cast<const T*>(p.rows) + row * p.rows_stride + c;
        term[j] = load_octet<kVector>(from, valid);
      }
#pragma unroll
      for (int j = 0; j < kTerms; ++j) {
        if (!alive[j]) continue;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sum[i] = first ? term[j][i] : sum[i] + term[j][i];
        first = false;
      }
    }
    store_octet_global<kVector>(static_cast<T*>(p.out) + t * p.out_stride + c, round_octet<T>(sum),
                                valid);
  }
}

}  // namespace

void sum_rows_cuda(const TensorView& rows_RD, const TensorView& row_TK, const TensorView& out_TD,
                   const TensorView& status, const Stream& stream) {
  const Params p{rows_RD.raw(),           row_TK.data<int32_t>(), out_TD.raw(),
                 status.data<uint32_t>(), rows_RD.stride(0),      row_TK.stride(0),
                 out_TD.stride(0),        out_TD.size(0),         row_TK.size(1),
                 out_TD.size(1),          rows_RD.size(0)};
  const LaunchShape shape{blocks_for(p.tokens, kThreads / 32), kThreads};
  const bool vector = octets_fit({&rows_RD, &out_TD});
  if (out_TD.dtype() == DType::kBFloat16) {
    launch("sum_rows", vector ? sum_token_rows<bf16, true> : sum_token_rows<bf16, false>, shape,
           stream, p);
  } else {
    launch("sum_rows", vector ? sum_token_rows<float, true> : sum_token_rows<float, false>, shape,
           stream, p);
  }
}

}  // namespace moiety::gemm
