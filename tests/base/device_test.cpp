#include "moiety/base/device.h"

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"
#include "tests/support/error_of.h"

namespace moiety {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};

TEST(Device, ATensorOnAnotherDeviceIsNamed) {
  float data = 0;
  const TensorView x(&data, DType::kFloat32, {1}, kGpu);
  EXPECT_EQ(x.describe(), "float32[1] on cuda:0");
  EXPECT_EQ(error_of([&] { check_device("scale", "x", x, Stream()); }),
            "scale: x is float32[1] on cuda:0, but must be on cpu as the stream");
  check_device("scale", "bias", TensorView(), Stream());
  Tensor y(DType::kFloat32, {1});
  EXPECT_EQ(error_of([&] { copy(y, x, Stream()); }),
            "copy: dst is on cpu, src is on cuda:0, the stream is the CPU's");
}

}  // namespace
}  // namespace moiety
