#include "moiety/base/copy.h"

#include <numeric>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "tests/support/error_of.h"

namespace moiety {
namespace {

TEST(Copy, RowsOfAnyPitchInTheOrderOfTheStream) {
  Tensor from(DType::kInt32, {4, 5}), to(DType::kInt32, {6, 8});
  std::iota(from.data<int32_t>(), from.data<int32_t>() + 20, 1);
  const Stream stream = Stream::deferred();
  const TensorView window = to.view().slice(0, 1, 5).slice(1, 2, 5);
  fill_bytes(to, 0xFF, stream);
  copy(window, from.view().slice(1, 1, 4), stream);
  // The copies go from strided rows to a contiguous tensor and back.
  Tensor rows(DType::kInt32, {4, 3});
  copy(rows, window, stream);
  fill_bytes(window, 0, stream);
  copy(to.view().slice(0, 1, 5).slice(1, 5, 8), rows, stream);
  EXPECT_EQ(to.data<int32_t>()[0], 0);
  stream.synchronize();
  for (int64_t r = 0; r < 6; ++r) {
    for (int64_t c = 0; c < 8; ++c) {
      const bool row = r >= 1 && r < 5;
      const int32_t expected = !row || c < 2 ? -1 : c < 5 ? 0 : int32_t((r - 1) * 5 + c - 3);
      ASSERT_EQ(to.data<int32_t>()[r * 8 + c], expected) << r << " " << c;
    }
  }
  // Packed nibbles: rows of whole bytes only.
  uint8_t a[4] = {0x12, 0x34, 0x56, 0x78}, b[2] = {};
  const TensorView packed(a, DType::kE2M1, {2, 4});
  copy({b, DType::kE2M1, {2, 2}}, packed.slice(1, 0, 2), Stream());
  EXPECT_EQ(b[0], 0x12);
  EXPECT_EQ(b[1], 0x56);
  EXPECT_EQ(error_of([&] {
              copy({b, DType::kE2M1, {2, 1}}, packed.slice(1, 0, 1), Stream());
            }).find("copy: "),
            0u);
}

TEST(Copy, RefusesWhatDoesNotFit) {
  Tensor a(DType::kInt32, {2, 3, 4}), b(DType::kInt32, {2, 3, 4}), c(DType::kFloat32, {2, 3, 4});
  EXPECT_EQ(error_of([&] { copy(a, c, Stream()); }),
            "copy: dst is int32[2, 3, 4], src is float32[2, 3, 4]");
  EXPECT_EQ(error_of([&] { copy(a.view().slice(1, 0, 2), b.view().slice(1, 0, 2), Stream()); }),
            kNoError);
  EXPECT_EQ(error_of([&] { copy(a.view().slice(2, 0, 2), b.view().slice(2, 0, 2), Stream()); }),
            "copy: int32[2, 3, 2] with strides [12, 4, 1] is not a run of contiguous rows of "
            "whole bytes");
  copy(a.view().slice(0, 0, 0), b.view().slice(0, 1, 1), Stream());
}

}  // namespace
}  // namespace moiety
