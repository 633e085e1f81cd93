// Generation with a KV cache. A sequence is continued by any number of tokens at a time, and only
// these are computed. Logits equal those of the full forward pass up to rounding.
#pragma once

#include <span>
#include <vector>

#include "moiety/model/transformer.h"

namespace moiety::model {

class Decoder {
 public:
  // A decoder with room for `positions` tokens in each of `sequences` sequences. The model must
  // outlive it, have its parameters bound and hold its weights whole (no tensor parallelism).
  Decoder(Transformer& model, int64_t sequences, int64_t positions);

  struct Continuation {
    int64_t sequence = 0;             // no two parts name the same one
    std::span<const int32_t> tokens;  // at least one
  };
  // Appends the tokens of every part to its sequence. logits_PV, fp32 on the model's device, gets
  // the logits that follow each part's last token. Collective over the expert group, with the same
  // number of tokens on every rank.
  void append(std::span<const Continuation> parts, TensorView logits_PV, Arena& arena,
              Stream stream);

  int64_t length(int64_t sequence) const { return lengths_[sequence]; }
  // Makes the sequence empty again.
  void clear(int64_t sequence) { lengths_[sequence] = 0; }

 private:
  // The parts as runs of rows; throws if they do not fit.
  std::vector<CacheRun> plan(std::span<const Continuation> parts) const;

  Transformer& model_;
  int64_t positions_;
  std::vector<int64_t> lengths_;
  std::vector<KvCache> caches_;  // by layer
};

}  // namespace moiety::model
