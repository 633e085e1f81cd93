#include "moiety/gemm/grouped_tensor.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/gemm/grouped_mlp.h"
#include "moiety/gemm/offsets_scan.h"

namespace moiety::gemm {
namespace {

// Writes the offsets group after group, with the results of scan_counts (grouped_offsets_cuda.cu), and
// returns the number of rows of all groups.
int64_t run(const OffsetsScan& scan, const TensorView& status) {
  const auto fault = [&](uint32_t bit, int64_t e, int64_t value) {
    record_fault(status, bit, OperationId::kGroupedOffsets, e, value);
  };
  std::array<int64_t, kMaxOffsets> total{};
  const std::span outputs(scan.outputs, static_cast<size_t>(scan.size));
  for (const OffsetsScan::Output& o : outputs) {
    if (o.leading_zero) o.out.put(0, 0);
  }
  int64_t used = 0;
  for (int64_t e = 0; e < scan.experts; ++e) {
    int64_t n = scan.count.get(e);
    if (!scan.fits(n, used)) {
      fault(kFaultGroup, e, n);
      n = 0;
    }
    used += n;
    for (size_t o = 0; o < outputs.size(); ++o) {
      total[o] = saturating_add(total[o], outputs[o].size(n));
      if (!outputs[o].put(e, total[o])) fault(kFaultSaturated, e, total[o]);
    }
  }
  return used;
}

void zero(const TensorView& rows, int64_t begin, int64_t end) {
  const int64_t columns = rows.dims() == 1 ? 1 : rows.size(1);
  for (int64_t r = begin; r < end && columns > 0; ++r) {
    const TensorView row = rows.slice(0, r, r + 1);
    std::memset(row.raw(), 0, static_cast<size_t>(byte_size(row.dtype(), columns)));
  }
}

void check_zeroed(const char* op, const TensorView& rows, int64_t capacity, const Stream& stream) {
  MOIETY_CHECK((rows.dims() == 1 || rows.dims() == 2) && rows.size(0) == capacity,
               "{}: rows is {}, expected [{}, *] or [{}]", op, rows.describe(), capacity, capacity);
  MOIETY_CHECK(rows.dims() == 1 ? rows.contiguous() : rows.stride(1) == 1 || rows.size(1) <= 1,
               "{}: rows is {}, whose columns are not contiguous", op, rows.describe());
  check_device(op, "rows", rows, stream);
}

Integers integers(const TensorView& x) { return {x.raw(), x.dtype() == DType::kInt64}; }

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
  grouped_offsets(count_E, outputs, capacity, status, {}, stream);
}

void grouped_offsets(TensorView count_E, std::span<const OffsetSpec> outputs, int64_t capacity,
                     TensorView status, std::span<const TensorView> zeroed, Stream stream) {
  const char* op = "grouped_offsets";
  MOIETY_CHECK(count_E.dims() == 1 && count_E.contiguous() &&
                   (count_E.dtype() == DType::kInt64 || count_E.dtype() == DType::kInt32),
               "{}: count_E is {}, expected int32[*] or int64[*]", op, count_E.describe());
  MOIETY_CHECK(outputs.size() <= kMaxOffsets, "{}: {} outputs, at most {}", op, outputs.size(),
               kMaxOffsets);
  MOIETY_CHECK(capacity >= 0, "{}: capacity {}", op, capacity);
  if (status.defined()) check_tensor(op, "status", status, DType::kUInt32, {4});
  OffsetsScan scan{.count = integers(count_E),
                   .experts = count_E.size(0),
                   .capacity = capacity,
                   .outputs = {},
                   .status = status.defined() ? status.data<uint32_t>() : nullptr};
  for (const OffsetSpec& spec : outputs) {
    const DType dtype = spec.out.dtype() == DType::kInt32 ? DType::kInt32 : DType::kInt64;
    check_tensor(op, "out", spec.out, dtype, {scan.experts + (spec.leading_zero ? 1 : 0)});
    MOIETY_CHECK(spec.out.contiguous(), "{}: out is {}", op, spec.out.describe());
    MOIETY_CHECK(spec.div >= 1 && spec.mul >= 0, "{}: div {}, mul {}", op, spec.div, spec.mul);
    check_device(op, "out", spec.out, stream);
    scan.outputs[scan.size++] = {integers(spec.out), spec.div, spec.mul, spec.leading_zero};
  }
  MOIETY_CHECK(zeroed.size() <= kMaxZeroed, "{}: {} buffers, at most {}", op, zeroed.size(),
               kMaxZeroed);
  std::array<TensorView, kMaxZeroed> defined;
  size_t count = 0;
  for (const TensorView& rows : zeroed) {
    if (!rows.defined()) continue;
    check_zeroed(op, rows, capacity, stream);
    defined[count++] = rows;
  }
  if (check_devices(op, {{"count_E", count_E}, {"status", status}}, stream)) {
    if constexpr (kCudaBuilt) return grouped_offsets_cuda(scan, {defined.data(), count}, stream);
    fail_without_cuda(op);
  }
  stream.run([=] {
    const int64_t used = run(scan, status);
    for (size_t i = 0; i < count; ++i) zero(defined[i], used, capacity);
  });
}

namespace {

void zero_dead_rows_of(const Groups& groups, const TensorView& rows) {
  int64_t next = 0;
  for (int64_t e = 0; e < groups.experts; ++e) {
    const auto [begin, live] = group_rows(groups, e);
    if (live == 0) continue;
    zero(rows, next, begin);
    next = begin + live;
  }
  zero(rows, next, groups.capacity);
}

}  // namespace

void zero_dead_rows(const Groups& groups, TensorView rows, Stream stream) {
  const char* op = "zero_dead_rows";
  check_groups(op, groups);
  check_zeroed(op, rows, groups.capacity, stream);
  if (check_devices(op, {{"begin_E1", groups.begin_E1}, {"count_E", groups.count_E}}, stream)) {
    if constexpr (kCudaBuilt) return zero_dead_rows_cuda(groups, rows, stream);
    fail_without_cuda(op);
  }
  stream.run([=] { zero_dead_rows_of(groups, rows); });
}

int64_t offsets_bound(int64_t capacity, int64_t experts, int64_t div, int64_t mul) {
  return (capacity + (div - 1) * std::min(experts, capacity)) / div * mul;
}

GroupedWeight::GroupedWeight(TensorView packed_ENC) : packed_(packed_ENC) {
  MOIETY_CHECK(!packed_.defined() || packed_.dims() == 3, "grouped weight: {}, expected [E, N, C]",
               packed_.describe());
}

GroupedWeight GroupedWeight::split(const TensorView& packed_ENC) {
  const GroupedWeight packed(packed_ENC);
  std::vector<TensorView> views;
  for (int64_t e = 0; e < packed.experts(); ++e) views.push_back(packed[e]);
  GroupedWeight out;
  out.owned_ = std::make_shared<const std::vector<TensorView>>(std::move(views));
  out.indexed_ = *out.owned_;
  return out;
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
