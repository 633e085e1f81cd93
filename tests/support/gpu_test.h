// A test that needs a GPU, and is skipped with the reason where none is visible.
#pragma once

#include <gtest/gtest.h>

#include "moiety/base/gpu.h"
#include "moiety/base/stream.h"

namespace moiety {

class GpuTest : public testing::Test {
 protected:
  static constexpr Device kGpu{DeviceType::kCuda, 0};

  void SetUp() override {
    if (gpu_status().count == 0) GTEST_SKIP() << gpu_status().text;
    stream = Stream::on(kGpu);
  }

  Stream stream;
};

}  // namespace moiety
