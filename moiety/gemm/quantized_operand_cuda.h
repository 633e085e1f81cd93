// Groups of quantized operands on GPUs. Internal to moiety/gemm.
#pragma once

#include "moiety/gemm/grouped_tensor.h"

namespace moiety::gemm {

// Writes begin_E1 and count_E of `out`: the groups of a private copy, in which groups begin at
// multiples of 128 rows and counts are rounded up to `tail`.
void operand_groups_cuda(const Groups& groups, int64_t tail, const Groups& out,
                         const Stream& stream);

// out[r] := x[source[r]], bit for bit; zeros where that is no row of x. Rows of out have no gaps.
void gather_rows_cuda(const GroupedTensor& x, const TensorView& out, const Stream& stream);

}  // namespace moiety::gemm
