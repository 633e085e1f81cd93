// A thread adds an octet of a row.
#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/gtp/accumulate_job.h"

namespace moiety::gtp {
namespace {

constexpr int kThreads = 256;

struct Rows {
  void* data;
  int64_t member_stride, stride;
};
Rows rows_of(const TensorView& x) { return {x.raw(), x.stride(0), x.stride(1)}; }

template <class T>
__device__ T* octet_at(const Rows& x, int64_t member, int64_t row, int64_t column) {
  return static_cast<T*>(x.data) + member * x.member_stride + row * x.stride + column;
}

struct Params {
  Rows chunk, main;
  int64_t rows, cols, octets, valid_rows, count;  // octets of a row; of all rows
  bool first;
};

template <class Wire, class Main, bool kVector>
__global__ void __launch_bounds__(kThreads) add_octets(const __grid_constant__ Params p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.count) return;
  const int64_t row = i / p.octets % p.rows, member = i / p.octets / p.rows;
  const int64_t column = i % p.octets * kOctet, valid = p.cols - column;
  Main* const main = octet_at<Main>(p.main, member, row, column);
  if (row >= p.valid_rows) {
    if (p.first) store_octet<kVector>(main, Octet<Main>{}, valid);
    return;
  }
  const auto x = load_octet<kVector>(octet_at<const Wire>(p.chunk, member, row, column), valid);
  Octet<Main> before;
  if (!p.first) before = load_octet<kVector>(main, valid);
  float sum[kOctet];
#pragma unroll
  for (int k = 0; k < kOctet; ++k) sum[k] = p.first ? x[k] : before[k] + x[k];
  store_octet<kVector>(main, round_octet<Main>(sum), valid);
}

template <class Wire, class Main>
void run(const AccumulateJob& job, const Stream& stream) {
  const TensorView &chunk = job.chunks[0], &main = job.main;
  const int64_t rows = main.size(1), octets = blocks_for(main.size(2), kOctet);
  const int64_t count = main.size(0) * rows * octets;
  const Params p{rows_of(chunk), rows_of(main),  rows,  main.size(2),
                 octets,         job.valid_rows, count, job.first};
  launch("gtp_accumulate",
         octets_fit({&chunk, &main}) ? add_octets<Wire, Main, true> : add_octets<Wire, Main, false>,
         {blocks_for(count, kThreads), kThreads}, stream, p);
}

}  // namespace

void accumulate_cuda(const AccumulateJob& job, const Stream& stream) {
  if (job.chunks.size() > 1) {
    fail(ErrorKind::kUnsupported, "gtp accumulate: gradients of {} ranks on {}, only one has them",
         job.chunks.size(), name(stream.device()));
  }
  const bool bf16_wire = job.chunks[0].dtype() == DType::kBFloat16;
  if (job.main.dtype() == DType::kBFloat16) return run<bf16, bf16>(job, stream);
  bf16_wire ? run<bf16, float>(job, stream) : run<float, float>(job, stream);
}

}  // namespace moiety::gtp
