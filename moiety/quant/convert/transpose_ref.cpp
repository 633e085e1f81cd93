#include "moiety/formats/e2m1.h"
#include "moiety/quant/convert/transpose_job.h"

namespace moiety::quant {

void transpose_reference(const TransposeJob& job) {
  const auto code = [&](int64_t r, int64_t c) {
    const uint8_t byte = job.in[r * job.in_pitch + (job.fp4 ? c / 2 : c)];
    return job.fp4 ? E2M1::unpack(byte, c % 2) : byte;
  };
  for (int64_t c = 0; c < job.cols; ++c) {
    uint8_t* out = job.out + c * job.out_pitch;
    if (!job.fp4) {
      for (int64_t r = 0; r < job.rows; ++r) out[r] = code(r, c);
      continue;
    }
    for (int64_t i = 0; i < job.out_pitch; ++i) {
      const uint8_t even = 2 * i < job.rows ? code(2 * i, c) : 0;
      const uint8_t odd = 2 * i + 1 < job.rows ? code(2 * i + 1, c) : 0;
      out[i] = E2M1::pack(even, odd);
    }
  }
  for (float* pair : {job.amax, job.tensor_scale}) {
    if (pair) pair[1] = pair[0];
  }
}

}  // namespace moiety::quant
