// Sums of gradients: by hand, against the reference, with padding and with NaN in it.
#include "moiety/gtp/accumulate.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/parallel.h"
#include "moiety/formats/bf16.h"
#include "moiety/gtp/accumulate_job.h"
#include "tests/quant/cases.h"

namespace moiety::gtp {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Accumulate, SumsInRankOrderAndRoundsOnce) {
  // 2^24 + 1 + 1 is 2^24 from the left, 2^24 + 2 from the right.
  Tensor a(DType::kFloat32, {1, 1, 2}), b(DType::kFloat32, {1, 1, 2}),
      c(DType::kFloat32, {1, 1, 2}), main(DType::kFloat32, {1, 1, 2});
  const float big = 16777216.0f;
  a.data<float>()[0] = big, b.data<float>()[0] = 1, c.data<float>()[0] = 1;
  a.data<float>()[1] = 1, b.data<float>()[1] = 1, c.data<float>()[1] = big;
  main.data<float>()[0] = kNan;
  const TensorView chunks[] = {a, b, c};
  accumulate(chunks, main, 1, true, Stream());
  EXPECT_EQ(main.data<float>()[0], big);
  EXPECT_EQ(main.data<float>()[1], big + 2);
  accumulate(chunks, main, 1, false, Stream());
  EXPECT_EQ(main.data<float>()[0], 2 * big);
  EXPECT_EQ(main.data<float>()[1], 2 * big + 4);
}

TEST(Accumulate, Bf16SumsInFp32) {
  // 256 + 1 + 1: each would be lost in bf16.
  Tensor a(DType::kBFloat16, {1, 1, 1}), b(DType::kBFloat16, {1, 1, 1}),
      main(DType::kBFloat16, {1, 1, 1});
  a.data<bf16>()[0] = bf16(256.0f), b.data<bf16>()[0] = bf16(1.0f);
  const TensorView chunks[] = {a, b, b};
  accumulate(chunks, main, 1, true, Stream());
  EXPECT_EQ(float(main.data<bf16>()[0]), 258.0f);
  accumulate(chunks, main, 1, false, Stream());
  EXPECT_EQ(float(main.data<bf16>()[0]), 516.0f);
}

TEST(Accumulate, OneRankIsACopy) {
  Tensor a(DType::kFloat32, {1, 2, 1}), main(DType::kFloat32, {1, 2, 1});
  a.data<float>()[0] = -0.0f, a.data<float>()[1] = 3;
  const TensorView chunks[] = {a};
  accumulate(chunks, main, 2, true, Stream());
  EXPECT_TRUE(same_bits(main, a));
}

struct Types {
  DType wire, main;
};

// The cases are shapes, strides and dtypes: padding is neither read nor left with anything in it.
TEST(Accumulate, EqualsTheReference) {
  for (const Types& t :
       {Types{DType::kFloat32, DType::kFloat32}, Types{DType::kBFloat16, DType::kFloat32},
        Types{DType::kBFloat16, DType::kBFloat16}}) {
    for (const int64_t cols : {1, 7, 1024, 2600}) {
      for (const int ranks : {1, 2, 3, 8}) {
        for (const int64_t valid : {0, 3, 5}) {
          const int64_t E = 2, s = 5;
          // Chunk g of a send buffer [E, ranks * s, cols], as a view of it.
          std::vector<Tensor> buffers;
          std::vector<TensorView> chunks;
          for (int g = 0; g < ranks; ++g) {
            buffers.emplace_back(t.wire, std::initializer_list<int64_t>{E * ranks * s, cols});
            quant::fill(buffers.back(), quant::Data::kHugeAndTiny, static_cast<uint32_t>(g + 1));
            const int64_t sizes[] = {E, s, cols}, strides[] = {ranks * s * cols, cols, 1};
            auto* at = static_cast<std::byte*>(buffers.back().view().raw()) +
                       byte_size(t.wire, g * s * cols);
            const TensorView chunk(at, t.wire, sizes, strides);
            for (int64_t e = 0; e < E; ++e) {
              const TensorView tail = chunk.select(e).slice(0, valid, s);
              if (tail.numel() > 0) std::memset(tail.raw(), 0xFF, tail.bytes());
            }
            chunks.push_back(chunk);
          }
          Tensor got(t.main, {E, s, cols}), expected(t.main, {E, s, cols});
          for (const Tensor* x : {&got, &expected}) {
            std::memset(x->view().raw(), 0xFF, x->view().bytes());
          }
          for (const bool first : {true, false}) {
            accumulate(chunks, got, valid, first, Stream());
            accumulate_reference({chunks, expected, valid, first});
            ASSERT_TRUE(same_bits(got, expected)) << name(t.wire) << " " << name(t.main) << " "
                                                  << cols << " " << ranks << " " << valid;
            for (int64_t e = 0; e < E; ++e) {
              const TensorView pad = got.view().select(e).slice(0, valid, s);
              const auto* bytes = static_cast<const uint8_t*>(pad.raw());
              for (int64_t i = 0; i < pad.bytes(); ++i) ASSERT_EQ(bytes[i], 0);
            }
          }
        }
      }
    }
  }
}

TEST(Accumulate, ThreadsDoNotChangeBits) {
  Tensor a(DType::kFloat32, {3, 300, 700}), b(DType::kFloat32, {3, 300, 700});
  quant::fill(a.view().reshape({900, 700}), quant::Data::kNormal, 1);
  quant::fill(b.view().reshape({900, 700}), quant::Data::kNormal, 2);
  const TensorView chunks[] = {a, b};
  Tensor one(DType::kFloat32, {3, 300, 700}), two(DType::kFloat32, {3, 300, 700});
  {
    const ThreadBudget budget(1);
    accumulate(chunks, one, 290, true, Stream());
  }
  const ThreadBudget budget(2);
  accumulate(chunks, two, 290, true, Stream());
  EXPECT_TRUE(same_bits(one, two));
}

TEST(Accumulate, Errors) {
  Tensor f(DType::kFloat32, {1, 2, 3}), h(DType::kBFloat16, {1, 2, 3}),
      odd(DType::kFloat32, {1, 2, 4});
  const auto error = [](std::initializer_list<TensorView> chunks, const TensorView& main,
                        int64_t valid) {
    return kind_and_error_of(
        [&] { accumulate(std::span(chunks.begin(), chunks.size()), main, valid, true, Stream()); });
  };
  EXPECT_NE(error({}, f, 2).find("gtp accumulate: no chunks"), std::string::npos);
  EXPECT_NE(error({f}, h, 2).find("chunks are float32, main_grad is bfloat16"), std::string::npos);
  EXPECT_NE(error({f, odd}, f, 2).find("a chunk is float32[1, 2, 4], expected float32[1, 2, 3]"),
            std::string::npos);
  EXPECT_NE(error({f}, f, 3).find("3 valid rows of 2"), std::string::npos);
}

}  // namespace
}  // namespace moiety::gtp
