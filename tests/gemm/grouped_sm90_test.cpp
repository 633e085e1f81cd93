// Whether Hopper's kernels take a product, and which one, is decided without a GPU.
#include "moiety/gemm/sm90/grouped_sm90.h"

#include <gtest/gtest.h>

#include "moiety/gemm/sm90/fused.h"

namespace moiety::gemm::sm90 {
namespace {

GpuProperties of_capability(int major, int minor) {
  GpuProperties gpu;
  gpu.major = major;
  gpu.minor = minor;
  return gpu;
}

// Aligned memory that nobody reads.
void* at(int64_t bytes) { return reinterpret_cast<void*>((int64_t{1} << 20) + bytes); }

// kTN and kNN: rows of `a` belong to groups; kNT: the reduction does.
TileGemm product(GemmOp op) {
  TileGemm g;
  g.op = op;
  g.dtype = DType::kBFloat16;
  g.ragged = op == GemmOp::kNT ? Ragged::kReduction : Ragged::kRows;
  g.groups = {.groups = 4, .capacity = 1000};
  g.m = op == GemmOp::kNT ? 256 : 0;
  g.n = 512;
  g.k = op == GemmOp::kNT ? 0 : 256;
  g.a = {at(0), 256};
  g.b = {at(0), op == GemmOp::kTN ? 256 : 512};
  g.epilogue.out = at(0);
  g.epilogue.out_stride = 512;
  g.group_stride = 256 * 512;
  return g;
}

constexpr GemmOp kOps[] = {GemmOp::kTN, GemmOp::kNN, GemmOp::kNT};

std::string refused(const TileGemm& g, const GpuProperties& gpu = of_capability(9, 0)) {
  return refusal(g, gpu).value_or("");
}

TEST(GroupedSm90, TakesAlignedProductsOfBfloat16) {
  for (const GemmOp op : kOps) {
    EXPECT_EQ(refused(product(op)), "") << int(op);
    TileGemm indexed = product(op);
    indexed.indexed = true;
    for (int64_t e = 0; e < indexed.groups.groups; ++e) indexed.pointers[e] = at(4096 - 16 * e);
    EXPECT_EQ(refused(indexed), "") << int(op);
  }
}

TEST(GroupedSm90, SaysWhyItTakesNoOther) {
  const auto expect = [](GemmOp op, const std::string& why, auto&& change) {
    TileGemm g = product(op);
    change(g);
    EXPECT_EQ(refused(g), why);
  };
  EXPECT_EQ(refused(product(GemmOp::kTN), of_capability(10, 0)), "capability 10.0 is not 9.0");
  EXPECT_EQ(refused(product(GemmOp::kTN), of_capability(8, 9)), "capability 8.9 is not 9.0");
  for (const GemmOp op : kOps) {
    expect(op, "dtype float32 is not bfloat16", [](TileGemm& g) { g.dtype = DType::kFloat32; });
    expect(op, "operands are transposed, or not grouped",
           [](TileGemm& g) { g.ragged = Ragged::kNone; });
    expect(op, "operands have block scales", [](TileGemm& g) {
      static const float scale = 1;
      g.a_scales.data = &scale;
    });
    expect(op, "0 rows are not in [1, 1073741824)", [](TileGemm& g) { g.groups.capacity = 0; });
    expect(op, "a matrix is empty", [](TileGemm& g) { g.n = 0; });
    expect(op, "a is not at a multiple of 16 bytes", [](TileGemm& g) { g.a.data = at(8); });
    expect(op, "a has strides of 514 bytes, not of a multiple of 16",
           [](TileGemm& g) { g.a.stride = 257; });
  }
  expect(GemmOp::kTN, "w is not at a multiple of 16 bytes", [](TileGemm& g) { g.b.data = at(2); });
  expect(GemmOp::kNN, "w has strides of 20 bytes, not of a multiple of 16",
         [](TileGemm& g) { g.group_stride = 10; });
  expect(GemmOp::kTN, "out has strides of 1026 bytes, not of a multiple of 16", [](TileGemm& g) {
    g.epilogue.out_dtype = DType::kBFloat16;
    g.epilogue.out_stride = 513;
  });
  expect(GemmOp::kNT, "out has strides of 2052 bytes, not of a multiple of 16",
         [](TileGemm& g) { g.epilogue.out_stride = 513; });
  expect(GemmOp::kNN, "c is not at a multiple of 16 bytes", [](TileGemm& g) {
    g.epilogue.beta.value = 1;
    g.epilogue.old = at(4);
    g.epilogue.old_stride = 512;
  });
  expect(GemmOp::kNT, "a weight gradient is added to another tensor", [](TileGemm& g) {
    g.epilogue.beta.value = 1;
    g.epilogue.old = at(512);
  });
  expect(GemmOp::kNT, "b is not at a multiple of 16 bytes", [](TileGemm& g) { g.b.data = at(4); });
  expect(GemmOp::kNT, "rows of both operands are gathered", [](TileGemm& g) {
    static const int32_t source = 0;
    g.a.source = g.b.source = &source;
  });
  expect(GemmOp::kTN, "34359738368 gathered rows have more than 64 GiB", [](TileGemm& g) {
    static const int32_t source = 0;
    g.a.source = &source;
    g.a.sources = int64_t{1} << 35;
  });
}

TEST(GroupedSm90, FusesWhatIsStoredAsItIsMultiplied) {
  const auto why = [](auto&& change) {
    TileGemm g = product(GemmOp::kTN);
    g.epilogue.out_dtype = DType::kBFloat16;
    FusedActivation f;
    f.block.activation = swiglu();
    f.block.ffn = 256;
    f.block.h = f.block.a = at(0);
    f.block.h_stride = 512;
    f.block.a_stride = 256;
    change(g, f.block);
    return fused_refusal(g, f).value_or("");
  };
  EXPECT_EQ(why([](TileGemm&, ActivationBlock&) {}), "");
  EXPECT_EQ(why([](TileGemm& g, auto&) { g.epilogue.out_dtype = DType::kFloat32; }),
            "the product has no rows of bfloat16");
  EXPECT_EQ(why([](TileGemm& g, auto&) { g.epilogue.alpha.value = 2; }), "the product is scaled");
  EXPECT_EQ(why([](TileGemm& g, auto&) { g.epilogue.beta.value = 1; }), "the product is added to");
  EXPECT_EQ(why([](TileGemm&, ActivationBlock& b) { b.interleave = 8; }), "interleave 8 is not 0");
  EXPECT_EQ(why([](TileGemm&, ActivationBlock& b) { b.ffn = 252; }), "F=252 is no multiple of 8");
  EXPECT_EQ(why([](TileGemm&, ActivationBlock& b) { b.a_stride = 257; }),
            "a has strides of 514 bytes, not of a multiple of 16");
}

TEST(GroupedSm90, BlocksWorkInPairsWhereRowsLieInOrder) {
  static const int32_t source = 0;
  const auto chosen = [](int64_t n, const int32_t* gathered, int64_t sm_limit) {
    TileGemm g = product(GemmOp::kNN);
    g.n = n;
    g.a.source = gathered;
    g.sm_limit = sm_limit;
    return sm90::choose_fused(g, true);
  };
  EXPECT_EQ(chosen(768, nullptr, 0), (FusedKernel{192, true}));
  EXPECT_EQ(chosen(2880, nullptr, 0), (FusedKernel{192, true}));
  EXPECT_EQ(chosen(256, nullptr, 0), (FusedKernel{128, false}));
  EXPECT_EQ(chosen(768, &source, 0), (FusedKernel{192, false}));
  EXPECT_EQ(chosen(768, nullptr, 1), (FusedKernel{192, false}));
}

TEST(GroupedSm90, RowsOfGatedActivationsWaitWhereTilesOf256ColumnsAreFullAndLong) {
  static const int32_t source = 0;
  const auto columns = [](int64_t n, int64_t k, bool gated = true) {
    TileGemm g = product(GemmOp::kTN);
    g.n = n;
    g.k = k;
    g.a.source = &source;
    return sm90::choose_fused(g, gated).columns;
  };
  EXPECT_EQ(columns(512, 1536), 256);
  EXPECT_EQ(columns(1536, 2048), 256);
  EXPECT_EQ(columns(28672, 4096), 256);
  EXPECT_EQ(columns(512, 1024), 128);
  EXPECT_EQ(columns(5760, 2880), 192);  // half of the last tile would be in vain
  EXPECT_EQ(columns(1536, 2048, false), 192);
}

TEST(GroupedSm90, WaitingRowsTakePairsInOrderAndGatheredWhereGroupsHaveManyRows) {
  static const int32_t source = 0;
  const auto pairs = [](const int32_t* gathered, int64_t rows, int64_t k, int sm_limit = 0) {
    TileGemm g = product(GemmOp::kTN);
    g.n = 1536;
    g.k = k;
    g.a.source = gathered;
    g.groups.capacity = rows * g.groups.groups;
    g.sm_limit = sm_limit;
    const FusedKernel kernel = sm90::choose_fused(g, true);
    EXPECT_EQ(kernel.columns, gathered || sm_limit != 1 ? 256 : 192);
    return kernel.pairs;
  };
  EXPECT_TRUE(pairs(nullptr, 512, 1536));
  EXPECT_FALSE(pairs(nullptr, 512, 1536, 1));
  EXPECT_TRUE(pairs(&source, 1024, 2048));
  EXPECT_FALSE(pairs(&source, 1024, 2048, 1));
  EXPECT_FALSE(pairs(&source, 512, 2048));
  EXPECT_FALSE(pairs(&source, 1024, 1536));
}

TEST(GroupedSm90, ChoosesTheTileThatComputesFewestColumnsInVain) {
  const auto columns = [](int64_t n) {
    TileGemm g = product(GemmOp::kTN);
    g.n = n;
    return sm90::choose_kernel(g, 132).columns;
  };
  EXPECT_EQ(columns(8), 128);
  EXPECT_EQ(columns(128), 128);
  EXPECT_EQ(columns(192), 192);
  EXPECT_EQ(columns(256), 256);
  EXPECT_EQ(columns(768), 256);
  EXPECT_EQ(columns(1536), 256);
  EXPECT_EQ(columns(2880), 192);
  EXPECT_EQ(columns(5760), 256);
  EXPECT_EQ(columns(7168), 256);
}

TEST(GroupedSm90, KnowsWhichRowsAreGathered) {
  static const int32_t source = 0;
  TileGemm g = product(GemmOp::kNT);
  EXPECT_EQ(sm90::choose_kernel(g, 132).gathered, Gathered::kNone);
  g.b.source = &source;
  EXPECT_TRUE(sm90::choose_kernel(g, 132).transposed);
  g.epilogue.beta.value = 1;
  EXPECT_EQ(sm90::choose_kernel(g, 132), (Kernel{GemmOp::kNT, 128, Gathered::kB}));
  g.b.source = nullptr;
  g.a.source = &source;
  EXPECT_EQ(sm90::choose_kernel(g, 132), (Kernel{GemmOp::kNT, 256, Gathered::kA}));
}

TEST(GroupedSm90, LongProductsOfManyRowsTakePairs) {
  static const int32_t source = 0;
  const auto pairs = [](GemmOp op, int64_t rows, int64_t k, int64_t n, const int32_t* rows_from,
                        int64_t multiprocessors = 132) {
    TileGemm g = product(op);
    g.groups.capacity = rows * g.groups.groups;
    g.k = k;
    g.n = n;
    g.a.source = rows_from;
    return sm90::choose_kernel(g, multiprocessors).pairs;
  };
  EXPECT_TRUE(pairs(GemmOp::kTN, 2048, 4096, 2048, &source));
  EXPECT_TRUE(pairs(GemmOp::kNN, 1024, 7168, 2048, &source));
  EXPECT_TRUE(pairs(GemmOp::kNN, 2048, 4096, 4096, &source));
  EXPECT_FALSE(pairs(GemmOp::kTN, 2048, 4096, 2048, nullptr));
  EXPECT_FALSE(pairs(GemmOp::kNN, 2048, 4096, 4096, nullptr));
  EXPECT_FALSE(pairs(GemmOp::kNN, 1023, 4096, 4096, &source));
  EXPECT_FALSE(pairs(GemmOp::kNN, 2048, 1536, 4096, &source));
  EXPECT_FALSE(pairs(GemmOp::kNN, 2048, 4096, 14336, &source));
  EXPECT_FALSE(pairs(GemmOp::kNN, 2048, 2880, 2880, &source));  // tiles of 192 columns
  EXPECT_FALSE(pairs(GemmOp::kNN, 2048, 4096, 4096, &source, 1));
}

TEST(GroupedSm90, GroupsOfFewRowsExchangeOperands) {
  const auto exchanged = [](GemmOp op, int64_t rows, int64_t k, int64_t n, auto&& change,
                            int64_t multiprocessors = 132) {
    TileGemm g = product(op);
    g.groups = {.groups = 32, .capacity = rows * 32};
    g.k = k;
    g.n = n;
    g.epilogue.out_dtype = DType::kBFloat16;
    g.epilogue.beta.value = 0;
    change(g);
    const Kernel kernel = sm90::choose_kernel(g, multiprocessors);
    const auto gathered = g.a.source ? Gathered::kA : Gathered::kNone;
    EXPECT_TRUE(!kernel.exchanged || kernel == exchanged_kernel(op, gathered));
    return kernel.exchanged;
  };
  const auto as_it_is = [](TileGemm&) {};
  for (const GemmOp op : {GemmOp::kTN, GemmOp::kNN}) {
    EXPECT_TRUE(exchanged(op, 256, 4096, 7168, as_it_is));
    EXPECT_TRUE(exchanged(op, 512, 1536, 2048, as_it_is));
    EXPECT_TRUE(exchanged(op, 128, 2048, 1536, as_it_is));
    EXPECT_TRUE(exchanged(op, 512, 768, 2048, as_it_is));
    EXPECT_FALSE(exchanged(op, 512, 512, 2048, as_it_is));
    EXPECT_FALSE(exchanged(op, 64, 4096, 7168, as_it_is));
    EXPECT_FALSE(exchanged(op, 768, 4096, 7168, as_it_is));
    EXPECT_FALSE(exchanged(op, 512, 2880, 2880, as_it_is));  // tiles of 192 columns
    EXPECT_FALSE(exchanged(op, 512, 2048, 2048, as_it_is, 1));
    EXPECT_FALSE(exchanged(op, 512, 2048, 2048, [](TileGemm& g) { g.epilogue.beta.value = 1; }));
    EXPECT_FALSE(exchanged(op, 512, 2048, 2048,
                           [](TileGemm& g) { g.epilogue.out_dtype = DType::kFloat32; }));
    EXPECT_FALSE(exchanged(op, 512, 2048, 2048, [](TileGemm& g) { g.groups.groups = 1; }));
  }
  static const int32_t source = 0;
  const auto gather = [](TileGemm& g) { g.a.source = &source; };
  EXPECT_TRUE(exchanged(GemmOp::kTN, 512, 7168, 4096, gather));
  EXPECT_TRUE(exchanged(GemmOp::kTN, 1024, 7168, 4096, gather));
  EXPECT_FALSE(exchanged(GemmOp::kTN, 256, 7168, 4096, gather));
  EXPECT_FALSE(exchanged(GemmOp::kTN, 512, 2048, 1536, gather));
  EXPECT_FALSE(exchanged(GemmOp::kNN, 512, 7168, 4096, gather));
  // Of 1024 rows, groups that make up the blocks that there are.
  EXPECT_TRUE(exchanged(GemmOp::kTN, 1024, 7168, 4096, as_it_is));
  EXPECT_FALSE(exchanged(GemmOp::kTN, 1024, 7168, 4096, as_it_is, 114));
  EXPECT_FALSE(exchanged(GemmOp::kTN, 1024, 2048, 4096, as_it_is));
  EXPECT_FALSE(exchanged(GemmOp::kNN, 1024, 7168, 4096, as_it_is));
}

TEST(GroupedSm90, PairsOfExchangedOperandsMakeUpWholeGroups) {
  const auto pairs = [](int64_t rows, int64_t k, int64_t n, int64_t most) {
    TileGemm g = product(GemmOp::kTN);
    g.groups = {.groups = 8, .capacity = rows * 8};
    g.k = k;
    g.n = n;
    return sm90::pairs_in_step(g, most);
  };
  const std::optional<int64_t> none;
  EXPECT_EQ(pairs(1024, 7168, 4096, 66), 64);    // four pairs of tiles by sixteen columns of them
  EXPECT_EQ(pairs(256, 7168, 4096, 66), none);   // one by sixteen
  EXPECT_EQ(pairs(384, 7168, 6144, 37), 36);     // one by 24, and twelve of the last row tile
  EXPECT_EQ(pairs(1024, 7168, 4096, 60), none);  // a group is more
  EXPECT_EQ(pairs(1024, 7168, 3584, 66), none);  // ten would be over
  EXPECT_EQ(pairs(256, 2048, 4096, 66), none);   // a short reduction
  EXPECT_EQ(pairs(1, 7168, 8, 1), 1);
  EXPECT_EQ(pairs(1024, 7168, 4096, 64), 64);
}

TEST(GroupedSm90, LargeWeightGradientsTakeTurns) {
  const auto turns = [](int64_t m, int64_t n, auto&& change) {
    TileGemm g = product(GemmOp::kNT);
    g.m = m;
    g.n = n;
    g.epilogue.beta.value = 0;
    change(g);
    return sm90::choose_kernel(g, 132).turns;
  };
  const auto as_it_is = [](TileGemm&) {};
  EXPECT_TRUE(turns(2880, 2880, as_it_is));
  EXPECT_TRUE(turns(7168, 2048, as_it_is));
  EXPECT_FALSE(turns(1536, 2048, as_it_is));  // a tile for each multiprocessor
  EXPECT_FALSE(turns(4096, 1024, as_it_is));  // an eighth of the columns in vain
  EXPECT_FALSE(turns(2880, 2880, [](TileGemm& g) {
    g.epilogue.out_dtype = DType::kFloat32;
    g.epilogue.beta.value = 1;
  }));
  EXPECT_TRUE(turns(2880, 2880, [](TileGemm& g) { g.epilogue.out_dtype = DType::kFloat32; }));
  static const int32_t source = 0;
  EXPECT_FALSE(turns(2880, 2880, [](TileGemm& g) { g.b.source = &source; }));
}

}  // namespace
}  // namespace moiety::gemm::sm90
