// Token embedding over a table that is cut by GTP (docs/spec/gtp.md#embedding): two ways that give
// the same bits, one that gathers the table and one that moves the rows that are needed.
//
//   table   forward: gather, then embedding_lookup in it.
//           backward: embedding_gradient into a send slot, then Transport::reduce.
//   rows    forward: embedding_lookup in the peers' shards.
//           backward: embedding_send into a send slot, then embedding_reduce; every owner sums its
//           rows of all ranks' gradients.
//
// Gradients are summed in fp32: of one rank in the order of embedding_sum.h, then over the ranks as
// accumulate.h says. Under a float32 wire both ways agree bitwise.
//
// `layout` is the table's [V, D], cut by TP (rows) or not. Tokens are int32 [T], T < 2^31. Those of
// other tp ranks' slices read as zero, and so do those outside [0, V), which are counted too:
// `faults`, int64 [3], zero at first, gets {how many, position and token of the first}; undefined:
// they are not counted. Neither kind has a gradient. All tensors are without gaps.
#pragma once

#include <cstdint>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/gtp/layout.h"
#include "moiety/gtp/transport_mapped.h"

namespace moiety::gtp {

enum class EmbeddingPath : uint8_t { kTable, kRows };
const char* name(EmbeddingPath path);

// Bytes that a rank receives in a forward and a backward pass: forward the rows that lie at peers
// if tokens are spread evenly, backward at most all rows of the peers' gradients.
struct EmbeddingTraffic {
  int64_t table = 0, rows = 0;
  EmbeddingPath smaller() const {
    return rows < table ? EmbeddingPath::kRows : EmbeddingPath::kTable;
  }
};
// For `tokens` on every rank; the table, and gradients on the rows path, are in `storage`. A pure
// function, equal on all ranks. Rows need a mapped transport.
EmbeddingTraffic embedding_traffic(const Layout& layout, int64_t tokens, DType storage, DType wire);
// The same of rows, and the memory that they take, for the planner.
BundleSpec::Rows embedding_rows(const Layout& layout, int64_t tokens, DType storage);

// Throws Error(InvalidArgument) if `faults` counted any.
void check_tokens(const Layout& layout, TensorView faults);

// out[t] = row token[t]. table_MD: the gathered [padded_rows, D]; its dtype is out's.
void embedding_lookup(const Layout& layout, TensorView table_MD, TensorView token_T,
                      TensorView out_TD, TensorView faults, Stream stream);
// The same from the shards of a bundle of one member, whose row data are in out's dtype.
void embedding_lookup(MappedTransport& transport, BundleId bundle, const Layout& layout,
                      TensorView token_T, TensorView out_TD, TensorView faults, Stream stream);

// send[v] = sum over t with token[t] = v of dout[t], 0 where there is none, for rows v that exist;
// rows behind them are left alone. dout and send are float32 or bfloat16, send [padded_rows, D];
// workspace int64 [T].
void embedding_gradient(const Layout& layout, TensorView dout_TD, TensorView token_T,
                        TensorView send_MD, TensorView workspace, Stream stream);

// A gradient by rows. T, at most `capacity`, may differ between ranks; the dtype of dout (float32
// or bfloat16) and the capacity are equal on all of them. send: uint8 [embedding_send_bytes].
int64_t embedding_send_bytes(int64_t capacity, int64_t cols, DType dout);
void embedding_send(const Layout& layout, TensorView dout_TD, TensorView token_T, int64_t capacity,
                    TensorView send, Stream stream);

struct EmbeddingReduceJob {
  BundleId bundle = kNoBundle;
  Layout layout;
  int64_t capacity = 0;
  DType dout = DType::kFloat32;
  TensorView send;       // in memory from `allocate`
  TensorView main_grad;  // float32 or bfloat16 [shard_rows, D]
  bool first = false;    // overwrites it
  TensorView workspace;  // int64 [ranks * capacity]
};
// One of the reduces of the bundle's lane: all ranks make it, in the same order with them.
void embedding_reduce(MappedTransport& transport, const EmbeddingReduceJob& job, Stream lane);

}  // namespace moiety::gtp
