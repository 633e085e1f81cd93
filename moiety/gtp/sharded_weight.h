// A weight cut over a gtp group, as one rank stores it (docs/spec/gtp.md#layout). Owns nothing: the
// shards are those of the optimizer's buckets, and only it writes them.
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
  int64_t expert = -1;  // global number
  // The shard, s rows of K columns, rows without gaps: bf16 or fp32 [s, K],
  TensorView data;
  // or the arrays of the codec's format, compact. amax and tensor_scale are those of the whole
  // uncut weight, in both directions also where the shard has row codes alone: index 1 is that of
  // the column view that is made of them. They are part of the views that consumers get.
  QuantizedView quantized;
  // float32 or bfloat16 [s, K]; undefined: the weight is not trained.
  TensorView main_grad;

  // An array of the shard; undefined if there is none.
  const TensorView& array(Array array) const;
};

// Throws Error(InvalidArgument) naming the weight unless the layout is in order and the memory is
// as it and the codec say: of the row view always, of a column view that cannot be made of it too.
void check_weight(const ShardedWeight& weight);

// The part of a quantized matrix that is its first `rows` rows. Where column codes lie along rows,
// arrays have gaps then. Scales in a layout other than the compact one stay whole.
QuantizedView first_rows(const QuantizedView& view, int64_t rows);

}  // namespace moiety::gtp
