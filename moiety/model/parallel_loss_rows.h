// The rows of a chunk of the cross-entropy among ranks (parallel_loss.h), as plain data for the loops
// of a CPU and the kernels of a GPU. Both give the same bits.
#pragma once

#include <cstdint>

#include "moiety/base/dtype.h"
#include "moiety/base/math.h"
#include "moiety/base/stream.h"
#include "moiety/nn/loss.h"

namespace moiety::model {

// A chunk of tokens, ordered by rank: own tokens of rank 0, of rank 1, ...
struct LossRows {
  int64_t rows = 0, columns = 0;     // columns of this rank's slice
  int64_t first = 0, tokens_of = 0;  // token of the first column; tokens of the whole vocabulary
  int ranks = 1;
  float* logits = nullptr;          // [rows, columns]
  const int32_t* target = nullptr;  // [rows]
  float* own = nullptr;             // [kRowWords, rows]: what a slice says of each row
  const float* all = nullptr;       // [ranks, kRowWords, rows]: what all of them say
  float* loss = nullptr;            // [rows]
};
// A row's maximum, the sum of exp(logit - maximum), and its target's logit, 0 in other slices.
enum RowWord { kRowMax, kRowSum, kRowTarget, kRowWords };

// What the slices together say of a row, in rank order.
struct RowTotal {
  float max, sum, target;
};
MOIETY_HD inline RowTotal total_of(const LossRows& c, int64_t n) {
  const auto word = [&](int rank, RowWord w) {
    return c.all[(int64_t{rank} * kRowWords + w) * c.rows + n];
  };
  RowTotal out{word(0, kRowMax), 0, 0};
  for (int r = 1; r < c.ranks; ++r) {
    if (word(r, kRowMax) > out.max) out.max = word(r, kRowMax);
  }
  for (int r = 0; r < c.ranks; ++r) {
    out.sum += word(r, kRowSum) * exp_nonpositive(word(r, kRowMax) - out.max);
    out.target += word(r, kRowTarget);
  }
  return out;
}
// The factor of this slice's exponentials, exp(logit - own maximum), in the gradient.
MOIETY_HD inline float gradient_factor(const LossRows& c, int64_t n, const RowTotal& t, float lse,
                                       float z_coef) {
  return (1 + 2 * z_coef * lse) * (1 / t.sum) * exp_nonpositive(c.own[n] - t.max);
}

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
// Fills `own`.
void row_words_cuda(const LossRows& rows, const Stream& stream);
// Fills `loss`; with `gradient` puts the gradient, elements of `storage`, where the logits were.
void finish_rows_cuda(const LossRows& rows, float z_coef, bool gradient, DType storage,
                      const Stream& stream);

}  // namespace moiety::model
