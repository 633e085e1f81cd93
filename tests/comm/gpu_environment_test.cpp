// The environment of the CUDA driver: set where it is not, left alone where it is.
#include "moiety/comm/gpu_environment.h"

#include <cstdlib>

#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace moiety::comm {
namespace {

TEST(GpuEnvironment, IsSetWhereTheCallersIsNot) {
  ::unsetenv("NCCL_NVLS_ENABLE");
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16", 1);
  prepare_gpu_environment();
  EXPECT_STREQ(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), "16");
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");
}

TEST(GpuEnvironment, SaysByNameWhatIsNotEnough) {
  const auto enough = [](const char* name, const char* value) {
    value ? ::setenv(name, value, 1) : ::unsetenv(name);
    for (const GpuVariable& v : gpu_variables()) {
      if (v.name == name) return v.enough;
    }
    return false;
  };
  EXPECT_FALSE(enough("CUDA_DEVICE_MAX_CONNECTIONS", nullptr));
  EXPECT_FALSE(enough("CUDA_DEVICE_MAX_CONNECTIONS", "1"));
  EXPECT_TRUE(enough("NCCL_NVLS_ENABLE", "0"));
  EXPECT_EQ(error_of([] { check_gpu_environment(); }, ErrorKind::kUsage),
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: ranks on GPUs would wait for each other in the same "
            "queues: unset it, or set it to 32");
  EXPECT_TRUE(enough("CUDA_DEVICE_MAX_CONNECTIONS", "32"));
  check_gpu_environment();
  EXPECT_FALSE(enough("NCCL_NVLS_ENABLE", "1"));
  EXPECT_EQ(error_of([] { check_gpu_environment(); }, ErrorKind::kUsage),
            "NCCL_NVLS_ENABLE is 1: NVLink multicast is never used here: unset it, or set it to 0");
  EXPECT_TRUE(enough("NCCL_NVLS_ENABLE", "0"));
}

}  // namespace
}  // namespace moiety::comm
