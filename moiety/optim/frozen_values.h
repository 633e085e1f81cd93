// The values of a bucket's frozen weights (buffer_layout.h) on the rank that owns them. Nothing
// updates them, so there is no master: they are the own segment of the weights, in the storage
// dtype. Codes of a format cannot be read back, so beside those lies a copy in the storage dtype.
//
// Checkpoints and initialization see float32 in host memory, which is there only meanwhile:
//
//    closed --open--> open --publish, close--> closed
#pragma once

#include "moiety/base/buffer.h"
#include "moiety/base/stream.h"
#include "moiety/optim/bucket_weights.h"

namespace moiety::optim {

class FrozenValues {
 public:
  // Makes `elements` values, zero at first; `storage` is float32 or bfloat16.
  FrozenValues(int64_t elements, DType storage, Device device);

  // Float32 [elements] on the host: the values of `weights`, or what was written there since it is
  // open.
  const TensorView& open(const BucketWeights& weights);
  // Gives `weights` what was written and makes it their master, which BucketWeights::cast reads
  // until `close`. They may be others than those that were opened.
  void publish(BucketWeights& weights, const Stream& stream);
  void close(const Stream& stream);

 private:
  int64_t elements_;
  DType storage_;
  Device device_;
  Tensor kept_;  // [elements] in the storage dtype, beside weights in a format
  Tensor open_, master_;
};

}  // namespace moiety::optim
