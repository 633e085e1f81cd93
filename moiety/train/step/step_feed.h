// The host's input to a step: batches, and the few numbers of its update. Both lie in rings that
// the device reads in its own time (base/step_ring.h), so a captured step needs nothing new from
// the host.
#pragma once

#include <cstdint>

#include "moiety/base/step_ring.h"
#include "moiety/data/batch_loader.h"
#include "moiety/model/transformer.h"

namespace moiety::train {

// A micro-batch on the device: the loader's tensors, and the number of the micro-step.
class BatchFeed {
 public:
  // A feed for micro-batches of B sequences of S tokens; the host may be `ahead` of them. `held` of
  // them are on the device at a time.
  BatchFeed(int64_t sequences, int64_t seq_len, data::BatchParts parts, int64_t ahead,
            Device device, int64_t held = 1);

  // Puts in the next micro-batch.
  void put(const data::Batch& batch, uint64_t micro_step);
  // The next micro-batch on the device, in the order of the stream. Valid until
  // as many calls as are held.
  model::Batch fetch(const Stream& stream);

 private:
  int64_t sequences_, seq_len_, tensor_bytes_;
  data::BatchParts parts_;
  InboundRing ring_;
  int64_t put_ = 0;
};

}  // namespace moiety::train
