// Agreement with the conversions that NVIDIA's headers define for hosts, where the headers are
// found.
#include <gtest/gtest.h>

#if __has_include(<cuda_fp4.h>) && __has_include(<cuda_fp8.h>)
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/formats/ue8m0.h"
#include "tests/formats/codec_testing.h"

namespace moiety::testing {
namespace {

struct Case {
  const char* name;
  Grid grid;
  uint32_t (*ours)(float);
  uint32_t (*theirs)(float);
};

const Case kCases[] = {
    {"E2M1", Grid::make(1, 1, 7, 0x8, 0x7), [](float x) -> uint32_t { return E2M1::encode(x); },
     [](float x) -> uint32_t { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); }},
    {"E4M3", Grid::make(3, 7, 0x7E, 0x80, 0x7F),
     [](float x) -> uint32_t { return E4M3::encode(x); },
     [](float x) -> uint32_t { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }},
    {"E5M2", Grid::make(2, 15, 0x7B, 0x80, 0x7F),
     [](float x) -> uint32_t { return E5M2::encode(x); },
     [](float x) -> uint32_t { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2); }},
    {"UE8M0", Grid::make(0, 127, 254, 0, 0xFF),
     [](float x) -> uint32_t { return UE8M0::encode_up(x); },
     [](float x) -> uint32_t {
       return __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf);
     }},
};

TEST(Vendor, EncodesTheSame) {
  for (const Case& c : kCases) {
    for (float x : decisive_inputs(c.grid)) {
      ASSERT_EQ(c.ours(x), c.theirs(x)) << c.name << std::hexfloat << ' ' << x;
    }
  }
}

TEST(Vendor, DecodesTheSame) {
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    __nv_fp8_e4m3 e4m3;
    __nv_fp8_e5m2 e5m2;
    __nv_fp8_e8m0 e8m0;
    __nv_fp4_e2m1 e2m1;
    e4m3.__x = e5m2.__x = e8m0.__x = byte;
    e2m1.__x = byte & 15;
    const std::pair<float, float> pairs[] = {{E4M3::decode(byte), static_cast<float>(e4m3)},
                                             {E5M2::decode(byte), static_cast<float>(e5m2)},
                                             {UE8M0::decode(byte), static_cast<float>(e8m0)},
                                             {E2M1::decode(byte & 15), static_cast<float>(e2m1)}};
    for (const auto& [ours, theirs] : pairs) {
      if (std::isnan(ours)) {
        EXPECT_TRUE(std::isnan(theirs)) << code;
      } else {
        EXPECT_EQ(bits_of(ours), bits_of(theirs)) << code;
      }
    }
  }
}

TEST(Vendor, DISABLED_AllPatterns) {
  for (const Case& c : kCases) {
    int64_t wrong = 0;
    uint32_t b = 0, first = 0;
    do {
      if (c.ours(from_bits(b)) != c.theirs(from_bits(b)) && wrong++ == 0) first = b;
    } while (++b != 0);
    EXPECT_EQ(wrong, 0) << c.name << " first at " << std::hex << first;
  }
}

}  // namespace
}  // namespace moiety::testing
#else
TEST(Vendor, EncodesTheSame) { GTEST_SKIP() << "cuda_fp8.h and cuda_fp4.h are not found"; }
#endif
