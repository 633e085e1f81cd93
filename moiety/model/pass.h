// The state that one pass over a micro-batch carries from block to block.
#pragma once

#include <optional>

#include "moiety/base/arena.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_probe.h"
#include "moiety/comm/communicator.h"
#include "moiety/gtp/executor.h"
#include "moiety/quant/rounding.h"

namespace moiety::model {

class TpWindow;

struct Pass {
  Arena& arena;
  Stream stream;
  DType storage = DType::kFloat32;
  int64_t sequences = 0;
  int64_t seq_len = 0;
  // the ranks that share the sequences; null if there is only this one
  comm::Communicator* tp = nullptr;
  TpWindow* window = nullptr;           // of tp, on GPUs that map each other's memory
  gtp::Executor* executor = nullptr;    // of weights that are cut; null if none is
  gtp::Phase phase = gtp::Phase::kFwd;  // kRecompute: a forward pass once more
  TensorView rope_table;
  TensorView position_T;         // optional int32: positions, if they are not t mod seq_len
  TensorView document_start_BS;  // optional int32: attention.h
  TensorView routed_T;           // optional uint8, of own tokens; 0: padding, which no expert gets
  // Workspace of all blocks, of own tokens, in storage: the norm's output, computed again in
  // backward.
  TensorView h_TD;
  TensorView wide_TD;  // workspace of own tokens, fp32, if there are shared experts
  TensorProbe* probe = nullptr;
  // The stream of exchanges among experts' ranks, if another pass computes beside them.
  std::optional<Stream> exchange = {};
  const quant::RngState* rng = nullptr;  // state of stochastic rounding
  int64_t first_token = 0;               // as in Batch
  int64_t all_tokens = 0;
  bool records_amax = true;  // for delayed scaling; false in evaluation

  int64_t tokens() const { return sequences * seq_len; }
  int tp_ranks() const { return tp ? tp->size() : 1; }
  int tp_rank() const { return tp ? tp->rank() : 0; }
  // Number of tokens of which this rank holds the residual stream (tensor_parallel.h).
  int64_t own_tokens() const { return tokens() / tp_ranks(); }
  TensorView tensor(std::initializer_list<int64_t> sizes) const {
    return arena.tensor(storage, sizes);
  }
  // Adds work behind the latest call to the executor, for its plan (step_work.h).
  void note(gtp::Work work) const {
    if (executor) executor->note_work(work);
  }
  // This pass as one that goes forward once more.
  Pass again() const {
    Pass pass = *this;
    pass.phase = gtp::Phase::kRecompute;
    return pass;
  }
  // Shows the probe the result of an operation, and its inputs.
  template <class... Inputs>
  void stored(std::string_view operation, std::string_view name, const TensorView& view,
              const Inputs&... inputs) const {
    show(probe, stream, operation, name, view, inputs...);
  }
};

}  // namespace moiety::model
