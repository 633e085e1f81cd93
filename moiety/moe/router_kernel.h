// In which layout the router's kernels run on a GPU: a pure choice from a list of all layouts, which
// router_cuda.cu instantiates, so that tests hold it without a GPU. Internal to moiety/moe.
#pragma once

#include <array>
#include <cstdint>

#include "moiety/moe/router_block.h"

namespace moiety::moe::detail {

// A group of lanes has a token; a thread block of so many threads has several tokens at a time.
struct RouterLayout {
  int lanes;
  int64_t experts;  // at most
  int threads;      // at most
  friend constexpr bool operator==(const RouterLayout&, const RouterLayout&) = default;
};
inline constexpr std::array kRouterLayouts = {
    RouterLayout{8, 64, 512},   RouterLayout{16, 128, 1024},        RouterLayout{32, 256, 1024},
    RouterLayout{32, 512, 512}, RouterLayout{32, kMaxExperts, 256},
};

// A thread block and the shared memory that it takes: some bytes, and some for each token.
struct RouterBlock {
  RouterLayout layout;
  int64_t tokens = 0;  // at a time
  int64_t shared_bytes = 0;
  constexpr int threads() const { return static_cast<int>(tokens) * layout.lanes; }
};
constexpr RouterBlock choose_block(int64_t experts, int64_t bytes, int64_t token_bytes) {
  constexpr int64_t kSharedBytes = 200 * 1024;
  size_t i = 0;
  while (kRouterLayouts.at(i).experts < experts) ++i;
  const RouterLayout& layout = kRouterLayouts.at(i);
  int64_t tokens = layout.threads / layout.lanes;
  while (bytes + tokens * token_bytes > kSharedBytes) tokens /= 2;
  return {layout, tokens, bytes + tokens * token_bytes};
}

}  // namespace moiety::moe::detail
