#include "moiety/optim/weight_cast.h"

#include <utility>

namespace moiety::optim {

WeightCast::WeightCast(std::vector<BucketWeights*> buckets, comm::Communicator& domain,
                       comm::Communicator& holders, Device device)
    : buckets_(std::move(buckets)), domain_(&domain), holders_(&holders), device_(device) {
  std::vector<quant::PartialCastItem> items;
  for (const BucketWeights* bucket : buckets_) {
    items.insert(items.end(), bucket->cast_items().begin(), bucket->cast_items().end());
  }
  plan_.emplace(items, false);
  reduction_ = Buffer(plan_->reduction_bytes(), device_, "reduction of casts");
}

void WeightCast::set_masters() {
  std::vector<quant::PartialCastArrays> arrays;
  for (const BucketWeights* bucket : buckets_) {
    arrays.insert(arrays.end(), bucket->cast_arrays().begin(), bucket->cast_arrays().end());
  }
  table_.emplace(*plan_, arrays);
}

TensorView WeightCast::words() const {
  return reduction_.view(DType::kUInt8, {plan_->reduction_bytes()});
}

void WeightCast::begin(Stream stream) {
  quant::partial_amax(*plan_, *table_, words(), stream);
  const auto ranks_of = [&](const quant::PartialReduction& part) {
    return part.over == quant::PartialReduction::Over::kTensor ? holders_ : domain_;
  };
  const std::span<const quant::PartialReduction> parts = plan_->reductions();
  for (size_t i = 0; i < parts.size();) {
    // Parts that follow each other in memory, of one type and for the same ranks, are one.
    const size_t first = i;
    int64_t bytes = 0;
    for (; i < parts.size() && ranks_of(parts[i]) == ranks_of(parts[first]) &&
           parts[i].dtype == parts[first].dtype && parts[i].offset == parts[first].offset + bytes;
         ++i) {
      bytes += parts[i].bytes;
    }
    comm::Communicator& ranks = *ranks_of(parts[first]);
    if (ranks.size() == 1 || bytes == 0) continue;
    const DType dtype = parts[first].dtype;
    const TensorView words(reduction_.data() + parts[first].offset, dtype,
                           {bytes * 8 / bits(dtype)}, device_);
    tickets_.push_back(ranks.all_reduce(words, comm::ReduceOp::kMax, stream));
  }
}

void WeightCast::finish(Stream stream) {
  for (comm::Ticket& ticket : std::exchange(tickets_, {})) ticket.wait();
  quant::partial_cast(*plan_, *table_, words(), stream);
  for (const BucketWeights* bucket : buckets_) bucket->finish_cast(stream);
}

}  // namespace moiety::optim
