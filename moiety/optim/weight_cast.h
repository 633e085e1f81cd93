// The cast of the weights of several buckets into their formats (quant/partial_cast.h), as one: a
// launch measures the own parts of all weights, their maxima go to the other ranks in one reduction
// for each type of word and group of ranks, and a launch casts. The bits are those of one weight
// after the other.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/comm/communicator.h"
#include "moiety/optim/bucket_weights.h"
#include "moiety/quant/partial_cast.h"

namespace moiety::optim {

class WeightCast {
 public:
  // The buckets have formats and one domain; `holders` are all ranks that hold elements of their
  // uncut weights. All of them outlive the object. The ranks pass the same buckets in the same
  // order.
  WeightCast(std::vector<BucketWeights*> buckets, comm::Communicator& domain,
             comm::Communicator& holders, Device device);

  // Takes the buckets' masters as they are set now; before the first cast, and after one changed.
  void set_masters();
  // Measures the own parts and begins to reduce their maxima. Collective.
  void begin(Stream stream);
  // Waits for the maxima and casts the own parts. Collective.
  void finish(Stream stream);

 private:
  TensorView words() const;

  std::vector<BucketWeights*> buckets_;
  comm::Communicator* domain_;
  comm::Communicator* holders_;
  Device device_;
  std::optional<quant::PartialCastPlan> plan_;
  std::optional<quant::PartialCastTable> table_;
  Buffer reduction_;
  std::vector<comm::Ticket> tickets_;
};

}  // namespace moiety::optim
