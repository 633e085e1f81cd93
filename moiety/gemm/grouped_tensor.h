// Tensors whose rows belong to groups (quant/row_groups.h), their offsets, and weights of experts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/quant/row_groups.h"

namespace moiety::gemm {

using quant::kFaultGroup;
using quant::kFaultIndex;
using quant::kFaultSaturated;
using quant::OperationId;
using quant::RowRange;
using Groups = quant::RowGroups;
using quant::check_groups;
using quant::group_rows;
using quant::record_fault;
using quant::throw_on_fault;

// Records the faults of the data: of the groups and, if `source_R` is defined, of the indices of
// live rows, which must lie in [-1, sources).
void record_faults(const Groups& groups, OperationId operation, const TensorView& source_R,
                   int64_t sources);

// One output of `grouped_offsets`, int32 or int64. With v_e = ceil(n_e / div) * mul it holds the
// exclusive scan and the total (E + 1 values; leading_zero) or the inclusive scan (E values). A
// value that does not fit saturates and is a fault.
struct OffsetSpec {
  int64_t div = 1;
  int64_t mul = 1;
  bool leading_zero = true;
  TensorView out;
};

// Every offset from one scan of int32 or int64 counts; at most 16 outputs. A negative count is a
// fault and counts as 0. `capacity`: rows of the buffer; counts that exceed it in sum are a fault
// of the first group past it, which (as all after it that do not fit) counts as 0. On a GPU if the
// stream is; the same values and faults.
void grouped_offsets(TensorView count_E, std::span<const OffsetSpec> outputs, int64_t capacity,
                     TensorView status, Stream stream);

// Zeroes the dead rows of a buffer [capacity, ...] with contiguous columns: gaps, and those past the
// last group. On a GPU if the stream is.
void zero_dead_rows(const Groups& groups, TensorView rows, Stream stream);

// An upper bound of the total of {div, mul} for any counts of at most `capacity` rows.
int64_t offsets_bound(int64_t capacity, int64_t experts, int64_t div, int64_t mul);

// The rows of a grouped operation: [capacity, C] or, read through `source_R`, [T, C].
struct GroupedTensor {
  TensorView data;
  TensorView source_R =
      {};  // int32 [capacity], optional: row r is row source_R[r] of data; -1: zeros
};

// One matrix [N, C] for each expert, with contiguous columns: one view [E, N, C] or E views. The
// array behind a span must live until the operation has run; that of `split` lives with its copies.
class GroupedWeight {
 public:
  GroupedWeight() = default;
  GroupedWeight(TensorView packed_ENC);                                      // NOLINT: converts
  GroupedWeight(std::span<const TensorView> indexed) : indexed_(indexed) {}  // NOLINT: converts

  // The matrices of one view [E, N, C] as E views.
  static GroupedWeight split(const TensorView& packed_ENC);

  bool defined() const { return packed_.defined() || !indexed_.empty(); }
  int64_t experts() const;
  DType dtype() const;
  TensorView operator[](int64_t e) const;               // [N, C]
  const TensorView& packed() const { return packed_; }  // undefined if indexed

  // Throws Error(kInvalidArgument) unless there are `experts` matrices of this dtype and shape with
  // contiguous columns.
  void check(const char* operation, const char* argument, DType dtype, int64_t experts,
             int64_t rows, int64_t columns) const;

 private:
  TensorView packed_;
  std::span<const TensorView> indexed_;
  std::shared_ptr<const std::vector<TensorView>> owned_;  // what `indexed_` shows, after split
};

}  // namespace moiety::gemm
