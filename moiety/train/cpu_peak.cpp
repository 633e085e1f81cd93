#include "moiety/train/cpu_peak.h"

#include <algorithm>
#include <fstream>
#include <unistd.h>

#include "moiety/base/buffer.h"
#include "moiety/base/deadline.h"
#include "moiety/base/rng.h"
#include "moiety/checkpoint/interrupt.h"
#include "moiety/formats/bf16.h"
#include "moiety/gemm/gemm.h"

namespace moiety::train {

double measured_tflops(DType dtype, double seconds) {
  constexpr int64_t kSize = 512;
  const Tensor a(dtype, {kSize, kSize}), b(dtype, {kSize, kSize}), out(dtype, {kSize, kSize});
  for (int64_t i = 0; i < kSize * kSize; ++i) {
    const float x = init_normal(0, 0, i), y = init_normal(0, 1, i);
    if (dtype == DType::kBFloat16) {
      a.data<bf16>()[i] = bf16(x);
      b.data<bf16>()[i] = bf16(y);
    } else {
      a.data<float>()[i] = x;
      b.data<float>()[i] = y;
    }
  }
  gemm::GemmArgs args;
  args.a = a;
  args.b = b;
  args.out = out;
  const Deadline all{Seconds(seconds)};
  double best = 1e9;
  do {
    check_interrupt();
    const Deadline one{Seconds(0)};
    gemm::gemm(args, Stream());
    best = std::min(best, one.elapsed().count());
  } while (!all.expired());
  return 2e-12 * kSize * kSize * kSize / best;
}

double mapped_bytes() {
  std::ifstream statm("/proc/self/statm");
  double size = 0;
  statm >> size;
  return size * double(sysconf(_SC_PAGESIZE));
}

double resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  double size = 0, resident = 0;
  statm >> size >> resident;
  return resident * double(sysconf(_SC_PAGESIZE));
}

double machine_bytes() { return double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE)); }

}  // namespace moiety::train
