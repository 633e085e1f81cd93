// In which layout a GPU routes is decided without one, so it is tested without one.
#include "moiety/moe/router_kernel.h"

#include <gtest/gtest.h>

namespace moiety::moe::detail {
namespace {

TEST(RouterKernel, TheNarrowestLayoutThatHoldsTheExperts) {
  const auto layout = [](int64_t experts) { return choose_block(experts, 4, 4).layout; };
  for (size_t i = 0; i < kRouterLayouts.size(); ++i) {
    EXPECT_EQ(layout(kRouterLayouts[i].experts), kRouterLayouts[i]);
    EXPECT_EQ(layout(i == 0 ? 1 : kRouterLayouts[i - 1].experts + 1), kRouterLayouts[i]);
  }
}

TEST(RouterKernel, ABlockHasAsManyTokensAsSharedMemory) {
  const RouterBlock all = choose_block(64, 260, 300);
  EXPECT_EQ(all.tokens, 64);
  EXPECT_EQ(all.threads(), 512);
  EXPECT_EQ(all.shared_bytes, 260 + 64 * 300);
  // 16 KiB for a token: eight of them are 128 KiB, and the experts' counts fit beside them.
  const RouterBlock most = choose_block(kMaxExperts, 16 << 10, 16 << 10);
  EXPECT_EQ(most.tokens, 8);
  EXPECT_EQ(most.threads(), 256);
  const RouterBlock half = choose_block(kMaxExperts, 16 << 10, 24 << 10);
  EXPECT_EQ(half.tokens, 4);
  EXPECT_EQ(half.threads(), 128);
  EXPECT_EQ(half.shared_bytes, (16 + 4 * 24) << 10);
}

}  // namespace
}  // namespace moiety::moe::detail
