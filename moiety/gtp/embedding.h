// Token embedding over a table that is cut by GTP (docs/spec/gtp.md#embedding). There are two ways
// with the same bits: one gathers the table, the other moves only the rows that are needed.
//
//    table   forward: gather, then embedding_lookup in it.
//            backward: embedding_gradient into a send slot, then Transport::reduce.
//    rows    forward: embedding_lookup in the peers' shards.
//            backward: embedding_send into a send slot, then embedding_reduce; every owner sums its
//            rows of all ranks' gradients.
//
// Gradients are summed in fp32: within a rank in the order of embedding_sum.h, then over the ranks
// as accumulate.h says. With a float32 wire both ways agree bitwise.
//
// `layout` is the table's [V, D], cut by TP (rows) or not. Tokens are int32 [T], T < 2^31. Tokens
// of other tp ranks' slices read as zero and have no gradient. So do tokens outside [0, V), which
// are also counted: `faults`, int64 [3], zero at first, gets {number, position and token of the
// first}; if undefined they are not counted. All tensors are without gaps.
#pragma once

#include <cstdint>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/gtp/layout.h"
#include "moiety/gtp/transport_mapped.h"

namespace moiety::gtp {

enum class EmbeddingPath : uint8_t { kTable, kRows };
const char* name(EmbeddingPath path);

// Bytes that a rank receives in a forward and a backward pass. Forward counts the rows that lie at
// peers if tokens are spread evenly; backward counts at most all rows of the peers' gradients.
struct EmbeddingTraffic {
  int64_t table = 0, rows = 0;
  EmbeddingPath smaller() const {
    return rows < table ? EmbeddingPath::kRows : EmbeddingPath::kTable;
  }
};
// The traffic for `tokens` on every rank; the table, and gradients on the rows path, are in
// `storage`. A pure function, equal on all ranks. The rows path needs a mapped transport.
EmbeddingTraffic embedding_traffic(const Layout& layout, int64_t tokens, DType storage, DType wire);
// The traffic of the rows path, and the memory that it takes, for the planner.
BundleSpec::Rows embedding_rows(const Layout& layout, int64_t tokens, DType storage);

// Throws Error(kInvalidArgument) if `faults` counted any.
void check_tokens(const Layout& layout, TensorView faults);

// out[t] = row token[t] of table_MD, the gathered [padded_rows, D] in out's dtype.
void embedding_lookup(const Layout& layout, TensorView table_MD, TensorView token_T,
                      TensorView out_TD, TensorView faults, Stream stream);
// The same from the shards of a bundle of one member, whose row data are in out's dtype.
void embedding_lookup(MappedTransport& transport, BundleId bundle, const Layout& layout,
                      TensorView token_T, TensorView out_TD, TensorView faults, Stream stream);

// send[v] = the sum of dout[t] over the t with token[t] = v, 0 if there are none, for rows v that
// exist; rows behind them are left alone. dout and send are float32 or bfloat16, send is
// [padded_rows, D], workspace int64 [T].
void embedding_gradient(const Layout& layout, TensorView dout_TD, TensorView token_T,
                        TensorView send_MD, TensorView workspace, Stream stream);

// A gradient by rows. T is at most `capacity` and may differ between ranks; the dtype of dout
// (float32 or bfloat16) and the capacity are equal on all ranks. send is uint8
// [embedding_send_bytes].
int64_t embedding_send_bytes(int64_t capacity, int64_t cols, DType dout);
void embedding_send(const Layout& layout, TensorView dout_TD, TensorView token_T, int64_t capacity,
                    TensorView send, Stream stream);

struct EmbeddingReduceJob {
  BundleId bundle = kNoBundle;
  Layout layout;
  int64_t capacity = 0;
  DType dout = DType::kFloat32;
  TensorView send;       // in memory from Transport::allocate
  TensorView main_grad;  // float32 or bfloat16 [shard_rows, D]
  bool first = false;    // overwrites main_grad
  TensorView workspace;  // int64 [ranks * capacity]
};
// Reduces a gradient by rows: one of the reduces of the bundle's lane, which all ranks make in the
// same order.
void embedding_reduce(MappedTransport& transport, const EmbeddingReduceJob& job, Stream lane);

}  // namespace moiety::gtp
