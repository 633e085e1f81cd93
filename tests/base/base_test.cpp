// Views, memory, streams, loops, checksums and the elementary functions.
#include <atomic>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/arena.h"
#include "moiety/base/buffer.h"
#include "moiety/base/crc32c.h"
#include "moiety/base/math.h"
#include "moiety/base/parallel.h"
#include "moiety/base/stream.h"
#include "moiety/formats/bf16.h"
#include "tests/error_of.h"

namespace moiety {
namespace {

TEST(Format, ArgumentsAndBadFormats) {
  EXPECT_EQ(text("{} of {:.2f} at {}", "x", 1.5, int64_t{-3}), "x of 1.50 at -3");
  EXPECT_NE(text("{} {}", 1).find("bad format"), std::string::npos);
  EXPECT_EQ(bytes_text(640), "640 B");
  EXPECT_EQ(bytes_text(int64_t{3} << 19), "1.5 MiB");
}

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

TEST(Arena, SettlesToStableAddresses) {
  Arena arena("test", 256);
  const auto step = [&] {
    std::vector<void*> addresses;
    ArenaScope scope(arena);
    for (int64_t bytes : {100, 1000, 64}) {
      ArenaScope inner(arena);
      addresses.push_back(arena.allocate(bytes));
      addresses.push_back(arena.tensor(DType::kBFloat16, {7, 9}).raw());
    }
    addresses.push_back(arena.allocate(0));
    return addresses;
  };
  step();
  arena.settle();
  const auto first = step();
  arena.settle();
  EXPECT_EQ(first, step());
  EXPECT_EQ(arena.in_use(), 0);
  EXPECT_EQ(arena.reserved(), arena.peak());
  EXPECT_EQ(arena.peak(), 1024 + 128);
}

TEST(Stream, DeferredStreamShowsMissingEdges) {
  const Stream a = Stream::deferred(), b = Stream::deferred();
  int x = 0, seen = -1;
  a.run([&] { x = 1; });
  Event ready;
  ready.record(a);
  a.run([&] { x = 2; });
  b.run([&] { seen = x; });
  b.synchronize();
  EXPECT_EQ(seen, 0);  // no edge: b did not see a
  b.wait(ready);
  b.run([&] { seen = x; });
  EXPECT_FALSE(ready.complete());
  b.synchronize();
  EXPECT_EQ(seen, 1);
  EXPECT_TRUE(ready.complete());
  a.synchronize();
  EXPECT_EQ(x, 2);
  Stream().run([&] { x = 3; });
  EXPECT_EQ(x, 3);
}

TEST(Parallel, EachTaskOnceAndErrorsArrive) {
  for (int budget : {1, 2, 3}) {
    set_thread_budget(budget);
    std::vector<std::atomic<int>> seen(1000);
    parallel_for(1000, 7, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++seen[i];
    });
    for (const auto& s : seen) ASSERT_EQ(s, 1);
    EXPECT_EQ(
        error_of([] { parallel_tasks(8, [](int64_t i) { MOIETY_CHECK(i != 5, "task {}", i); }); }),
        "task 5");
    parallel_for(0, 16, [](int64_t, int64_t) { FAIL(); });
  }
  set_thread_budget(core_count());
}

TEST(Crc32c, GoldenAndContinuation) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c("6789", 4, crc32c("12345")), 0xE3069283u);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(Math, SigmoidGoldens) {
  const auto bits = [](float x) { return std::bit_cast<uint32_t>(sigmoid(x)); };
  EXPECT_EQ(bits(1), 0x3F3B26A8u);
  EXPECT_EQ(bits(-1), 0x3E89B2B1u);
  EXPECT_EQ(bits(10), 0x3F7FFD06u);
  EXPECT_EQ(bits(-10), 0x383E6997u);
  EXPECT_EQ(bits(-87), 0x00B33687u);
  EXPECT_EQ(bits(-87.1f), 0u);
  EXPECT_TRUE(std::isnan(sigmoid(std::bit_cast<float>(0x7FFFFFFFu))));
  EXPECT_TRUE(std::isnan(sigmoid(std::bit_cast<float>(0xFFFFFFFFu))));
}

TEST(Math, ExpAndLogAccuracy) {
  for (float t = -86.9f; t <= 0; t += 0.00137f) {
    const double exact = std::exp(double(t));
    ASSERT_LE(std::abs(exp_nonpositive(t) - exact), 3.4 * 0x1p-24 * exact) << t;
  }
  for (float x = 1e-38f; x < 1e38f; x *= 1.0173f) {
    const double exact = std::log(double(x));
    ASSERT_NEAR(log(x), exact, std::abs(exact) * 0x1p-23) << x;
  }
  EXPECT_EQ(log(1.0f), 0.0f);
  EXPECT_EQ(log(0.0f), -HUGE_VALF);
  EXPECT_TRUE(std::isnan(log(-1.0f)));
}

TEST(Math, LaneSumFollowsTheStatedOrder) {
  for (int64_t n : {0, 1, 7, 8, 9, 255, 256, 257, 1000}) {
    std::vector<float> x(n);
    for (int64_t i = 0; i < n; ++i) x[i] = 1.0f / static_cast<float>(i + 3);
    std::vector<float> lanes(32, 0.0f);
    for (int64_t i = 0; i < n; ++i) lanes[(i / 8) % 32] += x[i];
    for (int o = 16; o; o /= 2) {
      for (int l = 0; l < o; ++l) lanes[l] += lanes[l + o];
    }
    EXPECT_EQ(lane_sum<float>(n, [&](float v, int64_t i) { return v + x[i]; }), lanes[0]);
  }
}

}  // namespace
}  // namespace moiety
