// The gradient of a bucket (buffer_layout.h): main_grad of its parameters, and its sum over the
// domain, of which each rank has its segment.
//
//    open --reduce--> reducing --finish--> reduced --reopen--> open
//
// This class never changes main_grad. If a gradient gets more after it was summed, the sum is made
// anew, and has the bits of a sum that was made late.
//
// Sums are f32 in rank order (gtp/accumulate.h), whatever dtype travels.
#pragma once

#include "moiety/base/buffer.h"
#include "moiety/comm/communicator.h"
#include "moiety/optim/buffer_layout.h"

namespace moiety::optim {

class BucketGradients {
 public:
  // `main_grad` and `wire`, the dtype that travels, are float32 or bfloat16; with a bfloat16
  // main_grad `wire` is bfloat16. `memory` is bytes_needed() zeroed bytes for main_grad, aligned to
  // 256, on the device; with null the object makes its own.
  BucketGradients(const BucketLayout& layout, DType main_grad, DType wire,
                  comm::Communicator& domain, Device device = {}, std::byte* memory = nullptr);
  // A multiple of 256.
  static int64_t bytes_needed(const BucketLayout& layout, DType main_grad);

  const TensorView& main_grad() const { return main_grad_; }  // [length]
  // [segment], float32; in a domain of one rank it is main_grad itself.
  const TensorView& sum() const { return sum_; }
  bool open() const { return state_ == State::kOpen; }

  // Begins to sum the main_grad of this moment. Collective.
  void reduce(Stream stream);
  // Waits for the sum.
  void finish(Stream stream);
  // Waits until nobody reads main_grad any more. The sum is void.
  void reopen();

 private:
  enum class State { kOpen, kReducing, kReduced };
  bool alone() const { return domain_.size() == 1; }

  comm::Communicator& domain_;
  DType wire_;
  Buffer memory_, sum_memory_, wire_memory_;
  TensorView main_grad_, sum_;
  TensorView sent_, received_;  // bfloat16 or float32 [ranks, segment]
  comm::Ticket ticket_;
  State state_ = State::kOpen;
  bool scattered_ = false;  // the transfer writes the sum itself
};

}  // namespace moiety::optim
