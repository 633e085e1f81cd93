// Operations around the products of the router's backward pass: a thread has an octet of a row.
#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/moe/router_cuda.h"

namespace moiety::moe::detail {
namespace {

constexpr int kThreads = 256;
constexpr int kAddThreads =
    32;  // so that few octets with many slices each take many multiprocessors

// The place of a thread in an [E, D] matrix.
struct Place {
  int64_t row, column;

  __device__ explicit Place(int64_t columns) {
    const int64_t octets = (columns + kOctet - 1) / kOctet;
    const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    row = index / octets;
    column = (index - row * octets) * kOctet;
  }
};

LaunchShape shape_for(const TensorView& x_ED, int threads) {
  return {blocks_for(x_ED.size(0) * blocks_for(x_ED.size(1), kOctet), threads), threads};
}

// Where the slices of so many tokens begin.
struct Slices {
  int64_t tokens, count;
  int64_t* begin;
};

template <bool kVector>
__global__ void __launch_bounds__(kThreads)
    stack_rows(const bf16* x, int64_t stride, bf16* out, int64_t rows, int64_t columns,
               const Slices slices) {
  const int64_t each = (slices.tokens + slices.count - 1) / slices.count;
  for (int64_t i = threadIdx.x; blockIdx.x == 0 && i <= slices.count; i += blockDim.x) {
    slices.begin[i] = min(i * each, slices.tokens);
  }
  const Place at(columns);
  if (at.row >= rows) return;
  const int64_t valid = columns - at.column;
  const Octet<bf16> octet = load_octet<kVector>(x + at.row * stride + at.column, valid);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    store_octet<kVector>(out + (i * rows + at.row) * columns + at.column, octet, valid);
  }
}

// kPieces: 3 or, if their sums are one, 1.
template <int kPieces, bool kVector, class T>
__global__ void __launch_bounds__(kAddThreads)
    add_pieces(const float* sums, int64_t slices, T* dw, int64_t stride, float beta, int64_t rows,
               int64_t columns) {
  const Place at(columns);
  if (at.row >= rows) return;
  const int64_t valid = columns - at.column, piece = rows * columns;
  const float* from = sums + at.row * columns + at.column;
  T* to = dw + at.row * stride + at.column;
  float sum[kPieces][kOctet] = {};  // of high, middle and low pieces
  // Slices that wait for memory together; absent ones are +0.
  constexpr int kTogether = kPieces == 1 ? 8 : 4;
  for (int64_t slice = 0; slice < slices; slice += kTogether) {
    Octet<float> x[kTogether][kPieces];
#pragma unroll
    for (int s = 0; s < kTogether; ++s) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        x[s][k] = load_octet<kVector>(from + (kPieces * (slice + s) + k) * piece,
                                      slice + s < slices ? valid : 0);
      }
    }
#pragma unroll
    for (const auto& of_slice : x) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sum[k][i] += of_slice[k][i];
      }
    }
  }
  const Octet<T> old = beta != 0 ? load_octet<kVector>(to, valid) : Octet<T>();
  float v[kOctet];
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    v[i] = sum[kPieces - 1][i];
#pragma unroll
    for (int k = kPieces - 2; k >= 0; --k) v[i] += sum[k][i];
    if (beta != 0) v[i] = fmaf(beta, old[i], v[i]);
  }
  store_octet<kVector>(to, round_octet<T>(v), valid);
}

}  // namespace

void stack_rows_cuda(const TensorView& w_ED, const TensorView& out_3ED, int64_t tokens,
                     const TensorView& begin, const Stream& stream) {
  launch("router_backward: stack",
         octets_fit({&w_ED, &out_3ED}) ? stack_rows<true> : stack_rows<false>,
         shape_for(w_ED, kThreads), stream, w_ED.data<bf16>(), w_ED.stride(0), out_3ED.data<bf16>(),
         w_ED.size(0), w_ED.size(1), Slices{tokens, begin.numel() - 1, begin.data<int64_t>()});
}

void add_pieces_cuda(const TensorView& sums_SPED, int64_t pieces, const TensorView& dw_ED,
                     float beta, const Stream& stream) {
  const bool vector = octets_fit({&sums_SPED, &dw_ED});
  const int64_t slices = sums_SPED.size(0) / (pieces * dw_ED.size(0));
  const auto add = [&]<int kPieces, class T>(T* dw) {
    launch("router_backward: add",
           vector ? add_pieces<kPieces, true, T> : add_pieces<kPieces, false, T>,
           shape_for(dw_ED, kAddThreads), stream, sums_SPED.data<float>(), slices, dw,
           dw_ED.stride(0), beta, dw_ED.size(0), dw_ED.size(1));
  };
  const auto add_to = [&]<class T>(T* dw) {
    pieces == 1 ? add.template operator()<1>(dw) : add.template operator()<3>(dw);
  };
  dw_ED.dtype() == DType::kFloat32 ? add_to(dw_ED.data<float>()) : add_to(dw_ED.data<bf16>());
}

}  // namespace moiety::moe::detail
