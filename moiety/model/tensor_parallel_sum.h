// What moves and sums ranks' rows on a GPU (tensor_parallel.h).
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::model {

// out = round(the parts of `ranks` ranks, added in order, + addend), with the bits of the CPU. The
// addend may be absent, or out; each is float32 or bfloat16.
void add_parts_cuda(TensorView parts, int64_t ranks, TensorView addend, TensorView out,
                    const Stream& stream);

// Where ranks have rows of tokens, in memory that all of them read: those of rank r at at[r]. Tokens
// of all ranks lie by sequence and then by rank, `run` elements of each.
struct WindowRows {
  static constexpr int kMaxRanks = 64;
  const std::byte* at[kMaxRanks];
  int ranks, rank;
  int64_t sequences, run;
};
// `mine`, this rank's rows in the window, and their place in `all` := own.
void show_rows_cuda(TensorView own, std::byte* mine, const WindowRows& rows, TensorView all,
                    const Stream& stream);
// The peers' rows in `all` := those that they have shown.
void fetch_rows_cuda(const WindowRows& rows, TensorView all, const Stream& stream);
// out = round(the sum over ranks, in order, of the own tokens' rows of what each has for all tokens,
// of `dtype`, + addend); as add_parts_cuda.
void sum_rows_cuda(const WindowRows& rows, DType dtype, TensorView addend, TensorView out,
                   const Stream& stream);

}  // namespace moiety::model
