// The number of reductions that the casts of a step take: one for each domain and type of word,
// however many buckets there are. (quantized_weights_test.cpp compares the bytes.)
#include "moiety/optim/weight_cast.h"

#include <map>
#include <mutex>

#include <gtest/gtest.h>

#include "moiety/comm/thread_group.h"
#include "moiety/optim/distributed_optimizer.h"
#include "tests/optim/model_specs.h"

namespace moiety::optim {
namespace {

using comm::ReduceOp, comm::Ticket;

// A communicator that counts the maxima over ranks, its own and those of its sub-groups.
class Counting final : public comm::Communicator {
 public:
  Counting(comm::Communicator& inner, int& maxima) : inner_(inner), maxima_(maxima) {}
  Counting(std::unique_ptr<comm::Communicator> inner, int& maxima)
      : owned_(std::move(inner)), inner_(*owned_), maxima_(maxima) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  const std::string& name() const override { return inner_.name(); }
  comm::Bootstrap& bootstrap() override { return inner_.bootstrap(); }
  bool may_map_memory() const override { return inner_.may_map_memory(); }
  Ticket all_reduce(TensorView x, ReduceOp op, Stream stream) override {
    maxima_ += op == ReduceOp::kMax;
    return inner_.all_reduce(x, op, stream);
  }
  Ticket all_gather(TensorView send, TensorView recv, Stream stream) override {
    return inner_.all_gather(send, recv, stream);
  }
  Ticket reduce_scatter(TensorView send, TensorView recv, ReduceOp op, Stream stream) override {
    return inner_.reduce_scatter(send, recv, op, stream);
  }
  Ticket all_to_all(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                    std::span<const int64_t> recv_counts, Stream stream) override {
    return inner_.all_to_all(send, send_counts, recv, recv_counts, stream);
  }
  Ticket broadcast(TensorView x, int root, Stream stream) override {
    return inner_.broadcast(x, root, stream);
  }
  void barrier() override { inner_.barrier(); }
  void prepare(Device gpu, const comm::GpuLinkOptions& options) override {
    inner_.prepare(gpu, options);
  }
  void attach(const comm::SymmetricBuffer& buffer) override { inner_.attach(buffer); }
  void synchronize(const Stream& stream) override { inner_.synchronize(stream); }
  std::unique_ptr<comm::Communicator> split(int color, int key, const std::string& name) override {
    auto part = inner_.split(color, key, name);
    return part ? std::make_unique<Counting>(std::move(part), maxima_) : nullptr;
  }

 private:
  std::unique_ptr<comm::Communicator> owned_;
  comm::Communicator& inner_;
  int& maxima_;
};

std::vector<ParamSpec> specs_in(const QuantSpec& format, int ep, int ep_ranks, bool frozen) {
  std::vector<ParamSpec> out{vector_spec("norm.weight", 64)};
  for (const char* name : {"a.weight", "b.weight", "c.weight", "d.weight"}) {
    out.push_back(matrix_spec(name, 40, 64));
    out.back().frozen = frozen && *name < 'c';
  }
  const int64_t local = 4 / ep_ranks;
  for (const char* name : {"experts.fc1.weight", "experts.fc2.weight"}) {
    ParamSpec fc = matrix_spec(name, local * 48, 64);
    fc.tensors[0].shape = {4, 48, 64};
    fc.row_map = {{0, 0, ep * local * 48, local * 48}};
    fc.shape = {local, 48, 64};
    fc.expert = true;
    fc.domain = {gtp::Axis::kEdp};
    fc.kind = ParameterClass::kExpert;
    out.push_back(fc);
  }
  for (size_t i = 1; i < out.size(); ++i) {
    out[i].format = format;
    out[i].format_class = 1;
  }
  return out;
}

struct Counts {
  int publish = 0, step = 0;
};

Counts maxima_of(const QuantSpec& format, int ranks, int ep_ranks, int64_t bucket_elements,
                 bool frozen) {
  Counts counts;
  std::mutex mutex;
  comm::run_thread_ranks(ranks, {}, [&](comm::Communicator& plain) {
    int maxima = 0;
    Counting world(plain, maxima);
    const GridGroups groups({.dp = ranks, .ep = ep_ranks, .edp = ranks / ep_ranks}, world);
    OptimizerConfig config;
    config.bucket_elements = bucket_elements;
    DistributedOptimizer optimizer(specs_in(format, world.rank() % ep_ranks, ep_ranks, frozen),
                                   config, groups);
    maxima = 0;
    optimizer.initialize(7, {});
    Counts own{.publish = std::exchange(maxima, 0)};
    optimizer.step({.lr = 0.1, .tokens = 1}, {});
    own.step = maxima;
    const std::lock_guard lock(mutex);
    counts = own;
  });
  return counts;
}

TEST(WeightCast, TakesOneReductionOfADomainForAllBuckets) {
  for (const Format format : {Format::kFp8Tensor, Format::kFp8Block128x128, Format::kMxfp8,
                              Format::kMxfp8Tile32, Format::kNvfp4Tile16}) {
    const QuantSpec spec = QuantSpec::of(format);
    for (const int64_t elements : {3000, 1 << 20}) {  // a bucket a weight; few buckets
      EXPECT_EQ(maxima_of(spec, 1, 1, elements, false).step, 0) << name(format);
      for (const auto& [ranks, ep] : std::vector<std::pair<int, int>>{{2, 1}, {4, 2}}) {
        // Dense weights and experts.
        const Counts trained = maxima_of(spec, ranks, ep, elements, false);
        EXPECT_EQ(trained.step, 2) << name(format) << " " << ranks << " " << elements;
        EXPECT_EQ(trained.publish, 2) << name(format) << " " << ranks << " " << elements;
        // Frozen ones are cast when weights are published, and in no step.
        const Counts frozen = maxima_of(spec, ranks, ep, elements, true);
        EXPECT_EQ(frozen.step, 2) << name(format) << " " << ranks << " " << elements;
        EXPECT_EQ(frozen.publish, 3) << name(format) << " " << ranks << " " << elements;
      }
      EXPECT_EQ(maxima_of(spec, 2, 2, elements, false).step, 1);  // experts have one owner
    }
  }
}

}  // namespace
}  // namespace moiety::optim
