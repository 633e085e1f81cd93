// Devices as every build and machine sees them: what a request for a GPU says where there is none.
#include "moiety/base/gpu.h"

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/graph.h"
#include "moiety/base/stream.h"
#include "tests/support/error_of.h"

namespace moiety {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};

TEST(Device, WithoutAGpuARequestSaysWhy) {
  const GpuStatus& status = gpu_status();
  if (status.count > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(status.built, status.runtime > 0);
  EXPECT_EQ(status.text.find(status.built ? "no GPU is visible: " : "this build has no CUDA"), 0u)
      << status.text;
  const std::string why = "cuda:0 was asked for, but " + status.text;
  const auto check = [&](const std::string& what, auto&& f) {
    EXPECT_EQ(error_of(f, ErrorKind::kUnsupported), what + ": " + why);
  };
  check("weights", [] { Buffer(64, kGpu, "weights"); });
  check("empty", [] { Buffer(0, kGpu, "empty"); });
  check("x", [] { Tensor(DType::kFloat32, {2, 3}, kGpu, "x"); });
  check("staging", [] { Tensor::pinned(DType::kFloat32, {2, 3}, "staging"); });
  check("stream", [] { Stream::on(kGpu); });
  check("stream", [] { Stream::external(kGpu, nullptr); });
  check("gpu_properties", [] { gpu_properties(0); });
  check("gpu_free_memory", [] { gpu_free_memory(0); });
  EXPECT_EQ(error_of([] { fail_without_cuda("quantize"); }), "quantize: " + status.text);
}

TEST(Device, TheCpuIsAlwaysThere) {
  require_device("x", {});
  EXPECT_EQ(name(Device{}), "cpu");
  EXPECT_EQ(name(Device{DeviceType::kCuda, 3}), "cuda:3");
  EXPECT_EQ(Stream::on({}).device(), Device{});
  EXPECT_EQ(Tensor(DType::kFloat32, {2}, Device{}).view().device(), Device{});
  EXPECT_EQ(error_of([] { Stream().cuda_stream(); }), "stream: a CPU stream has no cudaStream_t");
  EXPECT_EQ(error_of([] { Graph(Stream(), [] {}); }), "graph: the stream is the CPU's");
}

}  // namespace
}  // namespace moiety
