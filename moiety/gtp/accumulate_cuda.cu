#include "moiety/base/launch.cuh"
#include "moiety/formats/bf16.h"
#include "moiety/gtp/accumulate_job.h"

namespace moiety::gtp {
namespace {

constexpr int kThreads = 256;

struct Rows {
  const void* data;
  int64_t member, row;  // strides in elements
};
struct Params {
  Rows chunks[kMostGpuChunks];
  void* main;
  int64_t main_member, main_row;
  int64_t members, rows, cols, valid;
  int count;
  bool first;
};

template <class Wire, class Main>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(const __grid_constant__ Params p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.members * p.rows * p.cols) return;
  const int64_t c = i % p.cols, r = i / p.cols % p.rows, e = i / p.cols / p.rows;
  Main& main = static_cast<Main*>(p.main)[e * p.main_member + r * p.main_row + c];
  if (r >= p.valid) {
    if (p.first) main = Main(0.0f);
    return;
  }
  float sum = 0;
  for (int j = 0; j < p.count; ++j) {
    const Rows& chunk = p.chunks[j];
    const auto* at = static_cast<const Wire*>(chunk.data) + e * chunk.member + r * chunk.row + c;
    const float x = static_cast<float>(*at);
    sum = j == 0 ? x : sum + x;
  }
  main = Main(p.first ? sum : static_cast<float>(main) + sum);
}

template <class Wire, class Main>
void run(const Params& p, const Stream& stream) {
  const int64_t n = p.members * p.rows * p.cols;
  launch("gtp_accumulate", accumulate_kernel<Wire, Main>, {blocks_for(n, kThreads), kThreads},
         stream, p);
}

}  // namespace

void accumulate_cuda(const AccumulateJob& job, const Stream& stream) {
  const TensorView& main = job.main;
  Params p{.chunks = {},
           .main = main.raw(),
           .main_member = main.stride(0),
           .main_row = main.stride(1),
           .members = main.size(0),
           .rows = main.size(1),
           .cols = main.size(2),
           .valid = job.valid_rows,
           .count = static_cast<int>(job.chunks.size()),
           .first = job.first};
  for (int j = 0; j < p.count; ++j) {
    const TensorView& chunk = job.chunks[size_t(j)];
    p.chunks[j] = {chunk.raw(), chunk.stride(0), chunk.stride(1)};
  }
  const bool bf16_wire = job.chunks[0].dtype() == DType::kBFloat16;
  if (main.dtype() == DType::kBFloat16) return run<bf16, bf16>(p, stream);
  bf16_wire ? run<bf16, float>(p, stream) : run<float, float>(p, stream);
}

}  // namespace moiety::gtp
