// The gradient of a bucket (buffer_layout.h): main_grad of its parameters, and its sum over the
// domain, of which each rank has its segment.
//
//   open --reduce--> reducing --finish--> reduced          reduced --reopen--> late
//   late --reduce--> reducing --finish--> reduced          a second round, which is added
//
// Sums are f32 in rank order (gtp/accumulate.h), whatever the dtype of what travels.
#pragma once

#include "moiety/base/buffer.h"
#include "moiety/comm/communicator.h"
#include "moiety/optim/buffer_layout.h"

namespace moiety::optim {

class BucketGradients {
 public:
  // `main_grad` is float32 or bfloat16, and so is `wire`, what travels; of a bfloat16 main_grad it
  // is bfloat16.
  BucketGradients(const BucketLayout& layout, DType main_grad, DType wire,
                  comm::Communicator& domain);

  const TensorView& main_grad() const { return main_grad_; }  // [length]
  const TensorView& sum() const { return sum_; }              // float32 [segment]
  // False from the first `reduce` of a step on.
  bool open() const { return state_ == State::kOpen; }

  // Collective: begins to sum what is in main_grad by then.
  void reduce(Stream stream);
  // Waits for the sum of this round, and adds it to that of earlier ones.
  void finish(Stream stream);
  // Waits until nobody reads main_grad any more, and clears it for what comes late. Nothing to do
  // if it was cleared already, or was not reduced yet.
  void reopen(Stream stream);
  // A step begins: the next round overwrites the sum.
  void begin();

 private:
  enum class State { kOpen, kReducing, kReduced, kLate };
  bool alone() const { return domain_.size() == 1; }

  comm::Communicator& domain_;
  DType wire_;
  Buffer memory_, sum_memory_, wire_memory_;
  TensorView main_grad_, sum_;
  TensorView sent_, received_;  // bfloat16 or float32 [ranks, segment]
  comm::Ticket ticket_;
  State state_ = State::kOpen;
  int rounds_ = 0;          // of this step
  bool in_place_ = false;   // the sum is main_grad
  bool scattered_ = false;  // the round under way writes the sum itself
};

}  // namespace moiety::optim
