// Conversions on the GPU against the codecs: all 2^32 float32, all codes.
#include "tests/quant_gpu/codecs.h"

#include "tests/gpu/gpu_test.h"

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

TEST_F(CodecsGpu, AllCodes) {
  const Mismatches m = decode_mismatches(stream);
  EXPECT_EQ(m.count, 0u) << "the first in the run from code " << m.first;
}

}  // namespace
}  // namespace moiety::quant
