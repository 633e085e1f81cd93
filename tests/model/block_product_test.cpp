#include "moiety/model/block_product.h"

#include "tests/model/support.h"

namespace moiety::model {
namespace {

// Both paths against the chain of fma that the header promises, for all layouts in use.
TEST(BlockProduct, IsOneChainOfFmaOnEveryPath) {
  for (const int64_t m : {4, 12}) {
    for (const int64_t n : {16, 48}) {
      for (const int64_t k : {0, 1, 37}) {
        for (const bool transposed : {false, true}) {
          const Tensor a = normal_tensor(DType::kFloat32, {m * std::max<int64_t>(k, 1)}, 1);
          const Tensor b = normal_tensor(DType::kFloat32, {n * std::max<int64_t>(k, 1)}, 2);
          for (const bool panels : {false, true}) {
            for (const bool accumulate : {false, true}) {
              const int64_t c_m = n + 3;
              const Tensor c = normal_tensor(DType::kFloat32, {m, c_m}, 3);
              const Tensor fast = normal_tensor(DType::kFloat32, {m, c_m}, 3);
              const Tensor portable = normal_tensor(DType::kFloat32, {m, c_m}, 3);
              BlockProduct p{.m = m,
                             .n = n,
                             .k = k,
                             .a = a.data<float>(),
                             .a_m = transposed ? 1 : k,
                             .a_k = transposed ? m : 1,
                             .b = b.data<float>(),
                             .b_k = panels ? 16 : n,
                             .b_n = panels ? 16 * k : 16,
                             .c_m = c_m,
                             .accumulate = accumulate};
              for (int64_t i = 0; i < m; ++i) {
                for (int64_t j = 0; j < n; ++j) {
                  float& sum = c.data<float>()[i * c_m + j];
                  if (!accumulate) sum = 0;
                  for (int64_t x = 0; x < k; ++x) {
                    sum = std::fma(p.a[i * p.a_m + x * p.a_k],
                                   p.b[x * p.b_k + j / 16 * p.b_n + j % 16], sum);
                  }
                }
              }
              p.c = fast.data<float>();
              block_product(p);
              p.c = portable.data<float>();
              block_product_portable(p);
              expect_same_bits(fast, c, "fast, and nothing beside it");
              expect_same_bits(portable, c, "portable, and nothing beside it");
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace moiety::model
