// A plan's tables as kernels read and write them.
#pragma once

#include "moiety/moe/peers/primitives.h"
#include "moiety/moe/prepare.h"

namespace moiety::moe::peers {

struct PlanView {
  int64_t tokens, tokens_max, rows_max, capacity, alignment, blocks;
  int32_t topk, rank, ranks;
  int64_t *info, *rows_real, *rows_padded, *rows_before, *offset;
  int32_t *slot_TK, *owner_TK, *row_TR, *recv_token, *recv_slot, *slot_row;
  int32_t *count_RE, *rows_RR, *tokens_R, *row_end_BR, *pair_end_BE;

  // The rows of one rank for another; the table of row (s, j).
  MOIETY_HD_INLINE int64_t rows(int from, int to) const { return rows_RR[from * ranks + to]; }
  MOIETY_HD_INLINE int32_t* slots(int s, int64_t j) const {
    return recv_slot + (s * tokens_max + j) * topk;
  }
  MOIETY_HD_INLINE int32_t& token(int s, int64_t j) const { return recv_token[s * tokens_max + j]; }
  // The number of rows for rank r of the tokens up to the end of block b.
  MOIETY_HD_INLINE int64_t row_end(int64_t b, int r) const { return row_end_BR[b * ranks + r]; }
  MOIETY_HD_INLINE int alive(const int32_t* slot_K) const {
    int count = 0;
    for (int k = 0; k < topk; ++k) count += slot_K[k] >= 0;
    return count;
  }
};

PlanView view_of(const EpPlan& plan);

}  // namespace moiety::moe::peers
