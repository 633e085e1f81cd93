// The sink on its own; the tests of producers compare the values that these leave in it with
// compute_amax.
#include "moiety/quant/amax_sink.h"

#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "moiety/formats/bf16.h"
#include "tests/support/error_of.h"
#include "tests/support/tensors.h"

namespace moiety::quant {
namespace {

TEST(AmaxSink, NanIsAboveInfinityAboveFinite) {
  const Tensor amax(DType::kFloat32, {1});
  const AmaxSink sink{amax};
  float x[3] = {-2, 1, 0};
  sink.add(0, DType::kFloat32, x, 3);
  EXPECT_EQ(get(amax, 0), 2);
  sink.add(0, DType::kFloat32, x + 1, 2);
  EXPECT_EQ(get(amax, 0), 2) << "a maximum stays";
  x[2] = -std::numeric_limits<float>::infinity();
  sink.add(0, DType::kFloat32, x, 3);
  EXPECT_TRUE(std::isinf(get(amax, 0)));
  x[1] = std::numeric_limits<float>::quiet_NaN();
  sink.add(0, DType::kFloat32, x, 3);
  EXPECT_TRUE(std::isnan(get(amax, 0)));
  sink.clear();
  EXPECT_EQ(bits_of(amax), std::vector<uint32_t>{0});
}

TEST(AmaxSink, GroupsDoNotTouchEachOther) {
  const Tensor amax(DType::kFloat32, {3});
  const AmaxSink sink{amax};
  const bf16 x[2] = {bf16(0.5f), bf16(-3.0f)};
  sink.add(2, DType::kBFloat16, x, 2);
  sink.add(0, DType::kBFloat16, x, 1);
  sink.add(1, DType::kBFloat16, x, 0);
  EXPECT_EQ(values(amax), (std::vector<double>{0.5, 0, 3}));
}

TEST(AmaxSink, ThreadsRaiseOneMaximum) {
  const Tensor amax(DType::kFloat32, {1});
  const AmaxSink sink{amax};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1000; ++i) sink.raise(0, bits_of(static_cast<float>(4 * i + t)));
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(get(amax, 0), 3999);
}

TEST(AmaxSink, RefusesWhatProducersCannotGive) {
  const Tensor amax(DType::kFloat32, {2}), wide(DType::kFloat64, {2});
  AmaxSink{}.check("swiglu", DType::kFloat64, 5);  // nobody asks
  EXPECT_EQ(error_of([&] { AmaxSink{amax}.check("swiglu", DType::kFloat32, 3); }),
            "swiglu: sink.amax is float32[2], expected float32[3]");
  EXPECT_EQ(error_of([&] { AmaxSink{wide}.check("swiglu", DType::kFloat32, 2); }),
            "swiglu: sink.amax is float64[2], expected float32[2]");
  EXPECT_EQ(error_of([&] { AmaxSink{amax}.check("swiglu", DType::kFloat64, 2); }),
            "swiglu: an amax of float64 is asked for, expected float32 or bfloat16");
}

}  // namespace
}  // namespace moiety::quant
