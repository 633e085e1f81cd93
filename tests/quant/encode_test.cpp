// The CPU encoders of products with powers of two against the codecs: every finite BF16 value,
// factors from the least to the largest, subnormal codes and saturation among them.
#include <bit>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/quant/quantize/quantize_loops_avx2.h"

namespace moiety::quant::loops {
namespace {

constexpr int64_t kValues = 65536 - 256;  // finite

std::vector<bf16> finite_values() {
  std::vector<bf16> out;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    if ((bits & 0x7F80u) != 0x7F80u) out.push_back(bf16::from_bits(static_cast<uint16_t>(bits)));
  }
  return out;
}

template <class F>
void check(DType element, int exponent) {
  const float factor = std::bit_cast<float>(static_cast<uint32_t>(127 + exponent) << 23);
  const std::vector<bf16> x = finite_values();
  ASSERT_EQ(std::ssize(x), kValues);
  std::vector<uint8_t> expected(kValues), codes(kValues), blocks(kValues);
  for (int64_t i = 0; i < kValues; ++i) expected[i] = F::encode(static_cast<float>(x[i]) * factor);
  const std::vector<float> factors(kValues / 2, factor);
  const PairFactors pairs{factors.data(), factors.data()};
  encode(DType::kBFloat16, element, false, Known::kPowers)(
      {DType::kBFloat16, x.data(), 0, 1, kValues}, pairs, nullptr, codes.data());
  EXPECT_EQ(codes, expected) << exponent;
  for (const int block : {32, 128}) {
    const EncodeBlocks fast = encode_blocks_avx2(element, block, false, Known::kPowers);
    if (!fast) continue;  // without AVX2
    fast(x.data(), factors.data(), kValues, nullptr, blocks.data());
    EXPECT_EQ(blocks, expected) << exponent << " in blocks of " << block;
  }
}

TEST(Encode, ProductsWithPowersOfTwoHaveTheCodecsBits) {
  for (int exponent = -126; exponent <= 127; exponent += 11) {
    check<E4M3>(DType::kE4M3, exponent);
    check<E5M2>(DType::kE5M2, exponent);
  }
}

}  // namespace
}  // namespace moiety::quant::loops
