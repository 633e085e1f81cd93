// Product of two small float blocks: the inner loop of attention's fast path.
#pragma once

#include <cstdint>

namespace moiety::nn {

// c[i][j] = (accumulate ? c[i][j] : 0) + sum_k a[i][k] b[k][j], one fma chain over ascending k, so
// the bits do not depend on the instruction set. m is a multiple of 4, n of 16.
struct BlockProduct {
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int64_t a_m = 0, a_k = 1;  // element (i, k) of a at i * a_m + k * a_k
  const float* b = nullptr;
  int64_t b_k = 0;   // distance from one row of b to the next
  int64_t b_n = 16;  // distance from 16 columns of b to the next 16
  float* c = nullptr;
  int64_t c_m = 0;  // distance from one row of c to the next
  bool accumulate = false;
};
void block_product(const BlockProduct& p);
// The same without vector instructions.
void block_product_portable(const BlockProduct& p);

}  // namespace moiety::nn
