// Checks of the things that ranks have to agree about.
#include <algorithm>
#include <functional>
#include <numeric>

#include "moiety/base/copy.h"
#include "moiety/base/crc32c.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/comm/agree.h"
#include "moiety/optim/checksum.h"
#include "moiety/optim/distributed_optimizer.h"

namespace moiety::optim {
namespace {

// A sentence unless all ranks of the group pass the same word.
std::string difference(comm::Communicator& comm, uint64_t word, const char* what) {
  const auto all =
      comm.bootstrap().all_gather({reinterpret_cast<const char*>(&word), sizeof(word)});
  for (int r = 1; r < comm.size(); ++r) {
    if (all[r] != all[0]) {
      return text("optimizer: ranks 0 and {} of \"{}\" have different {}", r, comm.name(), what);
    }
  }
  return "";
}

}  // namespace

void DistributedOptimizer::check_layouts() const {
  std::string tensors;
  for (const ParamSpec& spec : specs_) {
    tensors += text("{} {} {} {} {}\n", spec.name, static_cast<int>(spec.kind), spec.expert,
                    spec.frozen, gtp::name(spec.domain));
    for (const LogicalTensor& tensor : spec.tensors) {
      tensors += tensor.name;
      for (const int64_t n : tensor.shape) tensors += text(" {}", n);
      tensors += '\n';
    }
  }
  std::string error = difference(world_, crc32c(tensors), "tensors");
  comm::agree(world_.bootstrap(), error);
  const auto add = [&](comm::Communicator& ranks, uint32_t hash, const char* what) {
    const std::string next = difference(ranks, hash, what);
    if (error.empty()) error = next;
  };
  for (const std::vector<size_t>& domain : domains_) {
    uint32_t hash = 0;
    for (const size_t i : domain) hash = hash * 31 + part_hash(specs_, buckets_[i].layout);
    const Bucket& b = buckets_[domain[0]];
    add(*b.domain, hash, b.layout.expert ? "expert parameters" : "dense parameters");
  }
  for (const Bucket& b : buckets_) {
    if (b.frozen) add(*b.domain, part_hash(specs_, b.layout), "frozen parameters");
  }
  for (const bool expert : {false, true}) {
    uint32_t hash = 0;
    const Bucket* any = nullptr;
    for (const Bucket& b : buckets_) {
      if (b.layout.expert != expert) continue;
      hash = hash * 31 + size_hash(specs_, b.layout);
      any = &b;
    }
    if (any) add(*any->holders, hash, expert ? "expert buckets" : "dense buckets");
  }
  comm::agree(world_.bootstrap(), error);
}

// Checks that each element of every logical tensor has one owner: the counts that all ranks own add
// up.
void DistributedOptimizer::check_owners() const {
  std::vector<size_t> first_tensor;  // first tensor of each parameter
  std::vector<const LogicalTensor*> tensors;
  for (const ParamSpec& spec : specs_) {
    first_tensor.push_back(tensors.size());
    for (const LogicalTensor& tensor : spec.tensors) tensors.push_back(&tensor);
  }
  std::vector<int64_t> owned(tensors.size());
  for (const Bucket& b : buckets_) {
    for (const ElementRun& run : b.runs) {
      owned[first_tensor[run.parameter] + run.tensor] += run.end - run.begin;
    }
  }
  const int64_t count = static_cast<int64_t>(owned.size());
  world_
      .all_reduce(TensorView(owned.data(), DType::kInt64, {count}), comm::ReduceOp::kSum, Stream())
      .wait();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::vector<int64_t>& shape = tensors[i]->shape;
    const int64_t expected =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    MOIETY_CHECK(owned[i] == expected, "optimizer: {} has {} elements, the ranks own {}",
                 tensors[i]->name, expected, owned[i]);
  }
}

// Two sums for each bucket: of the bytes that its domain shares, and of those that all holders share.
std::vector<uint64_t> DistributedOptimizer::copy_checksums() {
  std::vector<uint64_t> sums(2 * buckets_.size());
  const TensorView there = checksums_;
  if (on_gpu()) fill_bytes(there, 0, stream_);
  for (size_t i = 0; i < sums.size(); ++i) {
    for (const TensorView& x : buckets_[i / 2].weights->copies(i % 2 == 1)) {
      if (!on_gpu()) {
        sums[i] = crc32c(x.raw(), static_cast<size_t>(x.bytes()), static_cast<uint32_t>(sums[i]));
      } else if constexpr (kCudaBuilt) {
        add_checksum_cuda(x, there.data<uint64_t>() + i, stream_);
      }
    }
  }
  if (on_gpu()) {
    const Tensor here = to_host(there, stream_);
    std::copy_n(here.data<uint64_t>(), sums.size(), sums.begin());
  }
  return sums;
}

// Compares copies of weights, and the part that all parts of a tensor share.
void DistributedOptimizer::compare_copies() {
  complete_weights(stream_);
  const std::vector<uint64_t> sums = copy_checksums();
  std::string error;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    const Bucket& b = buckets_[i];
    const std::string& first = specs_[b.layout.slots[0].parameter].name;
    for (const std::string& next :
         {difference(*b.domain, sums[2 * i], text("weights at {}", first).c_str()),
          difference(*b.holders, sums[2 * i + 1], text("tensor scales at {}", first).c_str())}) {
      if (error.empty()) error = next;
    }
  }
  comm::agree(world_.bootstrap(), error);
}

}  // namespace moiety::optim
