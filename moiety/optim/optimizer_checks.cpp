// Checks of the things that ranks have to agree about.
#include <functional>
#include <numeric>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/comm/agree.h"
#include "moiety/optim/distributed_optimizer.h"

namespace moiety::optim {
namespace {

// A sentence unless all ranks of the group pass the same word.
std::string difference(comm::Communicator& comm, uint32_t word, const char* what) {
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

// Compares copies of weights, and the part that all parts of a tensor share.
void DistributedOptimizer::compare_copies() const {
  std::string error;
  for (const Bucket& b : buckets_) {
    const std::string& first = specs_[b.layout.slots[0].parameter].name;
    for (const std::string& next :
         {difference(*b.domain, b.weights->checksum(), text("weights at {}", first).c_str()),
          difference(*b.holders, b.weights->tensor_checksum(),
                     text("tensor scales at {}", first).c_str())}) {
      if (error.empty()) error = next;
    }
  }
  comm::agree(world_.bootstrap(), error);
}

}  // namespace moiety::optim
