// What the tests of gemm share: data, groups, and comparison of every element.
#pragma once

#include <cmath>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"
#include "moiety/gemm/grouped_tensor.h"

namespace moiety::gemm {

// What outputs are poisoned with: exact in every dtype, and no result of these tests.
inline constexpr double kSentinel = -0x1p100;

inline double get(const TensorView& x, int64_t i) {
  switch (x.dtype()) {
    case DType::kFloat64:
      return x.data<double>()[i];
    case DType::kBFloat16:
      return x.data<bf16>()[i];
    default:
      return x.data<float>()[i];
  }
}

inline void put(const TensorView& x, int64_t i, double v) {
  switch (x.dtype()) {
    case DType::kFloat64:
      x.data<double>()[i] = v;
      break;
    case DType::kBFloat16:
      x.data<bf16>()[i] = bf16(static_cast<float>(v));
      break;
    default:
      x.data<float>()[i] = static_cast<float>(v);
  }
}

// Element (i, j) of a matrix with any row stride.
inline double get(const TensorView& x, int64_t i, int64_t j) { return get(x, i * x.stride(0) + j); }

inline void fill(const TensorView& x, double value) {
  for (int64_t i = 0; i < x.numel(); ++i) put(x, i, value);
}

inline void fill_normal(const TensorView& x, uint32_t id) {
  for (int64_t i = 0; i < x.numel(); ++i) put(x, i, init_normal(7, id, i));
}

// Integers in [-limit, limit]: sums of products stay exact in fp32.
inline void fill_integers(const TensorView& x, uint32_t id, int limit) {
  const PhiloxKey key = rng_key(11, RngDomain::kInit);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const uint32_t word = philox(key, {static_cast<uint32_t>(i), id, 0, 0})[0];
    put(x, i, static_cast<int>(word % (2 * limit + 1)) - limit);
  }
}

inline Tensor normal(DType dtype, std::initializer_list<int64_t> sizes, uint32_t id) {
  Tensor out(dtype, sizes);
  fill_normal(out, id);
  return out;
}

inline Tensor copy_of(const TensorView& x, DType dtype) {
  Tensor out(dtype, x.sizes());
  for (int64_t i = 0; i < x.numel(); ++i) put(out, i, get(x, i));
  return out;
}
inline void copy_into(const TensorView& out, const TensorView& x) {
  if (x.bytes() > 0) std::memcpy(out.raw(), x.raw(), x.bytes());
}
inline Tensor copy_of(const TensorView& x) {
  Tensor out(x.dtype(), x.sizes());
  copy_into(out, x);
  return out;
}

inline bool same_bits(const TensorView& a, const TensorView& b) {
  return a.bytes() == b.bytes() &&
         (a.bytes() == 0 || std::memcmp(a.raw(), b.raw(), a.bytes()) == 0);
}

// Empty if the distance of each row of `got` to that of `expected` is within `bound` times the
// latter's length. A row of the sentinel is near another such row alone.
inline std::string far_rows(const char* what, const TensorView& got, const TensorView& expected,
                            double bound) {
  const int64_t columns = got.size(-1);
  for (int64_t i = 0; i < got.numel(); i += columns) {
    double distance = 0, norm = 0;
    for (int64_t c = i; c < i + columns; ++c) {
      const double x = get(got, c), y = get(expected, c);
      distance += (x - y) * (x - y);
      norm += y * y;
    }
    if (!(distance <= bound * bound * norm)) {
      return std::string(what) + ": row " + std::to_string(i / columns) + ": " +
             std::to_string(std::sqrt(distance / norm)) + " of its length; ";
    }
  }
  return {};
}

// Half a unit in the last place of `dtype` at x.
inline double half_ulp(DType dtype, double x) {
  const int mantissa = dtype == DType::kBFloat16 ? 7 : dtype == DType::kFloat32 ? 23 : 52;
  return x == 0 ? 0 : std::ldexp(1.0, std::ilogb(x) - mantissa - 1);
}

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
