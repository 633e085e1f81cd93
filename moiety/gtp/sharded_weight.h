// A weight cut over a gtp group, as one rank stores it (docs/spec/gtp.md#layout). It owns nothing:
// the shards are those of the optimizer's buckets, and only the optimizer writes them.
#pragma once

#include <cstdint>
#include <string>

#include "moiety/formats/quantized.h"
#include "moiety/gtp/codec.h"
#include "moiety/gtp/layout.h"

namespace moiety::gtp {

// Index into the weights of an executor.
using WeightId = int32_t;

struct ShardedWeight {
  std::string name;  // for errors
  Layout layout;
  Codec codec;
  int64_t expert = -1;  // global number of the expert
  // The shard, s rows of K columns, rows without gaps: bf16 or fp32 [s, K],
  TensorView data;
  // or the arrays of the codec's format, compact. amax and tensor_scale are those of the whole
  // uncut weight, in both directions even if the shard has only row codes: index 1 belongs to the
  // column view that is made from them. They are part of the views that consumers get.
  QuantizedView quantized;
  // float32 or bfloat16 [s, K]; undefined if the weight is not trained.
  TensorView main_grad;

  // An array of the shard; undefined if there is none.
  const TensorView& array(Array array) const;
};

// Throws Error(kInvalidArgument) naming the weight unless the layout is in order and the memory
// fits it and the codec. The row view is always needed, a column view if it cannot be made from the
// row view.
void check_weight(const ShardedWeight& weight);

// The first `rows` rows of a quantized matrix. Where column codes lie along rows, the arrays then
// have gaps. Scales in a layout other than the compact one stay whole.
QuantizedView first_rows(const QuantizedView& view, int64_t rows);

}  // namespace moiety::gtp
