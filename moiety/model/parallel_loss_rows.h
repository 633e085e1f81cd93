// The rows of a chunk of the cross-entropy among ranks (parallel_loss.h), as plain data for the loops
// of a CPU and the kernels of a GPU. Both give the same bits.
#pragma once

#include <cstdint>

#include "moiety/base/dtype.h"
#include "moiety/base/stream.h"
#include "moiety/nn/loss.h"

namespace moiety::model {

// A chunk of tokens, ordered by rank: own tokens of rank 0, of rank 1, ...
struct LossRows {
  int64_t rows = 0, columns = 0;     // columns of this rank's slice
  int64_t first = 0, tokens_of = 0;  // token of the first column; tokens of the whole vocabulary
  float* logits = nullptr;           // [rows, columns]
  const int32_t* target = nullptr;   // [rows]
  float* max = nullptr;              // [rows]: maximum of each
  float* sum = nullptr;   // [2, rows]: each one's sum of exponentials, then its target's logit
  float* loss = nullptr;  // [rows]
};

// What picks the targets of a chunk: own tokens [begin, end) of every rank, masked ones as
// kIgnoredTarget. Sequences of `run` tokens a rank.
struct TargetChunk {
  const int32_t* target = nullptr;  // of all tokens
  const uint8_t* mask = nullptr;    // of all tokens, or null
  int64_t ranks = 1, run = 1, begin = 0, end = 0;
  int32_t* out = nullptr;

  // The token whose target is out[n].
  MOIETY_HD int64_t token(int64_t n) const {
    const int64_t rank = n / (end - begin), i = begin + n % (end - begin);
    return (i / run * ranks + rank) * run + i % run;
  }
  MOIETY_HD int32_t at(int64_t token) const {
    return mask && mask[token] == 0 ? nn::kIgnoredTarget : target[token];
  }
};

// On a GPU a target outside of the vocabulary makes its row's loss and gradient NaN.
void pick_targets_cuda(const TargetChunk& chunk, const Stream& stream);
void row_maxima_cuda(const LossRows& rows, const Stream& stream);
// Logits become exp(logit - max); fills `sum`.
void row_sums_cuda(const LossRows& rows, const Stream& stream);
// Fills `loss`; with `gradient` puts the gradient, elements of `storage`, where the logits were.
void finish_rows_cuda(const LossRows& rows, float z_coef, bool gradient, DType storage,
                      const Stream& stream);

}  // namespace moiety::model
