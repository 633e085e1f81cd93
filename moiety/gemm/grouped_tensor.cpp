#include "moiety/gemm/grouped_tensor.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <vector>

namespace moiety::gemm {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

int64_t saturating_mul(int64_t a, int64_t b) {
  int64_t out;
  return __builtin_mul_overflow(a, b, &out) ? std::numeric_limits<int64_t>::max() : out;
}

int64_t saturating_add(int64_t a, int64_t b) {
  int64_t out;
  return __builtin_add_overflow(a, b, &out) ? std::numeric_limits<int64_t>::max() : out;
}

// Writes one offset; false if it had to be saturated.
bool put(const TensorView& out, int64_t i, int64_t value) {
  if (out.dtype() == DType::kInt64) {
    out.data<int64_t>()[i] = value;
    return value < std::numeric_limits<int64_t>::max();
  }
  const int64_t limit = std::numeric_limits<int32_t>::max();
  out.data<int32_t>()[i] = static_cast<int32_t>(std::min(value, limit));
  return value <= limit;
}

constexpr size_t kMaxOutputs = 16;

struct Scan {
  TensorView count_E, status;
  std::array<OffsetSpec, kMaxOutputs> outputs;
  size_t size = 0;
  int64_t capacity = 0;

  // The rows of group e after `used` rows; an impossible count is a fault and gives 0.
  int64_t rows(int64_t e, int64_t used) const {
    const int64_t n =
        count_E.dtype() == DType::kInt64 ? count_E.data<int64_t>()[e] : count_E.data<int32_t>()[e];
    if (n >= 0 && n <= capacity - used) return n;
    record_fault(status, kFaultGroup, OperationId::kGroupedOffsets, e, n);
    return 0;
  }

  void run() const {
    const int64_t experts = count_E.size(0);
    std::array<int64_t, kMaxOutputs> total{};
    const auto write = [&](size_t o, int64_t i, int64_t e) {
      if (!put(outputs[o].out, i, total[o])) {
        record_fault(status, kFaultSaturated, OperationId::kGroupedOffsets, e, total[o]);
      }
    };
    for (size_t o = 0; o < size; ++o) {
      if (outputs[o].leading_zero) write(o, 0, 0);
    }
    int64_t used = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t n = rows(e, used);
      used += n;
      for (size_t o = 0; o < size; ++o) {
        const OffsetSpec& spec = outputs[o];
        total[o] = saturating_add(total[o], saturating_mul(ceil_div(n, spec.div), spec.mul));
        write(o, e + (spec.leading_zero ? 1 : 0), e);
      }
    }
  }
};

}  // namespace

void record_faults(const Groups& groups, OperationId operation, const TensorView& source_R,
                   int64_t sources) {
  quant::record_faults(groups, operation);
  if (!groups.status.defined() || !source_R.defined()) return;
  const int32_t* source = source_R.data<int32_t>();
  for (int64_t e = 0; e < groups.experts; ++e) {
    const auto [begin, rows] = group_rows(groups, e);
    for (int64_t r = begin; r < begin + rows; ++r) {
      if (source[r] < -1 || source[r] >= sources) {
        record_fault(groups.status, kFaultIndex, operation, e, source[r]);
      }
    }
  }
}

void grouped_offsets(TensorView count_E, std::span<const OffsetSpec> outputs, int64_t capacity,
                     TensorView status, Stream stream) {
  MOIETY_CHECK(count_E.dims() == 1 && count_E.contiguous() &&
                   (count_E.dtype() == DType::kInt64 || count_E.dtype() == DType::kInt32),
               "grouped_offsets: count_E is {}, expected int32[*] or int64[*]", count_E.describe());
  MOIETY_CHECK(outputs.size() <= kMaxOutputs, "grouped_offsets: {} outputs, at most {}",
               outputs.size(), kMaxOutputs);
  MOIETY_CHECK(capacity >= 0, "grouped_offsets: capacity {}", capacity);
  if (status.defined()) check_tensor("grouped_offsets", "status", status, DType::kUInt32, {4});
  Scan scan{count_E, status, {}, outputs.size(), capacity};
  for (size_t o = 0; o < outputs.size(); ++o) {
    const OffsetSpec& spec = outputs[o];
    const DType dtype = spec.out.dtype() == DType::kInt32 ? DType::kInt32 : DType::kInt64;
    check_tensor("grouped_offsets", "out", spec.out, dtype,
                 {count_E.size(0) + (spec.leading_zero ? 1 : 0)});
    MOIETY_CHECK(spec.div >= 1 && spec.mul >= 0, "grouped_offsets: div {}, mul {}", spec.div,
                 spec.mul);
    scan.outputs[o] = spec;
  }
  stream.run([scan] { scan.run(); });
}

int64_t offsets_bound(int64_t capacity, int64_t experts, int64_t div, int64_t mul) {
  return (capacity + (div - 1) * std::min(experts, capacity)) / div * mul;
}

GroupedWeight::GroupedWeight(TensorView packed_ENC) : packed_(packed_ENC) {
  MOIETY_CHECK(!packed_.defined() || packed_.dims() == 3, "grouped weight: {}, expected [E, N, C]",
               packed_.describe());
}

int64_t GroupedWeight::experts() const {
  return packed_.defined() ? packed_.size(0) : static_cast<int64_t>(indexed_.size());
}

DType GroupedWeight::dtype() const {
  return packed_.defined() || indexed_.empty() ? packed_.dtype() : indexed_[0].dtype();
}

TensorView GroupedWeight::operator[](int64_t e) const {
  return packed_.defined() ? packed_.select(e) : indexed_[e];
}

void GroupedWeight::check(const char* operation, const char* argument, DType dtype, int64_t experts,
                          int64_t rows, int64_t columns) const {
  MOIETY_CHECK(this->experts() == experts, "{}: {} has {} experts, expected {}", operation,
               argument, this->experts(), experts);
  const int64_t different = packed_.defined() ? std::min<int64_t>(experts, 1) : experts;
  for (int64_t e = 0; e < different; ++e) {
    const TensorView m = (*this)[e];
    check_tensor(operation, argument, m, dtype, {rows, columns});
    MOIETY_CHECK(m.stride(1) == 1 || columns <= 1, "{}: {} {} has columns that are not contiguous",
                 operation, argument, m.describe());
  }
}

}  // namespace moiety::gemm
