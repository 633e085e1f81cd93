// The environment of the CUDA driver: set where it is not, left alone where it is.
#include "moiety/comm/gpu_environment.h"

#include <cstdlib>

#include <gtest/gtest.h>

namespace moiety::comm {
namespace {

TEST(GpuEnvironment, IsSetWhereTheCallersIsNot) {
  ::unsetenv("CUDA_MODULE_LOADING");
  ::unsetenv("NCCL_NVLS_ENABLE");
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16", 1);
  prepare_gpu_environment();
  EXPECT_STREQ(std::getenv("CUDA_MODULE_LOADING"), "EAGER");
  EXPECT_STREQ(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), "16");
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");
}

}  // namespace
}  // namespace moiety::comm
