// Transposes of codes on CPUs: panels of 128 x 128 codes go through registers, four to a band.
#include <algorithm>
#include <vector>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/quant/convert/byte_transpose.h"
#include "moiety/quant/convert/transpose_job.h"
#include "moiety/quant/quantize/stream_bytes.h"

namespace moiety::quant {
namespace {

constexpr int64_t kPanel = 128, kBandRows = 512;

// Rows [r0, r0 + 512) of columns [c0, c0 + 128), a panel after the other. They become long rows, of
// which each is written at once: a row of the output is a page or more away from the next.
class Band {
 public:
  explicit Band(const TransposeJob& job)
      : job_(job), per_byte_(job.fp4 ? 2 : 1), writer_(job.cols * job.out_pitch) {}

  MOIETY_INLINE void turn(int64_t r0, int64_t c0) {
    const int64_t rows = std::min(kBandRows, job_.rows - r0);
    const int64_t cols = std::min(kPanel, job_.cols - c0);
    for (int64_t r = 0; r < rows; r += kPanel) {
      turn_panel(r0 + r, c0, std::min(kPanel, rows - r), cols, turned_ + r / per_byte_);
    }
    uint8_t* out = job_.out + c0 * job_.out_pitch + r0 / per_byte_;
    const int64_t bytes = job_.fp4 ? std::min(kBandRows / 2, job_.out_pitch - r0 / 2) : rows;
    for (int64_t c = 0; c < cols; ++c) {
      writer_.write(out + c * job_.out_pitch, turned_ + c * kPitch, bytes);
    }
  }

 private:
  // Pitch that keeps rows apart from each other in the cache.
  static constexpr int64_t kPitch = kBandRows + 64;

  // Turns a panel; ragged ones are copied and filled up with zeros.
  MOIETY_INLINE void turn_panel(int64_t r0, int64_t c0, int64_t rows, int64_t cols, uint8_t* out) {
    const uint8_t* in = job_.in + r0 * job_.in_pitch + c0 / per_byte_;
    int64_t pitch = job_.in_pitch;
    if (rows < kPanel || cols < kPanel) {
      const int64_t width = kPanel / per_byte_, bytes = ceil_div(cols, per_byte_);
      std::memset(copy_, 0, sizeof copy_);
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(copy_ + r * width, in + r * pitch, static_cast<size_t>(bytes));
      }
      in = copy_;
      pitch = width;
    }
    if (job_.fp4) {
      transpose_nibbles(in, pitch, kPanel, kPanel, out, kPitch);
    } else {
      transpose_bytes(in, pitch, kPanel, kPanel, out, kPitch);
    }
  }

  const TransposeJob& job_;
  const int per_byte_;
  ByteWriter writer_;
  alignas(64) uint8_t copy_[kPanel * kPanel];
  alignas(64) uint8_t turned_[kPanel * kPitch];
};

// Turns rows [r0, r0 + 512).
MOIETY_SIMD_CLONES void turn_rows(const TransposeJob& job, int64_t r0) {
  Band band(job);
  for (int64_t c0 = 0; c0 < job.cols; c0 += kPanel) band.turn(r0, c0);
  ByteWriter::finish();
}

}  // namespace

void transpose_cpu(std::span<const TransposeJob> jobs) {
  thread_local std::vector<int64_t> ends_memory;
  std::vector<int64_t>& ends = ends_memory;  // the worker threads read the vector of this thread
  ends.clear();
  int64_t total = 0;
  for (const TransposeJob& job : jobs) ends.push_back(total += ceil_div(job.rows, kBandRows));
  parallel_tasks(total, [&](int64_t i) {
    const auto j =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), i) - ends.begin());
    turn_rows(jobs[j], (i - (j ? ends[j - 1] : 0)) * kBandRows);
  });
  for (const TransposeJob& job : jobs) {
    for (float* pair : {job.amax, job.tensor_scale}) {
      if (pair) pair[1] = pair[0];
    }
  }
}

}  // namespace moiety::quant
