// The movers of rows inside expert parallelism, which the data operations are made of. Those of a
// CPU run inside an operation of an Exchange; those of a GPU are in exchange_cuda.h.
//
// dispatch and combine_backward bring rows to experts (dispatch_cpu.cpp; scale_rows is combine's),
// combine and dispatch_backward bring them home and sum them (combine_cpu.cpp).
#pragma once

#include <functional>

#include "moiety/moe/combine.h"
#include "moiety/moe/dispatch.h"
#include "moiety/moe/exchange.h"
#include "moiety/moe/payload_rows.h"
#include "moiety/quant/amax_sink.h"

namespace moiety::moe {

// Sends x[t] (and the K weights of t) once to every rank with a live pair of t. Every row that
// arrives with a live pair, also from the own tokens, goes bit for bit to its slots among `rows`;
// the sink gets the amax of their experts.
void copy_rows(Exchange& exchange, const EpPlan& plan, const SourceRows& x, const TensorView& w_TK,
               const ExpertRows& rows, const quant::AmaxSink& sink = {});
// The two halves of copy_rows: stores what is sent, and takes what comes. The first needs no more
// of the plan than make_plan's `between` has.
void push_rows(Exchange& exchange, const EpPlan& plan, const SourceRows& x, const TensorView& w_TK);
void take_rows(Exchange& exchange, const EpPlan& plan, const SourceRows& x, const TensorView& w_TK,
               const ExpertRows& rows, const quant::AmaxSink& sink = {});
// The same, but it calls expand(row, its K slots) instead of copying; x is floating point. Rows are
// expanded in any order and by several threads.
using ExpandRow = std::function<void(const Row& row, const int32_t* slot_K)>;
void expand_rows(Exchange& exchange, const EpPlan& plan, const SourceRows& x,
                 const ExpandRow& expand);

// gy[slot] := round(slot_w[slot] g[t]) for every live pair; if y is defined, its values := the dot
// products of y[slot] and g[t].
struct ScaledRows {
  DType dtype = DType::kFloat32;  // of all tensors
  SourceRows g;
  TensorView slot_w, y_CD;
  ExpertRows gy;
};
void scale_rows(Exchange& exchange, const EpPlan& plan, const ScaledRows& args);

// Zeroes the padding rows of every local expert, the tail up to C if asked, and the pads that the
// layout of scales adds.
void zero_padding(const EpPlan& plan, const ExpertRows& rows, bool tail);

// out[t] := the sum of y over the live pairs of t, weighted by slot_w if given, + addend; and
// side_TK[t, k] := side[slot], 0 for pairs that are not live. At most one of slot_w and side is
// given.
struct SumArgs {
  TensorView y_CD, slot_w = {}, side = {}, addend = {}, out_TD, side_TK = {};
  Reduction reduction = Reduction::kRank;
};
void sum_rows(Exchange& exchange, const EpPlan& plan, const SumArgs& args);
// The rows that homes may read.
Operand operand_of(const SumArgs& args);

// A dispatch whose arguments have been checked.
struct DispatchRows {
  SourceRows x;
  TensorView w_TK;
  ExpertRows rows;
  bool zero_tail = false;
  quant::AmaxSink sink;
  Signature signature;
};
DispatchRows check_dispatch(const EpGroup& group, const EpPlan& plan, const DispatchArgs& args,
                            const Stream& stream);
// On a GPU: sets the sink, if there is one, from the rows that the dispatch has brought.
void find_amax(const EpPlan& plan, const DispatchRows& d, const Stream& stream);

// The checks that combine and dispatch_backward share.
struct SumNames {
  const char *operation, *y, *out;
};
void check_sum(const EpGroup& group, const EpPlan& plan, const SumNames& names, const SumArgs& args,
               const Stream& stream);
// Issues the sum, whose arguments have been checked.
void issue_sum(const char* operation, EpGroup& group, const EpPlan& plan, OpKind kind,
               const SumArgs& sum, const Stream& stream);

}  // namespace moiety::moe
