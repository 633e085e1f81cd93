// Products of experts with the activation beside them, on Hopper: F1 with F2, and B1 with B2, in
// one launch each. Internal to moiety/gemm.
//
// Who multiplies hands the rows of a tile, rounded, to warps that compute its activation while the
// next tile is multiplied, or keeps them and computes it beside that tile's products. A forward tile
// has columns of the activated half and the same ones of the linear half, so H keeps its order, and
// the weights theirs. Bits are those of the separate operations.
#pragma once

#include <optional>
#include <string>

#include "moiety/gemm/activation_block.h"
#include "moiety/gemm/row_dot.h"
#include "moiety/gemm/sm90/grouped_sm90.h"

namespace moiety::gemm::sm90 {

// How a product and its activation are computed: a pure choice. Blocks work in pairs that share parts
// of the matrix (pairs.cuh) where rows lie in order; those that gather wait for each other, which is a
// gain in tiles of 256 columns alone, and not everywhere.
struct FusedKernel {
  int columns;  // of a tile; its rows are 128
  bool pairs;
  friend constexpr bool operator==(const FusedKernel&, const FusedKernel&) = default;
};
inline constexpr int kHeldColumns = 256;  // of a tile whose rows wait (fused_held.cuh)
// `gated`: H has two halves.
FusedKernel choose_fused(const Product& product, bool gated);

// Segments of the canonical row dot in a row of `ffn` columns.
MOIETY_HD inline int64_t segment_count(int64_t ffn) {
  return (ffn + kDotSegment - 1) / kDotSegment;
}

struct FusedActivation {
  ActivationBlock block;      // describes all rows; dprob is not used
  float* segments = nullptr;  // backward, optional: [capacity, segment_count(ffn)], of dprob
};

// The reason why the kernel cannot take the product, which grouped_sm90.h's take, with this activation;
// none if it can.
std::optional<std::string> fused_refusal(const TileGemm& g, const FusedActivation& activation);

}  // namespace moiety::gemm::sm90
