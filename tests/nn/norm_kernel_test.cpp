// Which kernel a GPU takes for a norm is decided without one, so it is tested without one.
#include "moiety/nn/norm_kernel.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

namespace moiety::nn {
namespace {

constexpr int64_t kShared = 223 << 10;  // of an H100's block, without the state of the ring
using enum NormFamily;

NormKernel backward(const NormTraits& traits) {
  return choose_norm_backward(traits, norm_ring(traits, kShared));
}

// visit(traits) of both dtypes, with and without an addend and octets, and rows of every length
// that decides something.
template <class Visit>
void for_traits(Visit&& visit) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int bits = 0; bits < 4; ++bits) {
      for (int64_t columns = 8; columns <= 1 << 17; columns *= 2) {
        for (const int64_t more : {0, 8}) {
          visit(NormTraits{dtype, columns + more, (bits & 1) != 0, (bits & 2) != 0});
        }
      }
    }
  }
}

template <class List, class Choose>
void expect_choices_from(const List& list, Choose&& choose) {
  std::vector<int64_t> chosen(list.size());
  for_traits([&](const NormTraits& traits) {
    const NormKernel kernel = choose(traits);
    EXPECT_EQ(kernel.dtype, traits.dtype);
    EXPECT_EQ(kernel.family == kAny, !traits.octets);
    const auto at = std::find(list.begin(), list.end(), kernel);
    ASSERT_NE(at, list.end()) << traits.columns << " columns";
    ++chosen[at - list.begin()];
  });
  for (size_t i = 0; i < list.size(); ++i) {
    EXPECT_GE(chosen[i], 1) << "nobody calls kernel " << i;
  }
}

TEST(NormKernel, EveryRowHasAKernelAndEveryKernelARow) {
  expect_choices_from(kNormKernels, choose_norm);
  expect_choices_from(kNormBackwardKernels, backward);
}

TEST(NormKernel, ARowStaysInRegistersIfItFits) {
  const auto expect = [](DType dtype, int64_t columns, NormFamily family, int64_t kept) {
    EXPECT_EQ(choose_norm({dtype, columns, true}), (NormKernel{family, dtype, kept})) << columns;
  };
  expect(DType::kBFloat16, 64, kShort, 64);
  expect(DType::kBFloat16, 72, kShort, 128);
  expect(DType::kBFloat16, 256, kShort, 256);
  expect(DType::kBFloat16, 264, kLong, 2048);
  expect(DType::kBFloat16, 2056, kLong, 4096);
  expect(DType::kBFloat16, 8192, kLong, 8192);
  expect(DType::kBFloat16, 20000, kLong, 8192);
  expect(DType::kFloat32, 1024, kLong, 1024);
  expect(DType::kFloat32, 1032, kLong, 2048);
}

TEST(NormKernel, ShortRowsTakeTheRingNeverAndAreAloneWithoutAnAddend) {
  EXPECT_EQ(backward({DType::kBFloat16, 128, true, false}),
            (NormKernel{kShort, DType::kBFloat16, 128}));
  EXPECT_EQ(backward({DType::kBFloat16, 128, true, true}),
            (NormKernel{kLong, DType::kBFloat16, 0}));
  EXPECT_EQ(backward({DType::kBFloat16, 264, true, false}),
            (NormKernel{kRing, DType::kBFloat16, 2048}));
}

TEST(NormKernel, HeadsAreRotatedInThePassOnlyIfTheyFillTheirLanes) {
  const auto choose = [](const NormTraits& traits) { return choose_norm_rope(traits); };
  for (const NormKernel& k : kNormRopeKernels) {
    EXPECT_EQ(choose({k.dtype, k.columns, true}), k);
    EXPECT_EQ(choose({k.dtype, k.columns, false}).family, kAny);
    EXPECT_EQ(choose({k.dtype, k.columns + 8, true}).family, kAny);
  }
  EXPECT_EQ(choose({DType::kBFloat16, 32, true}).family, kAny);
}

TEST(NormKernel, RowsTooLongForTheRing) {
  const auto family = [](DType dtype, int64_t columns, bool addend) {
    return backward({dtype, columns, true, addend}).family;
  };
  EXPECT_EQ(family(DType::kBFloat16, 8192, true), kRing);
  EXPECT_EQ(family(DType::kBFloat16, 8200, false), kLong);  // more than the threads can keep
  EXPECT_EQ(family(DType::kFloat32, 4096, true), kRing);
  const NormTraits traits{DType::kFloat32, 4096, true, true};
  EXPECT_EQ(choose_norm_backward(traits, norm_ring(traits, 64 << 10)).family, kLong);
}

TEST(NormKernel, TheRingFillsSharedMemory) {
  // A row of x, dy and the addend has 12 KiB: four of them are a stage.
  const NormRing wide = norm_ring({DType::kBFloat16, 2048, true, true}, kShared);
  EXPECT_EQ(wide.row_bytes, 3 * 2048 * 2);
  EXPECT_EQ(wide.log, 2);
  EXPECT_EQ(wide.stages, 4);
  EXPECT_EQ(wide.bytes(), 4 * 48 << 10);
  // Stages of short rows have 16 of them, and there are no more than 16 stages.
  const NormRing narrow = norm_ring({DType::kBFloat16, 128, true, false}, kShared);
  EXPECT_EQ(narrow.log, NormRing::kMostLog);
  EXPECT_EQ(narrow.stages, NormRing::kMostStages);
}

}  // namespace
}  // namespace moiety::nn
