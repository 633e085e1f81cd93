#include "moiety/base/buffer.h"

#include <algorithm>
#include <cstdint>

#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace moiety {
namespace {

bool all_zero(const Buffer& x) {
  return std::all_of(x.data(), x.data() + x.bytes(), [](std::byte b) { return b == std::byte{}; });
}

TEST(Buffer, IsZeroedAndAligned) {
  for (const int64_t alignment : {64, 256, 4096}) {
    for (const int64_t bytes : {1, 63, 64, 65, 4097}) {
      const Buffer x(bytes, "x", alignment);
      EXPECT_EQ(x.bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(x.data()) % static_cast<uintptr_t>(alignment), 0u);
      EXPECT_TRUE(all_zero(x)) << bytes;
    }
  }
  EXPECT_EQ(Buffer(0).data(), nullptr);
  EXPECT_EQ(padded_bytes(0), 0);
  EXPECT_EQ(padded_bytes(64), 64);
  EXPECT_EQ(padded_bytes(65), 128);
}

TEST(Buffer, ViewsFitOrAreRefused) {
  const Buffer x(24);
  EXPECT_EQ(x.view(DType::kFloat32, {2, 3}).raw(), x.data());
  EXPECT_EQ(x.view(DType::kE2M1, {6, 8}).bytes(), 24);
  EXPECT_EQ(error_of([&] { x.view(DType::kFloat32, {7}); }),
            "buffer: float32[7] needs 28 bytes, the buffer has 24");
  EXPECT_EQ(error_of([] { Buffer(-1, "weights"); }, ErrorKind::kInvalidArgument),
            "weights: -1 bytes");
}

TEST(Buffer, OfTheHostForACpuIsPlainMemory) {
  const Buffer x = Buffer::host_for(Device{}, 100, "staging");
  EXPECT_EQ(x.device(), Device{});
  EXPECT_TRUE(all_zero(x));
}

TEST(Tensor, MovesWithItsMemory) {
  Tensor a(DType::kInt32, {2, 3});
  a.data<int32_t>()[5] = 7;
  void* const at = a.view().raw();
  const Tensor b = std::move(a);
  EXPECT_EQ(b.view().raw(), at);
  EXPECT_EQ(b.data<int32_t>()[5], 7);
}

}  // namespace
}  // namespace moiety
