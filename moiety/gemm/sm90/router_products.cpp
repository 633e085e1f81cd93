#include "moiety/gemm/router_products.h"

#include <algorithm>

#include "moiety/base/integer.h"

namespace moiety::gemm {
namespace {

// Whether the copy engine reads rows of this tensor.
bool has_aligned_rows(const TensorView& x) {
  return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 &&
         byte_size(x.dtype(), x.stride(0)) % 16 == 0;
}

}  // namespace

int64_t router_slices(int64_t tokens, int64_t model) {
  constexpr int64_t kProcessors = 132, kMost = 32;
  constexpr int64_t kFixed = 3;  // the time of a block without tokens, in those of 64 tokens
  const int64_t columns = ceil_div(model, 128), tiles = ceil_div(tokens, 64);
  int64_t best = 1, least = INT64_MAX;
  for (int64_t slices = 1; slices <= std::min(kMost, tiles); ++slices) {
    const int64_t each = ceil_div(tiles, slices);
    const int64_t time = ceil_div(columns * slices, kProcessors) * (each + kFixed);
    if (time < least) {
      least = time;
      best = ceil_div(tiles, each);
    }
  }
  return best;
}

bool takes_router_products(const RouterProducts& p, const GpuProperties& gpu) {
  const int64_t tokens = p.h_TD.size(0), model = p.h_TD.size(1);
  if (gpu.major != 9 || gpu.minor != 0 || router_width(p.w_ED.size(0)) == 0) return false;
  if (p.h_TD.dtype() != DType::kBFloat16 || model % 8 != 0 || tokens <= 0 || model <= 0 ||
      tokens >= int64_t{1} << 30) {
    return false;
  }
  if (p.addend_TD.defined() &&
      (p.addend_TD.dtype() != DType::kFloat32 || !has_aligned_rows(p.addend_TD))) {
    return false;
  }
  if (p.rows_CD.defined() && (p.rows_CD.dtype() != DType::kBFloat16 || p.slot_TK.size(1) > 8 ||
                              !has_aligned_rows(p.rows_CD))) {
    return false;
  }
  return has_aligned_rows(p.h_TD) && has_aligned_rows(p.w_ED) && has_aligned_rows(p.dh_TD);
}

}  // namespace moiety::gemm
