// The arguments of operations as their steps take them, by bytes.
#pragma once

#include "moiety/moe/peers/early_steps.h"
#include "moiety/moe/peers/part_steps.h"
#include "moiety/moe/peers/place_steps.h"
#include "moiety/moe/peers/scale_steps.h"
#include "moiety/moe/row_movers.h"

namespace moiety::moe::peers {

PrepareView view_of(const EpPlan& plan, const PrepareArgs& args, Epoch epoch);
// Rows x go to `rows`, with w if there are weights.
CopyRows view_of(const SourceRows& x, const TensorView& w_TK, const ExpertRows& rows, int topk,
                 bool tail);
SumRows view_of(const SumArgs& sum, int topk);
// Whether the rows of g, y and gy are whole octets.
bool wide_rows(const ScaledRows& rows);
// Whether the memory of two matrices may overlap.
bool overlap(const TensorView& a, const TensorView& b);

}  // namespace moiety::moe::peers
