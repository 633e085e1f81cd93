#include "moiety/nn/rope.h"

#include <cmath>

#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/nn/element.h"

namespace moiety::nn {

Tensor rope_table(int64_t positions, int64_t head_dim, double theta) {
  MOIETY_CHECK(positions >= 0 && head_dim >= 2 && head_dim % 2 == 0 && theta > 1,
               "rope_table: positions={} head_dim={} theta={}", positions, head_dim, theta);
  const int64_t half = head_dim / 2;
  Tensor table(DType::kFloat32, {positions, 2, half}, "rope table");
  float* out = table.data<float>();
  for (int64_t i = 0; i < half; ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(head_dim);
    const float inverse = 1.0f / static_cast<float>(std::pow(theta, exponent));
    for (int64_t p = 0; p < positions; ++p) {
      const double angle = static_cast<float>(p) * inverse;
      out[p * head_dim + i] = static_cast<float>(std::cos(angle));
      out[p * head_dim + half + i] = static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

void rope(const RopeArgs& a, Stream stream) {
  check_element("rope", a.x_TGNC.dtype());
  check_tensor("rope", "x", a.x_TGNC, a.x_TGNC.dtype(), {-1, -1, -1, -1});
  const int64_t tokens = a.x_TGNC.size(0), head_dim = a.x_TGNC.size(3);
  MOIETY_CHECK(head_dim % 2 == 0 && a.x_TGNC.stride(3) == 1, "rope: x is {}", a.x_TGNC.describe());
  check_tensor("rope", "table", a.table, DType::kFloat32, {-1, 2, head_dim / 2});
  const int64_t limit = a.table.size(0);
  MOIETY_CHECK(a.table.contiguous(), "rope: table is {}", a.table.describe());
  if (a.position_T.defined()) {
    check_tensor("rope", "position", a.position_T, DType::kInt32, {tokens});
    MOIETY_CHECK(a.position_T.contiguous(), "rope: position is {}", a.position_T.describe());
  } else {
    MOIETY_CHECK(a.seq_len >= 1 && a.seq_len <= limit, "rope: seq_len={}, the table has {}",
                 a.seq_len, limit);
  }
  if (on_gpu("rope", a.x_TGNC.dtype(),
             {{"x", a.x_TGNC}, {"table", a.table}, {"position", a.position_T}}, stream)) {
    if constexpr (kCudaBuilt) return rope_cuda(a, stream);
    fail_without_cuda("rope");
  }
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, "rope", {{"tokens", tokens}});
    for (int64_t t = 0; t < a.position_T.numel(); ++t) {
      const int32_t position = a.position_T.data<int32_t>()[t];
      MOIETY_CHECK(position >= 0 && position < limit, "rope: position {} at {}, the table has {}",
                   position, t, limit);
    }
    a.x_TGNC.dtype() == DType::kFloat64 ? rope_ref(a) : rope_cpu(a);
  });
}

}  // namespace moiety::nn
