// The way of gradients from backward to sums: when all gradients of a bucket are complete they
// travel.
#include <algorithm>
#include <vector>

#include "moiety/base/copy.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/optim/stand.h"

namespace moiety::optim {

DistributedOptimizer::Bucket& DistributedOptimizer::bucket_of(int parameter) {
  MOIETY_CHECK(parameter >= 0 && parameter < static_cast<int>(specs_.size()),
               "optimizer: parameter {} of {}", parameter, specs_.size());
  return buckets_[bucket_index_[parameter]];
}

void DistributedOptimizer::on_grad_ready(int parameter, const Event& event) {
  Bucket& b = bucket_of(parameter);
  MOIETY_CHECK(!b.frozen, "optimizer: {} is frozen, and has a gradient", specs_[parameter].name);
  MOIETY_CHECK(!complete_[parameter], "optimizer: the gradient of {} is complete twice",
               specs_[parameter].name);
  const Stream lane;
  if (!on_gpu()) lane.wait(event);
  complete_[parameter] = reported_ = true;
  if (--b.incomplete == 0 && !on_gpu()) reduce_buckets(false, lane);  // a GPU sums at the step
}

void DistributedOptimizer::on_grads_ready(int first, const Stream& stream) {
  bool whole = false;  // whether a bucket is complete now
  for (size_t p = static_cast<size_t>(first); p < specs_.size(); ++p) {
    Bucket& b = buckets_[bucket_index_[p]];
    if (complete_[p] || b.frozen) continue;
    complete_[p] = reported_ = true;
    whole |= --b.incomplete == 0;
  }
  if (!whole) return;
  set_out_before_ = set_out_.size();
  if (lane_) fork(stream);
  reduce_buckets(false, lane_ ? lane_->stream() : stream);
}

void DistributedOptimizer::on_grad_late(int parameter) {
  Bucket& b = bucket_of(parameter);
  MOIETY_CHECK(complete_[parameter], "optimizer: {} is late, but was not complete",
               specs_[parameter].name);
  complete_[parameter] = false;
  ++b.incomplete;
  if (b.gradients->open()) return;
  // Its sum is made again with the others, at the step.
  b.gradients->reopen();
  b.late = true;
}

void DistributedOptimizer::zero_missing(const Bucket& bucket, Stream stream) {
  for (const BucketLayout::Slot& slot : bucket.layout.slots) {
    const Parameter& p = parameters_[slot.parameter];
    if (p.overwrite) fill_bytes(p.grad, 0, stream);
  }
}

// Issues complete buckets, or all, in the order of the buckets of each domain.
void DistributedOptimizer::reduce_buckets(bool all, Stream stream) {
  for (const std::vector<size_t>& domain : domains_) {
    for (const size_t i : domain) {
      Bucket& b = buckets_[i];
      if (!b.gradients->open() || b.late) continue;
      if (!all && b.incomplete > 0) break;
      zero_missing(b, stream);
      b.gradients->reduce(stream);
      if (!lane_) continue;
      b.gradients->finish(stream);
      b.summed.record(stream);
      set_out_.push_back(i);
    }
  }
}

void DistributedOptimizer::finish_gradients(Stream stream) {
  if (lane_) {  // nothing is late: (e)gtp alone says so
    fork(stream);
    return reduce_buckets(true, lane_->stream());
  }
  reduce_buckets(true, stream);
  // On a GPU no bucket is summed before the step.
  if (reported_ && !on_gpu()) reduce_late_buckets(stream);
  for (const Bucket& b : buckets_) {
    if (!b.frozen) b.gradients->finish(stream);
  }
}

void DistributedOptimizer::fork(const Stream& stream) {
  forked_.record(stream);
  lane_->stream().wait(forked_);
}

void DistributedOptimizer::stand(const Event& event, const Stream& stream) {
  if constexpr (kCudaBuilt) begin_stand_cuda(stands_, stream);
  stream.wait(event);
  if constexpr (kCudaBuilt) end_stand_cuda(stands_, stream);
}

void DistributedOptimizer::join(const Stream& stream) {
  joined_.record(lane_->stream());
  stand(joined_, stream);
}

// Where there is a lane, sums are looked at as they come: first all of those that had set out before
// backward's last word, at once, since the others, of which the embedding's is the largest, travel
// meanwhile.
void DistributedOptimizer::take_statistics(const Stream& stream) {
  if (!lane_) return grad_statistics(gradients_, step_.statistics, stream);
  for (size_t at = 0, end = set_out_before_; at < set_out_.size(); at = end++) {
    if (at == end) continue;
    stand(buckets_[set_out_[end - 1]].summed, stream);
    std::vector<size_t> segments;
    for (size_t k = at; k < end; ++k) segments.push_back(buckets_[set_out_[k]].segment);
    std::sort(segments.begin(), segments.end());
    for (size_t k = 0, next; k < segments.size(); k = next) {  // those that follow each other
      next = k + 1;
      while (next < segments.size() && segments[next] == segments[next - 1] + 1) ++next;
      begin_grad_statistics(gradients_, segments[k], segments[next - 1] + 1, stream);
    }
  }
  end_grad_statistics(gradients_, step_.statistics, stream);
}

// Sums buckets that were late on one rank once more on all ranks.
void DistributedOptimizer::reduce_late_buckets(Stream stream) {
  for (const std::vector<size_t>& domain : domains_) {
    std::vector<int32_t> late;
    for (const size_t i : domain) late.push_back(buckets_[i].late);
    comm::Communicator& ranks = *buckets_[domain[0]].domain;
    const TensorView words(late.data(), DType::kInt32, {static_cast<int64_t>(late.size())});
    if (ranks.size() > 1) ranks.all_reduce(words, comm::ReduceOp::kMax, stream).wait();
    for (size_t k = 0; k < domain.size(); ++k) {
      if (!late[k]) continue;
      BucketGradients& gradients = *buckets_[domain[k]].gradients;
      if (!gradients.open()) gradients.reopen();
      gradients.reduce(stream);
    }
  }
}

void DistributedOptimizer::begin_gradients() {
  for (Bucket& b : buckets_) {
    b.incomplete = b.layout.slots.size();
    b.late = false;
    if (!b.frozen && !b.gradients->open()) b.gradients->reopen();
  }
  for (Parameter& p : parameters_) p.overwrite = true;
  complete_.assign(specs_.size(), false);
  reported_ = false;
  set_out_.clear();
  set_out_before_ = 0;
}

}  // namespace moiety::optim
