// Cases of grouped quantization, for tests of every device: how rows fall to groups, with gaps and
// tails that hold NaN.
#pragma once

#include "moiety/quant/row_groups.h"
#include "tests/quant/cases.h"

namespace moiety::quant {

inline constexpr int64_t kCols = 72;  // a tail in blocks of 16, 32 and 128

struct Routing {
  std::string name;
  std::vector<int64_t> counts;
  int64_t gap = 0;   // dead rows between groups
  int64_t tail = 0;  // dead rows at the end
};
inline std::vector<Routing> routings() {
  std::vector<int64_t> e128(128), e300(300);
  for (size_t e = 0; e < 128; ++e) e128[e] = static_cast<int64_t>(e * 7 % 13);
  for (size_t e = 0; e < 300; ++e) e300[e] = e % 50 == 7 ? 33 : 0;
  return {{"empty_all", {0, 0, 0}, 0, 8},
          {"no_groups", {}, 0, 5},
          {"e1", {150}},
          {"all_to_one", {0, 0, 260, 0}},
          {"one_token", {0, 1, 0, 0}},
          {"primes", {2, 3, 5, 7, 11, 13, 127, 131}, 3, 9},
          {"block_edges", {127, 128, 129, 15, 16, 17}, 1, 421},
          {"e128", e128, 2, 10},
          {"e300", e300, 0, 40},
          {"half_full", {70, 0, 190, 129}, 0, 389}};
}

struct Problem {
  explicit Problem(const Routing& routing)
      : experts(static_cast<int64_t>(routing.counts.size())),
        begin(DType::kInt64, {experts + 1}),
        count(DType::kInt64, {experts}),
        status(DType::kUInt32, {4}) {
    int64_t at = 0;
    for (int64_t e = 0; e < experts; ++e) {
      begin.data<int64_t>()[e] = at;
      count.data<int64_t>()[e] = routing.counts[static_cast<size_t>(e)];
      at += count.data<int64_t>()[e] + routing.gap;
    }
    begin.data<int64_t>()[experts] = at;
    capacity = at + routing.tail;
    groups = {count, begin, status, experts, capacity, 0};
  }
  int64_t rows(int64_t e) const { return count.data<int64_t>()[e]; }
  int64_t first(int64_t e) const { return begin.data<int64_t>()[e]; }
  // The rows of groups; all others hold NaN.
  Tensor input(DType dtype, Data data) const {
    Tensor x(dtype, {capacity, kCols});
    std::memset(x.view().raw(), 0xFF, static_cast<size_t>(x.view().bytes()));
    for (int64_t e = 0; e < experts; ++e) {
      fill(x.view().slice(0, first(e), first(e) + rows(e)), data, static_cast<uint32_t>(e));
    }
    return x;
  }
  Guarded output(const QuantSpec& spec, Directions wanted, uint8_t poison) const {
    return Guarded(spec, capacity, kCols,
                   quantized_grouped_sizes(spec, capacity, kCols, experts, wanted), experts,
                   poison);
  }

  int64_t experts, capacity = 0;
  Tensor begin, count, status;
  RowGroups groups;
};

}  // namespace moiety::quant
