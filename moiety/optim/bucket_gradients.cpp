#include "moiety/optim/bucket_gradients.h"

#include <cstring>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/gtp/accumulate.h"
#include "moiety/optim/initialize.h"

namespace moiety::optim {

BucketGradients::BucketGradients(const BucketLayout& layout, DType main_grad, DType wire,
                                 comm::Communicator& domain)
    : domain_(domain), wire_(wire) {
  const int64_t n = layout.segment();
  memory_ = Buffer(byte_size(main_grad, layout.length), "gradients");
  main_grad_ = memory_.view(main_grad, {layout.length});
  in_place_ = alone() && main_grad == DType::kFloat32;
  if (in_place_) {
    sum_ = main_grad_;
    return;
  }
  sum_memory_ = Buffer(byte_size(DType::kFloat32, n), "gradient shard");
  sum_ = sum_memory_.view(DType::kFloat32, {n});
}

void BucketGradients::reduce(Stream stream) {
  MOIETY_CHECK(state_ == State::kOpen || state_ == State::kLate,
               "optimizer: a bucket is reduced twice");
  state_ = State::kReducing;
  ++rounds_;
  if (alone()) return;
  scattered_ = rounds_ == 1 && wire_ == DType::kFloat32;
  if (scattered_) {
    ticket_ = domain_.reduce_scatter(main_grad_, sum_, comm::ReduceOp::kSum, stream);
    return;
  }
  const int64_t ranks = domain_.size(), n = sum_.numel();
  const bool converts = wire_ != main_grad_.dtype();
  const int64_t bytes = byte_size(wire_, ranks * n);
  if (wire_memory_.bytes() == 0) {
    wire_memory_ = Buffer((converts ? 2 : 1) * bytes, "gradients that travel");
    received_ = wire_memory_.view(wire_, {ranks, n});
    sent_ = converts ? TensorView(wire_memory_.data() + bytes, wire_, {ranks, n})
                     : main_grad_.reshape({ranks, n});
  }
  if (converts) round_weights(main_grad_, sent_.reshape({ranks * n}), stream);
  const std::vector<int64_t> one_each(ranks, 1);
  ticket_ = domain_.all_to_all(sent_, one_each, received_, one_each, stream);
}

void BucketGradients::finish(Stream stream) {
  if (state_ != State::kReducing) return;
  ticket_.wait();
  ticket_ = {};
  state_ = State::kReduced;
  if (in_place_ || scattered_) return;
  const int64_t ranks = domain_.size(), n = sum_.numel();
  if (n == 0) return;
  std::vector<TensorView> chunks;
  for (int64_t r = 0; r < ranks; ++r) {
    const TensorView chunk = alone() ? main_grad_ : received_.select(r);
    chunks.push_back(chunk.reshape({1, 1, n}));
  }
  gtp::accumulate(chunks, sum_.reshape({1, 1, n}), 1, rounds_ == 1, stream);
}

void BucketGradients::reopen(Stream stream) {
  if (state_ == State::kReducing) finish(stream);
  if (state_ != State::kReduced) return;
  state_ = State::kLate;
  if (in_place_) return;  // what comes late adds to the sum
  stream.run([grad = main_grad_] {
    auto* bytes = static_cast<std::byte*>(grad.raw());
    parallel_for(grad.bytes(), 1 << 20, [&](int64_t begin, int64_t end) {
      std::memset(bytes + begin, 0, static_cast<size_t>(end - begin));
    });
  });
}

void BucketGradients::begin() {
  state_ = State::kOpen;
  rounds_ = 0;
}

}  // namespace moiety::optim
