#include "moiety/base/tensor_view.h"

#include <numeric>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/formats/bf16.h"
#include "tests/support/error_of.h"

namespace moiety {
namespace {

TEST(TensorView, SliceSelectReshape) {
  Tensor t(DType::kFloat32, {3, 4});
  std::iota(t.data<float>(), t.data<float>() + 12, 0.0f);
  const TensorView column = t.view().slice(1, 1, 3);
  EXPECT_FALSE(column.contiguous());
  EXPECT_EQ(*column.select(2).data<float>(), 9.0f);
  EXPECT_EQ(t.view().reshape({2, 6}).stride(0), 6);
  EXPECT_EQ(column.describe(), "float32[3, 2] with strides [4, 1]");
  EXPECT_EQ(error_of([&] { column.reshape({6}); }),
            "reshape: float32[3, 2] with strides [4, 1] is not contiguous");
  EXPECT_EQ(error_of([&] { t.data<bf16>(); }), "tensor is float32, accessed as bfloat16");
  EXPECT_EQ(error_of([&] {
              check_tensor("gemm", "b", t, DType::kFloat32, {-1, 8});
            }),
            "gemm: b is float32[3, 4], expected float32[*, 8]");
  EXPECT_EQ(TensorView().numel(), 0);
  EXPECT_EQ(TensorView(nullptr, DType::kFloat32, {0, 4}).slice(0, 0, 0).numel(), 0);
}

}  // namespace
}  // namespace moiety
