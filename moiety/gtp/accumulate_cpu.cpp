#include <algorithm>
#include <array>

#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/formats/bf16.h"
#include "moiety/gtp/accumulate_job.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kTile = 1024;       // elements whose sums stay in the nearest cache
constexpr int64_t kGrain = 64 << 10;  // elements of a task

// Adds n elements of a row; chunk j begins at chunks[j].
template <class Wire, class Main>
MOIETY_INLINE void add_row(const Wire* const* chunks, size_t count, bool first, int64_t n,
                           Main* main) {
  std::array<float, kTile> sum;
  for (int64_t at = 0; at < n; at += kTile) {
    const int64_t m = n - at < kTile ? n - at : kTile;
    for (int64_t i = 0; i < m; ++i) sum[i] = static_cast<float>(chunks[0][at + i]);
    for (size_t j = 1; j < count; ++j) {
      const Wire* x = chunks[j] + at;
      for (int64_t i = 0; i < m; ++i) sum[i] = sum[i] + static_cast<float>(x[i]);
    }
    Main* out = main + at;
    if (first) {
      for (int64_t i = 0; i < m; ++i) out[i] = Main(sum[i]);
    } else {
      for (int64_t i = 0; i < m; ++i) out[i] = Main(static_cast<float>(out[i]) + sum[i]);
    }
  }
}

MOIETY_SIMD_CLONES
void add(const float* const* chunks, size_t count, bool first, int64_t n, float* main) {
  add_row(chunks, count, first, n, main);
}
MOIETY_SIMD_CLONES
void add(const bf16* const* chunks, size_t count, bool first, int64_t n, float* main) {
  add_row(chunks, count, first, n, main);
}
MOIETY_SIMD_CLONES
void add(const bf16* const* chunks, size_t count, bool first, int64_t n, bf16* main) {
  add_row(chunks, count, first, n, main);
}

template <class Wire, class Main>
void run(const AccumulateJob& job) {
  const int64_t rows = job.main.size(1), cols = job.main.size(2);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols));
  parallel_for(job.main.size(0) * rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<const Wire*> chunks(job.chunks.size());
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = i / rows, r = i % rows;
      Main* main = row_of<Main>(job.main, e, r);
      if (r >= job.valid_rows) {
        if (job.first) std::fill_n(main, cols, Main(0.0f));
        continue;
      }
      for (size_t j = 0; j < chunks.size(); ++j) chunks[j] = row_of<Wire>(job.chunks[j], e, r);
      add(chunks.data(), chunks.size(), job.first, cols, main);
    }
  });
}

}  // namespace

void accumulate_cpu(const AccumulateJob& job) {
  const bool bf16_wire = job.chunks[0].dtype() == DType::kBFloat16;
  if (job.main.dtype() == DType::kBFloat16) return run<bf16, bf16>(job);
  bf16_wire ? run<bf16, float>(job) : run<float, float>(job);
}

}  // namespace moiety::gtp
