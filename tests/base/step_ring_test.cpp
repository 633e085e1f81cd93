// Step rings on a CPU; on a GPU the trainer's graphs read and write rings
// (tests/apps_gpu/train_test.cpp).
#include "moiety/base/step_ring.h"

#include <cstring>

#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace moiety {
namespace {

// Blocks of three int32: no whole number of lines.
constexpr int64_t kBytes = 12;

TEST(InboundRing, ALaunchTakesTheNextBlock) {
  InboundRing ring(kBytes, 2, Device{}, "feed");
  const Stream stream = Stream::deferred();
  for (int32_t n = 0; n < 7; ++n) {
    const int32_t values[3] = {n, -n, n * n};
    std::memcpy(ring.slot(n), values, kBytes);
    ring.fetch(stream);
    stream.synchronize();
    EXPECT_EQ(std::memcmp(ring.block().raw(), values, kBytes), 0) << n;
  }
  EXPECT_EQ(ring.slot(0), ring.slot(6));
  EXPECT_NE(ring.slot(0), ring.slot(5));
}

TEST(OutboundRing, BlocksComeInTheOrderOfTheStream) {
  OutboundRing ring(kBytes, 3, Device{}, "report");
  const Tensor block(DType::kUInt8, {kBytes});
  const Stream stream = Stream::deferred();
  for (int32_t n = 0; n < 6; n += 3) {
    for (int32_t i = n; i < n + 3; ++i) {
      stream.run([&block, i] { std::memcpy(block.view().raw(), &i, sizeof i); });
      ring.store(block, stream);
    }
    stream.synchronize();
    for (int32_t i = n; i < n + 3; ++i) {
      EXPECT_EQ(std::memcmp(ring.slot(i), &i, sizeof i), 0) << i;
    }
  }
  const Tensor longer(DType::kUInt8, {kBytes + 1});
  EXPECT_EQ(error_of([&] { ring.store(longer, stream); }),
            "store: block is uint8[13], expected uint8[12]");
}

}  // namespace
}  // namespace moiety
