// Conversions on the GPU against the codecs: all 2^32 float32, all codes.
#include "tests/quant_gpu/codecs.h"

#include <cstdlib>
#include <limits>

#include "tests/support/gpu_test.h"

namespace moiety::quant {
namespace {

class CodecsGpu : public GpuTest {
 protected:
  void expect_same(Conversion conversion) {
    const Mismatches m = encode_mismatches(conversion, 0, uint64_t{1} << 32, stream);
    EXPECT_EQ(m.count, 0u) << "the first at bits " << std::hex << m.first;
  }
};

TEST_F(CodecsGpu, AllFloatsToE4M3) { expect_same(Conversion::kE4M3); }
TEST_F(CodecsGpu, AllFloatsToE5M2) { expect_same(Conversion::kE5M2); }
TEST_F(CodecsGpu, AllFloatsToE2M1) { expect_same(Conversion::kE2M1); }
TEST_F(CodecsGpu, AllFloatsToBf16) { expect_same(Conversion::kBf16); }

// All random bytes; every value with MOIETY_FULL_TESTS, else every 251st.
TEST_F(CodecsGpu, Units) {
  const uint64_t stride = std::getenv("MOIETY_FULL_TESTS") ? 1 : 251;
  for (const UnitCodec codec : {UnitCodec::kE4M3, UnitCodec::kE5M2, UnitCodec::kE2M1}) {
    const Mismatches m = unit_mismatches(codec, 0, (uint64_t{1} << 32) / stride, stride, stream);
    EXPECT_EQ(m.count, 0u) << "codec " << int(codec) << ", the first at bits " << std::hex
                           << m.first;
  }
}

TEST_F(CodecsGpu, ScalesOfNvfp4Blocks) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float amax : {0.0f, 1e-45f, 7e-36f, 1e-10f, 0.75f, 1.0f, 7.5f, 2688.0f, 3e20f,
                           std::numeric_limits<float>::max(), inf}) {
    const Mismatches m = block_scale_mismatches(amax, stream);
    EXPECT_EQ(m.count, 0u) << "tensor amax " << amax << ", the first at bits " << std::hex
                           << m.first;
  }
}

TEST_F(CodecsGpu, RandomBits) { EXPECT_EQ(random_mismatches(stream).count, 0u); }

TEST_F(CodecsGpu, AllCodes) {
  const Mismatches m = decode_mismatches(stream);
  EXPECT_EQ(m.count, 0u) << "the first in the run from code " << m.first;
}

}  // namespace
}  // namespace moiety::quant
