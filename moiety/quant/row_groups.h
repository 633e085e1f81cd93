// Rows that belong to groups (experts) whose sizes are data: the host knows only how many groups
// there are and how many rows the buffer has (docs/spec/grouped.md#groups).
//
// Group e holds rows [begin[e], begin[e] + n_e). Rows outside every group are dead: no operation
// writes them, and their contents (NaN too) influence nothing. No operation asks for padding,
// alignment or a minimum of rows, or limits the number of groups.
#pragma once

#include <cstdint>

#include "moiety/base/tensor_view.h"

namespace moiety::quant {

// The operations as `status` records them.
enum class OperationId : uint32_t {
  kGroupedOffsets = 1,
  kGroupedGemm,
  kGroupedBiasGrad,
  kActivation,
  kGroupedMlp,
  kSumRows,
  kQuantizeGrouped,
};

// Bits of status[0].
// bad count or begin, or past the capacity: the group is empty
inline constexpr uint32_t kFaultGroup = 1;
inline constexpr uint32_t kFaultSaturated = 2;  // an offset did not fit its type
inline constexpr uint32_t kFaultIndex = 4;  // a gather index out of range: read as a row of zeros

struct RowGroups {
  TensorView count_E = {};  // int64, optional; if absent n_e = begin[e + 1] - begin[e]
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
RowRange group_rows(const RowGroups& groups, int64_t e);

// Throws Error(kInvalidArgument) unless the views of `groups` have the dtypes and sizes above.
void check_groups(const char* operation, const RowGroups& groups);
// Records the faults of the data.
void record_faults(const RowGroups& groups, OperationId operation);
// Keeps the first fault in `status`, if that is defined; later ones only add their bits.
void record_fault(const TensorView& status, uint32_t bit, OperationId operation, int64_t group,
                  int64_t value);
// Throws if a fault was recorded. For the owner of `status`, where the step synchronizes anyway.
void throw_on_fault(const TensorView& status);

}  // namespace moiety::quant
