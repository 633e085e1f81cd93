// Tensors whose rows belong to groups (experts) with sizes that are data: the host knows how many
// groups there are and how many rows the buffer has, and nothing else (spec grouped, section 1).
//
// Group e holds rows [begin[e], begin[e] + n_e). Rows outside every group are dead: no operation
// writes them, and what they hold (NaN too) influences nothing. No operation asks for padding,
// alignment or a minimum of rows, or limits the number of groups.
#pragma once

#include <cstdint>
#include <span>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::gemm {

// Operations as they are recorded in `status`.
enum class OperationId : uint32_t {
  kGroupedOffsets = 1,
  kGroupedGemm,
  kGroupedBiasGrad,
  kActivation,
  kGroupedMlp,
  kSumRows,
};

// Bits of status[0].
inline constexpr uint32_t kFaultGroup = 1;  // bad count or begin, past the capacity: group is empty
inline constexpr uint32_t kFaultSaturated = 2;  // an offset did not fit its type
inline constexpr uint32_t kFaultIndex = 4;  // a gather index out of range: read as a row of zeros

struct Groups {
  TensorView count_E = {};  // int64, optional: absent means n_e = begin[e + 1] - begin[e]
  TensorView begin_E1;      // int64 [E + 1]; with counts, gaps between groups are legal
  TensorView status =
      {};  // uint32 [4], optional: {bits, operation, group, value} of the first fault
  int64_t experts = 0;
  int64_t capacity = 0;       // rows of the buffers
  int64_t expected_rows = 0;  // a hint that cannot change a result
};

struct RowRange {
  int64_t begin = 0;
  int64_t rows = 0;
};

// The rows of group e as the data says now; a faulty group is empty.
RowRange group_rows(const Groups& groups, int64_t e);

// Throws unless the views of `groups` have the dtypes and sizes above.
void check_groups(const char* operation, const Groups& groups);
// Records the faults of the data: of the groups and, if `source_R` is defined, of the indices of
// live rows, which must lie in [-1, sources).
void record_faults(const Groups& groups, OperationId operation, const TensorView& source_R,
                   int64_t sources);
// Keeps the first fault in `status`, if that is defined; the bits of later ones are added to it.
void record_fault(const TensorView& status, uint32_t bit, OperationId operation, int64_t group,
                  int64_t value);
// For the owner of `status`, where the step synchronizes anyway: throws if a fault was recorded.
void throw_on_fault(const TensorView& status);

// One output of `grouped_offsets`. With v_e = ceil(n_e / div) * mul it holds the exclusive scan and
// the total (E + 1 values; leading_zero) or the inclusive scan (E values), int32 or int64. A value
// that does not fit saturates and is a fault.
struct OffsetSpec {
  int64_t div = 1;
  int64_t mul = 1;
  bool leading_zero = true;
  TensorView out;
};

// Every offset from one scan of int32 or int64 counts; at most 16 outputs. A negative count is a
// fault and counts as 0. `capacity`: rows of the buffer; counts that exceed it in sum are a fault
// of the first group past it, which (as all after it that do not fit) counts as 0.
void grouped_offsets(TensorView count_E, std::span<const OffsetSpec> outputs, int64_t capacity,
                     TensorView status, Stream stream);

// An upper bound of the total of {div, mul} for any counts of at most `capacity` rows.
int64_t offsets_bound(int64_t capacity, int64_t experts, int64_t div, int64_t mul);

// Rows of a grouped operation: [capacity, C], or, read through `source_R`, [T, C].
struct GroupedTensor {
  TensorView data;
  TensorView source_R =
      {};  // int32 [capacity], optional: row r is row source_R[r] of data; -1: zeros
};

// One matrix [N, C] for each expert, columns contiguous: one view [E, N, C] or E views.
// The array behind `indexed` must live until the operation has run.
class GroupedWeight {
 public:
  GroupedWeight() = default;
  GroupedWeight(TensorView packed_ENC);                                      // NOLINT: converts
  GroupedWeight(std::span<const TensorView> indexed) : indexed_(indexed) {}  // NOLINT: converts

  bool defined() const { return packed_.defined() || !indexed_.empty(); }
  int64_t experts() const;
  DType dtype() const;
  TensorView operator[](int64_t e) const;  // [N, C]

  // Throws unless there are `experts` matrices of this dtype and shape with contiguous columns.
  void check(const char* operation, const char* argument, DType dtype, int64_t experts,
             int64_t rows, int64_t columns) const;

 private:
  TensorView packed_;
  std::span<const TensorView> indexed_;
};

}  // namespace moiety::gemm
