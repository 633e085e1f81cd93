// Groups of rows for the tests of gemm, in every shape that is hard.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "moiety/gemm/grouped_tensor.h"
#include "tests/support/tensors.h"

namespace moiety::gemm {

// The value that poisons outputs: exact in every dtype, and no result of these tests.
inline constexpr double kSentinel = -0x1p100;

struct GroupCase {
  std::string name;
  std::vector<int64_t> counts;
  int64_t gap = 0;         // dead rows before group e: e % (gap + 1), then `gap` after the last
  int64_t extra_rows = 0;  // of the buffers
};

inline void PrintTo(const GroupCase& c, std::ostream* out) { *out << c.name; }

// Hard shapes by name; widths and dtypes are the test's.
inline std::vector<GroupCase> group_cases() {
  std::vector<int64_t> sparse(4096), zipf(32), e257(257), e65(65);
  sparse[3] = 5;
  sparse[4095] = 1;
  for (int64_t e = 0; e < 32; ++e) zipf[e] = 120 / (e + 1);
  for (int64_t e = 0; e < 257; ++e) e257[e] = e % 4;
  for (int64_t e = 0; e < 65; ++e) e65[e] = (e * 7) % 13;
  return {{"empty_all", {0, 0, 0}},
          {"empty_first", {0, 4, 9}},
          {"empty_middle", {5, 0, 3}},
          {"empty_last", {2, 17, 0}},
          {"one_token", {0, 1, 0, 0}},
          {"one_each", {1, 1, 1, 1, 1}},
          {"all_to_one", {0, 0, 97, 0}},
          {"primes", {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31}},
          {"tile_edges", {63, 64, 65, 127, 128, 129, 255, 256, 257}},
          {"gaps", {9, 0, 14, 3, 8, 1, 30, 16}, 7},
          {"capacity_exact", {8, 8}},
          {"capacity_double", {8, 0, 8}, 0, 16},
          {"rows0", {0, 0}},
          {"experts0", {}, 0, 4},
          {"e1", {33}},
          {"e65", e65, 3},
          {"e257", e257},
          {"e4096_sparse", sparse},
          {"zipf", zipf}};
}

// Groups that own their data.
class TestGroups {
 public:
  explicit TestGroups(const GroupCase& c)
      : count_(DType::kInt64, {std::ssize(c.counts)}),
        begin_(DType::kInt64, {std::ssize(c.counts) + 1}),
        status_(DType::kUInt32, {4}) {
    int64_t row = 0;
    for (size_t e = 0; e < c.counts.size(); ++e) {
      row += static_cast<int64_t>(e) % (c.gap + 1);
      begin_.data<int64_t>()[e] = row;
      count_.data<int64_t>()[e] = c.counts[e];
      row += c.counts[e];
    }
    begin_.data<int64_t>()[c.counts.size()] = row;
    groups_.count_E = count_;
    groups_.begin_E1 = begin_;
    groups_.status = status_;
    groups_.experts = std::ssize(c.counts);
    groups_.capacity = row + c.gap + c.extra_rows;
  }

  const Groups& operator()() const { return groups_; }
  int64_t capacity() const { return groups_.capacity; }
  int64_t experts() const { return groups_.experts; }
  int64_t* count() const { return count_.data<int64_t>(); }
  int64_t* begin() const { return begin_.data<int64_t>(); }
  uint32_t* status() const { return status_.data<uint32_t>(); }

  // The group of every row, -1 for dead rows.
  std::vector<int64_t> owners() const {
    std::vector<int64_t> out(groups_.capacity, -1);
    for (int64_t e = 0; e < groups_.experts; ++e) {
      const RowRange range = group_rows(groups_, e);
      for (int64_t r = 0; r < range.rows; ++r) out[range.begin + r] = e;
    }
    return out;
  }

  void fill_dead_rows(const TensorView& x, double value) const {
    const std::vector<int64_t> owner = owners();
    for (int64_t r = 0; r < capacity(); ++r) {
      for (int64_t c = 0; owner[r] < 0 && c < x.numel() / capacity(); ++c) {
        put(x, r * (x.numel() / capacity()) + c, value);
      }
    }
  }

 private:
  Tensor count_, begin_, status_;
  Groups groups_;
};

}  // namespace moiety::gemm
