#include "moiety/formats/bf16.h"
#include "moiety/gtp/accumulate_job.h"

namespace moiety::gtp {
namespace {

template <class Wire, class Main>
void run(const AccumulateJob& job) {
  for (int64_t e = 0; e < job.main.size(0); ++e) {
    for (int64_t r = 0; r < job.main.size(1); ++r) {
      Main* main = row_of<Main>(job.main, e, r);
      for (int64_t c = 0; c < job.main.size(2); ++c) {
        if (r >= job.valid_rows) {
          if (job.first) main[c] = Main(0.0f);
          continue;
        }
        float x = static_cast<float>(row_of<Wire>(job.chunks[0], e, r)[c]);
        for (size_t j = 1; j < job.chunks.size(); ++j) {
          x = x + static_cast<float>(row_of<Wire>(job.chunks[j], e, r)[c]);
        }
        main[c] = Main(job.first ? x : static_cast<float>(main[c]) + x);
      }
    }
  }
}

}  // namespace

void accumulate_reference(const AccumulateJob& job) {
  const bool bf16_wire = job.chunks[0].dtype() == DType::kBFloat16;
  if (job.main.dtype() == DType::kBFloat16) return run<bf16, bf16>(job);
  bf16_wire ? run<bf16, float>(job) : run<float, float>(job);
}

}  // namespace moiety::gtp
