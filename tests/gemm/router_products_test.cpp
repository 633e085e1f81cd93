#include "moiety/gemm/router_products.h"

#include <gtest/gtest.h>

#include "moiety/base/integer.h"

namespace moiety::gemm {
namespace {

TEST(RouterProducts, APieceHasColumnsForItsExperts) {
  EXPECT_EQ(router_width(1), 64);
  EXPECT_EQ(router_width(64), 64);
  EXPECT_EQ(router_width(65), 128);
  EXPECT_EQ(router_width(128), 128);
  EXPECT_EQ(router_width(129), 0);
}

// No slice is without tokens, and blocks are about as many as multiprocessors, or several times.
TEST(RouterProducts, SlicesFillALargeGpu) {
  EXPECT_EQ(router_slices(8192, 2048), 8);  // 16 columns of blocks
  EXPECT_EQ(router_slices(24576, 1536), 11);
  EXPECT_EQ(router_slices(0, 2048), 1);
  for (const int64_t tokens : {1, 63, 64, 65, 1000, 4096, 8192, 100000}) {
    for (const int64_t model : {8, 128, 136, 1024, 2880, 7168}) {
      const int64_t slices = router_slices(tokens, model), tiles = ceil_div(tokens, 64);
      const int64_t each = ceil_div(tiles, slices);
      EXPECT_EQ(ceil_div(tiles, each), slices) << tokens << " tokens, D " << model;
      const int64_t blocks = slices * ceil_div(model, 128);
      EXPECT_TRUE(tiles < 132 || model < 1024 || blocks >= 96) << tokens << " tokens, D " << model;
    }
  }
}

// What the kernels refuse goes to products of their own.
TEST(RouterProducts, TakeWhatTheCopyEngineReads) {
  alignas(16) static std::byte memory[64];
  const auto tensor = [&](DType dtype, int64_t rows, int64_t columns, int64_t shift = 0) {
    return TensorView(memory + shift, dtype, {rows, columns});
  };
  const DType half = DType::kBFloat16, single = DType::kFloat32;
  const RouterProducts good{.pieces_TX = {},
                            .h_TD = tensor(half, 100, 256),
                            .w_ED = tensor(half, 128, 256),
                            .addend_TD = tensor(single, 100, 256),
                            .dh_TD = tensor(half, 100, 256),
                            .sums_SED = {}};
  GpuProperties hopper;
  hopper.major = 9;
  GpuProperties other = hopper;
  other.major = 10;
  EXPECT_TRUE(takes_router_products(good, hopper));
  EXPECT_FALSE(takes_router_products(good, other));
  const auto takes = [&](auto&& change) {
    RouterProducts p = good;
    change(p);
    return takes_router_products(p, hopper);
  };
  EXPECT_TRUE(takes([](auto& p) { p.addend_TD = {}; }));
  EXPECT_FALSE(takes([&](auto& p) { p.addend_TD = tensor(half, 100, 256); }));
  EXPECT_FALSE(takes([&](auto& p) { p.w_ED = tensor(half, 129, 256); }));
  EXPECT_FALSE(takes([&](auto& p) { p.h_TD = tensor(half, 100, 256, 8); }));
  EXPECT_FALSE(takes([&](auto& p) { p.h_TD = tensor(single, 100, 256); }));
  EXPECT_FALSE(takes([&](auto& p) { p.h_TD = tensor(half, 100, 60); }));
  const auto slots = [&](int64_t topk) {
    return takes([&](auto& p) {
      p.addend_TD = {};
      p.rows_CD = tensor(half, 800, 256);
      p.slot_TK = tensor(DType::kInt32, 100, topk);
    });
  };
  EXPECT_TRUE(slots(8));
  EXPECT_FALSE(slots(9));
}

}  // namespace
}  // namespace moiety::gemm
