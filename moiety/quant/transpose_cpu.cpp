// Panels of 128 x 128 codes through registers.
#include <algorithm>
#include <vector>

#include "moiety/base/parallel.h"
#include "moiety/formats/e2m1.h"
#include "moiety/quant/byte_transpose.h"
#include "moiety/quant/transpose_job.h"

namespace moiety::quant {
namespace {

constexpr int64_t kPanel = 128;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of a panel, rows of `width` bytes; ragged panels are copied and filled up with zeros.
struct Source {
  const uint8_t* at;
  int64_t pitch;
  alignas(64) uint8_t copy[kPanel * kPanel];

  MOIETY_INLINE void load(const uint8_t* in, int64_t in_pitch, int64_t rows, int64_t bytes,
                          int64_t width) {
    at = in;
    pitch = in_pitch;
    if (rows == kPanel && bytes == width) return;
    std::memset(copy, 0, sizeof copy);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(copy + r * width, in + r * in_pitch, static_cast<size_t>(bytes));
    }
    at = copy;
    pitch = width;
  }
};

// in [128, 128] bytes, out rows of `bytes` bytes for the first `rows` of them.
MOIETY_INLINE void turn(const uint8_t* in, int64_t in_pitch, int64_t in_cols, int64_t rows,
                        int64_t bytes, int64_t width, uint8_t* out, int64_t out_pitch) {
  if (rows == in_cols && bytes == width) {
    transpose_bytes(in, in_pitch, width, in_cols, out, out_pitch);
    return;
  }
  alignas(64) uint8_t turned[kPanel * kPanel];
  transpose_bytes(in, in_pitch, width, in_cols, turned, width);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(out + r * out_pitch, turned + r * width, static_cast<size_t>(bytes));
  }
}

MOIETY_INLINE void turn_bytes(const TransposeJob& job, int64_t r0, int64_t c0) {
  const int64_t rows = std::min(kPanel, job.rows - r0), cols = std::min(kPanel, job.cols - c0);
  Source in;
  in.load(job.in + r0 * job.in_pitch + c0, job.in_pitch, rows, cols, kPanel);
  turn(in.at, in.pitch, kPanel, cols, rows, kPanel, job.out + c0 * job.out_pitch + r0,
       job.out_pitch);
}

// Codes of two rows and two columns share two bytes on either side.
MOIETY_INLINE void turn_nibbles(const TransposeJob& job, int64_t r0, int64_t c0) {
  constexpr int64_t kHalf = kPanel / 2;
  const int64_t rows = std::min(kPanel, job.rows - r0), cols = std::min(kPanel, job.cols - c0);
  Source in;
  in.load(job.in + r0 * job.in_pitch + c0 / 2, job.in_pitch, rows, (cols + 1) / 2, kHalf);
  alignas(64) uint8_t even[kHalf * kHalf], odd[kHalf * kHalf];
  for (int64_t r = 0; r < kHalf; ++r) {
    const uint8_t* upper = in.at + 2 * r * in.pitch;
    const uint8_t* lower = upper + in.pitch;
    for (int64_t i = 0; i < kHalf; ++i) {
      even[r * kHalf + i] = E2M1::pack(upper[i] & 15, lower[i] & 15);
      odd[r * kHalf + i] = E2M1::pack(upper[i] >> 4, lower[i] >> 4);
    }
  }
  uint8_t* out = job.out + c0 * job.out_pitch + r0 / 2;
  const int64_t bytes = std::min(kHalf, job.out_pitch - r0 / 2);
  turn(even, kHalf, kHalf, (cols + 1) / 2, bytes, kHalf, out, 2 * job.out_pitch);
  turn(odd, kHalf, kHalf, cols / 2, bytes, kHalf, out + job.out_pitch, 2 * job.out_pitch);
}

// Rows [r0, r0 + 128).
MOIETY_SIMD_CLONES void turn_rows(const TransposeJob& job, int64_t r0) {
  for (int64_t c0 = 0; c0 < job.cols; c0 += kPanel) {
    job.fp4 ? turn_nibbles(job, r0, c0) : turn_bytes(job, r0, c0);
  }
}

}  // namespace

void transpose_cpu(std::span<const TransposeJob> jobs) {
  thread_local std::vector<int64_t> ends_memory;
  std::vector<int64_t>& ends = ends_memory;  // the threads below read that of this one
  ends.clear();
  int64_t total = 0;
  for (const TransposeJob& job : jobs) ends.push_back(total += ceil_div(job.rows, kPanel));
  parallel_tasks(total, [&](int64_t i) {
    const auto j =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), i) - ends.begin());
    turn_rows(jobs[j], (i - (j ? ends[j - 1] : 0)) * kPanel);
  });
  for (const TransposeJob& job : jobs) {
    for (float* pair : {job.amax, job.tensor_scale}) {
      if (pair) pair[1] = pair[0];
    }
  }
}

}  // namespace moiety::quant
