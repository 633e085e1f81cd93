#include "moiety/gtp/interleave.h"

#include <cstring>

#include "moiety/base/check_devices.h"
#include "moiety/base/parallel.h"

namespace moiety::gtp {

void interleave(TensorView parts, TensorView out, Stream stream) {
  const char* op = "gtp interleave";
  check_tensor(op, "parts", parts, DType::kUInt8, {-1, -1, -1, -1});
  const int64_t E = parts.size(0), G = parts.size(1), K = parts.size(2), P = parts.size(3);
  check_tensor(op, "out", out, DType::kUInt8, {E, K, G * P});
  MOIETY_CHECK(parts.contiguous() && out.contiguous(),
               "{}: parts are {}, out is {}, expected no gaps", op, parts.describe(),
               out.describe());
  check_devices(op, {{"parts", parts}, {"out", out}}, stream);
  const auto* from = parts.data<uint8_t>();
  auto* to = out.data<uint8_t>();
  if (out.numel() == 0) return;
  MOIETY_CHECK(from + parts.bytes() <= to || to + out.bytes() <= from, "{}: parts and out overlap",
               op);
  stream.run([=] {
    parallel_for(E * K, std::max<int64_t>(1, 65536 / std::max<int64_t>(1, G * P)),
                 [=](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t e = row / K, k = row % K;
                     for (int64_t g = 0; g < G; ++g) {
                       std::memcpy(to + (row * G + g) * P, from + ((e * G + g) * K + k) * P,
                                   static_cast<size_t>(P));
                     }
                   }
                 });
  });
}

}  // namespace moiety::gtp
