#include "moiety/nn/block_product.h"

#include "tests/support/tensors.h"

namespace moiety::nn {
namespace {

struct Case {
  const char* name;
  int64_t m, n, k;
  bool transposed = false;  // a lies as [k, m]
  bool panels = false;      // b lies in panels of 16 columns
  bool accumulate = false;
};

const Case kCases[] = {
    {"one_tile", 4, 16, 37},
    {"no_reduction", 4, 16, 0},
    {"no_reduction_added", 8, 16, 0, false, false, true},
    {"several_tiles", 12, 48, 37, false, false, true},
    {"a_transposed", 12, 48, 5, true, false, true},
    {"b_in_panels", 8, 64, 32, false, true},
    {"both", 8, 32, 1, true, true, true},
};

class Product : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Product, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Product, IsOneChainOfFmaOnEveryPath) {
  const Case& x = GetParam();
  const int64_t c_m = x.n + 3;  // what lies between rows stays
  const Tensor a = normal_tensor(DType::kFloat32, {x.m * x.k}, 1);
  const Tensor b = normal_tensor(DType::kFloat32, {x.k * x.n}, 2);
  BlockProduct p{.m = x.m,
                 .n = x.n,
                 .k = x.k,
                 .a = a.data<float>(),
                 .a_m = x.transposed ? 1 : x.k,
                 .a_k = x.transposed ? x.m : 1,
                 .b = b.data<float>(),
                 .b_k = x.panels ? 16 : x.n,
                 .b_n = x.panels ? 16 * x.k : 16,
                 .c_m = c_m,
                 .accumulate = x.accumulate};
  const Tensor expected = normal_tensor(DType::kFloat32, {x.m, c_m}, 3);
  for (int64_t i = 0; i < x.m; ++i) {
    for (int64_t j = 0; j < x.n; ++j) {
      float& sum = expected.data<float>()[i * c_m + j];
      if (!x.accumulate) sum = 0;
      for (int64_t k = 0; k < x.k; ++k) {
        sum = std::fma(p.a[i * p.a_m + k * p.a_k], p.b[k * p.b_k + j / 16 * p.b_n + j % 16], sum);
      }
    }
  }
  for (const auto path : {block_product, block_product_portable}) {
    const Tensor c = normal_tensor(DType::kFloat32, {x.m, c_m}, 3);
    p.c = c.data<float>();
    path(p);
    expect_same_bits(c, expected, path == block_product ? "fast" : "portable");
  }
}

}  // namespace
}  // namespace moiety::nn
