#include "moiety/checkpoint/digest.h"

#include <algorithm>
#include <atomic>

#include "moiety/base/error.h"
#include "moiety/base/parallel.h"

namespace moiety::checkpoint {

uint64_t digest(const void* data, DType dtype, const Box& box, std::span<const int64_t> shape) {
  MOIETY_CHECK(bits(dtype) >= 8, "digest: elements of {} bits are not supported", bits(dtype));
  const Box all = whole(shape);
  MOIETY_CHECK(contains(all, box), "digest: box {} is outside of {}", describe(box), describe(all));

  const BoxRuns runs(all, box);
  const int64_t length = runs.length();
  const int64_t element_bytes = bits(dtype) / 8;
  const auto* bytes = static_cast<const std::byte*>(data);
  std::atomic<uint64_t> sum = 0;
  parallel_for(runs.count() * length, 1 << 16, [&](int64_t begin, int64_t end) {
    uint64_t part = 0;
    for (int64_t i = begin; i < end;) {
      const int64_t k = i / length, in_run = i % length;
      const int64_t n = std::min(end - i, length - in_run);
      part += digest_run(bytes + i * element_bytes, element_bytes, n,
                         static_cast<uint64_t>(runs.outer_offset(k) + in_run));
      i += n;
    }
    sum.fetch_add(part, std::memory_order_relaxed);
  });
  return sum;
}

}  // namespace moiety::checkpoint
