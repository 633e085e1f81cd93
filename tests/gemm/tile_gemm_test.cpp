// Which kernel a GPU takes for a product is decided without one, so it is tested without one.
#include "moiety/gemm/tile_gemm.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"

namespace moiety::gemm {
namespace {

constexpr int kProcessors = 132;

std::vector<TileKernel> all_kernels() {
  std::vector<TileKernel> out(kBf16TileKernels.begin(), kBf16TileKernels.end());
  out.insert(out.end(), kFp32TileKernels.begin(), kFp32TileKernels.end());
  return out;
}

int64_t count(const std::vector<TileKernel>& kernels, const TileKernel& k) {
  return std::count(kernels.begin(), kernels.end(), k);
}

// visit(product) of every dtype, operation, kind of groups and scales that GPUs take, large and
// small.
template <class Visit>
void for_legal_products(Visit&& visit) {
  static const float scales[1] = {1};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const GemmOp op : {GemmOp::kTN, GemmOp::kNN, GemmOp::kNT}) {
      for (const Ragged ragged : {Ragged::kNone, Ragged::kRows, Ragged::kReduction}) {
        for (const bool scaled : {false, true}) {
          for (const int64_t size : {0, 1, 100, 8192}) {
            if (scaled && op == GemmOp::kNT) continue;
            Product p{.op = op, .dtype = dtype, .ragged = ragged, .m = size, .n = size, .k = size};
            p.groups.capacity = size;
            if (scaled) p.a_scales.data = p.b_scales.data = scales;
            visit(p);
          }
        }
      }
    }
  }
}

TEST(TileGemm, EveryLegalProductHasOneKernel) {
  const std::vector<TileKernel> all = all_kernels();
  for_legal_products([&](const Product& p) {
    const TileKernel kernel = choose_kernel(p, kProcessors);
    EXPECT_EQ(count(all, kernel), 1);
    EXPECT_EQ(kernel.dtype, p.dtype);
    EXPECT_EQ(kernel.op, p.op);
    EXPECT_EQ(kernel.scaled, p.a_scales.data != nullptr);
  });
}

TEST(TileGemm, NoKernelIsInTheListsThatNobodyCalls) {
  std::vector<TileKernel> chosen;
  for_legal_products([&](const Product& p) { chosen.push_back(choose_kernel(p, kProcessors)); });
  for (const TileKernel& k : all_kernels()) {
    EXPECT_GE(count(chosen, k), 1) << name(k.dtype) << ", op " << static_cast<int>(k.op)
                                   << ", scaled " << k.scaled << ", small " << k.small;
  }
}

TEST(TileGemm, SmallTilesWhereLargeOnesLeaveProcessorsIdle) {
  // Tiles of 128 x 64: 16 x 16 of them are fewer than two a processor, 16 x 17 are more.
  Product p{.dtype = DType::kFloat32, .m = 2048, .n = 1024, .k = 64};
  EXPECT_TRUE(choose_kernel(p, kProcessors).small);
  p.n = 1088;
  EXPECT_FALSE(choose_kernel(p, kProcessors).small);
  p.dtype = DType::kBFloat16;
  p.n = 8;
  EXPECT_FALSE(choose_kernel(p, kProcessors).small);
}

TEST(TileGemm, WhatHasNoKernelIsNamed) {
  const auto expect = [](const Product& p, const char* words) {
    try {
      choose_kernel(p, kProcessors);
      FAIL() << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
      EXPECT_STREQ(error.what(), words);
    }
  };
  const float scale = 1;
  expect({.op = GemmOp::kTN, .dtype = DType::kFloat64},
         "gemm: no kernel of a GPU multiplies float64 operands, kTN");
  expect({.op = GemmOp::kNT, .dtype = DType::kBFloat16, .a_scales = {.data = &scale}},
         "gemm: no kernel of a GPU multiplies bfloat16 operands, kNT with block scales");
}

}  // namespace
}  // namespace moiety::gemm
