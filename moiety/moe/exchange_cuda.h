// A group of one rank on a GPU, inside expert parallelism. Its operations are kernels on the
// caller's stream; nothing waits for the host, and all may be captured in a graph, whose replays
// read the routing anew. The results are those of a CPU group of one rank, bit for bit.
#pragma once

#include <cstdint>

#include "moiety/moe/exchange.h"
#include "moiety/moe/row_movers.h"
#include "moiety/moe/slot_maps.h"

namespace moiety::moe {

// The state that a group keeps on its GPU, zero at first.
struct GpuState {
  Findings findings;
  // Counts of the prepare that runs, zero before and after it: pairs with idx < 0, with idx >= E,
  // and those from the first bad one to the end of the batch.
  unsigned long long masked = 0, bad = 0, behind_bad = 0;
  unsigned blocks_done = 0;  // of its first launch, zero likewise
};

// Fills the plan's tensors, and the maps of slots if it has any, and adds to the findings.
void prepare_cuda(const EpPlan& plan, const PrepareArgs& args, Epoch epoch, GpuState* state,
                  const Stream& stream);
// Writes the state's report, which then starts again from zero.
void take_report_cuda(const TensorView& report, GpuState* state, const Stream& stream);

// Checks the arguments of make_slot_maps; whether they are on a GPU.
bool check_slot_maps(const EpPlan& plan, const TensorView& w_TK, const SlotMaps& maps,
                     const Stream& stream);
// Fills the maps of the plan's slots (slot_maps.h).
void make_slot_maps_cuda(const EpPlan& plan, const TensorView& w_TK, const SlotMaps& maps,
                         const Stream& stream);
// make_row_map (slot_maps.h).
void make_row_map_cuda(const EpPlan& plan, const TensorView& source_C, const Stream& stream);
// expert_rows (slot_maps.h).
void expert_rows_cuda(const ExpertRowsArgs& args, const Stream& stream);

// Copies rows x[t] to their slots, bit for bit, with w[t, k] if there are values; then zeroes the
// padding and, if asked, the tail. Scales are compact.
void copy_rows_cuda(const EpPlan& plan, const SourceRows& x, const TensorView& w_TK,
                    const ExpertRows& rows, bool tail, const Stream& stream);
// Sets the sink to the amax of each local expert's rows, which a dispatch has brought. The rows are
// read once more.
void find_amax_cuda(const EpPlan& plan, const DispatchRows& d, const Stream& stream);
// gy[slot] := round(slot_w[slot] g[t]), and the dot products with y if there are values; zeroes the
// padding. All rows have one floating-point dtype.
struct ScaleRowsArgs {
  TensorView g_TD, slot_w, y_CD, gy_CD, g_slot_w;
};
void scale_rows_cuda(const EpPlan& plan, const ScaleRowsArgs& args, const Stream& stream);
// The sums of sum_rows (row_movers.h).
void sum_rows_cuda(const EpPlan& plan, const SumArgs& args, const Stream& stream);

}  // namespace moiety::moe
