#include "moiety/optim/bucket_gradients.h"

#include <vector>

#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/gtp/accumulate.h"
#include "moiety/optim/initialize.h"

namespace moiety::optim {

BucketGradients::BucketGradients(const BucketLayout& layout, DType main_grad, DType wire,
                                 comm::Communicator& domain, Device device, std::byte* memory)
    : domain_(domain), wire_(wire) {
  const int64_t ranks = layout.ranks, n = layout.segment();
  if (!memory) {
    memory_ = Buffer(bytes_needed(layout, main_grad), device, "gradients");
    memory = memory_.data();
  }
  main_grad_ = TensorView(memory, main_grad, {layout.length}, device);
  if (alone()) {
    sum_ = main_grad_;
    return;
  }
  sum_memory_ = Buffer(byte_size(DType::kFloat32, n), device, "gradient shard");
  sum_ = sum_memory_.view(DType::kFloat32, {n});
  scattered_ = wire == DType::kFloat32;
  if (scattered_) return;
  const bool converts = wire != main_grad;
  const int64_t bytes = byte_size(wire, layout.length);
  wire_memory_ = Buffer((converts ? 2 : 1) * bytes, device, "gradients that travel");
  received_ = wire_memory_.view(wire, {ranks, n});
  sent_ = converts ? TensorView(wire_memory_.data() + bytes, wire, {ranks, n}, device)
                   : main_grad_.reshape({ranks, n});
}

int64_t BucketGradients::bytes_needed(const BucketLayout& layout, DType main_grad) {
  return round_up(byte_size(main_grad, layout.length), 256);
}

void BucketGradients::reduce(Stream stream) {
  MOIETY_CHECK(state_ == State::kOpen, "optimizer: a bucket's gradient is reduced twice");
  state_ = State::kReducing;
  if (alone()) return;
  if (scattered_) {
    ticket_ = domain_.reduce_scatter(main_grad_, sum_, comm::ReduceOp::kSum, stream);
    return;
  }
  if (sent_.raw() != main_grad_.raw()) {
    round_weights(main_grad_, sent_.reshape({main_grad_.numel()}), stream);
  }
  const std::vector<int64_t> one_each(domain_.size(), 1);
  ticket_ = domain_.all_to_all(sent_, one_each, received_, one_each, stream);
}

void BucketGradients::finish(Stream stream) {
  if (state_ != State::kReducing) return;
  ticket_.wait();
  ticket_ = {};
  state_ = State::kReduced;
  const int64_t n = sum_.numel();
  if (alone() || scattered_ || n == 0) return;
  std::vector<TensorView> chunks;
  for (int r = 0; r < domain_.size(); ++r) {
    chunks.push_back(received_.select(r).reshape({1, 1, n}));
  }
  gtp::accumulate(chunks, sum_.reshape({1, 1, n}), 1, true, stream);
}

void BucketGradients::reopen() {
  ticket_.wait();
  ticket_ = {};
  state_ = State::kOpen;
}

}  // namespace moiety::optim
