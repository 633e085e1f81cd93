#include "moiety/nn/rows.h"

#include <gtest/gtest.h>

#include "tests/support/tensors.h"

namespace moiety::nn {
namespace {

TEST(RowCursor, WalksTheRowsOfAnyView) {
  const Tensor whole = normal_tensor(DType::kFloat32, {3, 4, 5, 2}, 1);
  const TensorView cut = whole.view().slice(1, 1, 3).slice(2, 0, 4);  // [3, 2, 4, 2]
  ASSERT_EQ(row_count(cut), 24);
  for (const int64_t begin : {0, 1, 7, 23}) {
    RowCursor<float> at(cut, begin);
    for (int64_t row = begin; row < 24; ++row, at.next()) {
      ASSERT_EQ(at.row()[0], get(cut, 2 * row)) << begin << " " << row;
      ASSERT_EQ(at.row()[1], get(cut, 2 * row + 1)) << begin << " " << row;
    }
  }
}

TEST(RowCursor, OfAnAbsentViewHasNoRows) {
  RowCursor<float> at(TensorView(), 5);
  EXPECT_EQ(at.row(), nullptr);
  const Tensor vector(DType::kFloat32, {7});
  EXPECT_EQ(row_count(vector), 1);
  EXPECT_EQ(RowCursor<float>(vector, 0).row(), vector.data<float>());
}

}  // namespace
}  // namespace moiety::nn
