#include "moiety/nn/loss_kernel.h"

#include "moiety/base/integer.h"

namespace moiety::nn {

LossShape choose_loss(int64_t vocabulary, int64_t shared_block) {
  constexpr int64_t kReserved = 1024;  // bytes of a multiprocessor that each of its blocks costs
  constexpr int64_t kFour = LossShape::kTurn * LossShape::kTurnsAtATime;
  LossShape shape{true, 0, ceil_div(vocabulary, kFour) * LossShape::kTurnsAtATime};
  const auto three_fit = [&] {
    return 3 * (shape.bytes() + kReserved) <= shared_block + kReserved;
  };
  while (shape.log < LossShape::kMostLog && !three_fit()) ++shape.log;
  if (shape.bytes() > shared_block) return {};
  return shape;
}

}  // namespace moiety::nn
