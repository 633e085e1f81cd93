// Partial casts on a GPU: after the gather what quantize() gives, in the reduction buffer what the
// CPU puts there, and no other byte changed.
#include "moiety/quant/partial_cast.h"

#include <chrono>
#include <cstdio>

#include "moiety/base/graph.h"
#include "tests/quant/partial_cast_cases.h"
#include "tests/quant_gpu/gpu_cases.h"

namespace moiety::quant {
namespace {

class PartialCastGpu : public QuantGpuTest {
 protected:
  void expect_all(const PartialProblems& problems) {
    for (const PartialProblem& p : problems) {
      ASSERT_EQ(
          run_partial_cast(p.weights, {{.aligned = p.aligned},
                                       {.aligned = p.aligned, .device = kGpu},
                                       {.aligned = p.aligned, .shard_only = true, .device = kGpu}}),
          "");
    }
  }
};

TEST_F(PartialCastGpu, EvenAndRandomShards) { expect_all(even_and_random_shards()); }
TEST_F(PartialCastGpu, MastersAndData) { expect_all(masters_and_data()); }
TEST_F(PartialCastGpu, OddBoundaries) { expect_all(odd_boundaries()); }
TEST_F(PartialCastGpu, EmptyRanksAndTensors) { expect_all(empty_ranks_and_tensors()); }
TEST_F(PartialCastGpu, NanOfOneRank) { expect_all(nan_of_one_rank()); }
TEST_F(PartialCastGpu, AlignedShards) { expect_all(aligned_shards()); }
TEST_F(PartialCastGpu, ManyMixedTensorsInOneCall) { expect_all({{mixed_weights(300, 3, 9)}}); }

// All formats in one call, in shards as parameters have them and in others, of many blocks.
TEST_F(PartialCastGpu, LargeWeights) {
  for (const int64_t unit : {128, 1}) {
    PartialProblem p;
    for (const PartialKind& kind : kPartialKinds) {
      for (const DType master : {DType::kFloat32, DType::kBFloat16}) {
        const Shape s = unit == 1 ? Shape{301, 1003} : Shape{520, 1024};
        std::vector<int64_t> cuts = random_cuts(s.rows * s.cols, 3, p.weights.size());
        for (int64_t& cut : cuts) cut = cut / unit * unit;
        cuts.back() = s.rows * s.cols;
        p.weights.push_back(make_weight(kind, s.rows, s.cols, cuts, unit == 1 ? 3 : 4));
        p.weights.back().master = master;
      }
    }
    expect_all({p});
  }
}

// Weights of one rank that owns them wholly, on a device.
class Weights {
 public:
  Weights(int64_t count, Device device) : stream_(Stream::on(device)) {
    std::vector<PartialCastItem> items;
    for (int64_t i = 0; i < count; ++i) {
      const PartialKind& kind = kPartialKinds[i % std::ssize(kPartialKinds)];
      PartialCastItem item{make_weight(kind, 0, 0, {}).spec, 65, 300, 0, 65 * 300, kind.col, false};
      items.push_back(item);
      masters_.emplace_back(DType::kFloat32, std::initializer_list<int64_t>{item.end}, device);
      out_.emplace_back(item.spec, item.rows, item.cols, Directions{true, item.col}, device);
    }
    plan_ = std::make_unique<PartialCastPlan>(items, false);
    std::vector<PartialCastArrays> arrays;
    for (int64_t i = 0; i < count; ++i) arrays.push_back({masters_[i], out_[i]});
    table_ = std::make_unique<PartialCastTable>(*plan_, arrays);
    reduction_ = Tensor(DType::kUInt8, {plan_->reduction_bytes()}, device);
  }
  void set(size_t i, const TensorView& master) { copy(masters_[i], master, stream_); }
  void cast(const Stream& stream) const {
    partial_amax(*plan_, *table_, reduction_, stream);
    partial_cast(*plan_, *table_, reduction_, stream);
  }
  const QuantizedTensor& out(size_t i) const { return out_[i]; }
  const Tensor& reduction() const { return reduction_; }

 private:
  Stream stream_;
  std::vector<Tensor> masters_;
  std::vector<QuantizedTensor> out_;
  std::unique_ptr<PartialCastPlan> plan_;
  std::unique_ptr<PartialCastTable> table_;
  Tensor reduction_;
};

TEST_F(PartialCastGpu, CapturedGraphReadsChangedData) {
  const int64_t count = std::ssize(kPartialKinds);
  Weights gpu(count, kGpu), cpu(count, {});
  const Graph graph(stream, [&] { gpu.cast(stream); });
  EXPECT_EQ(graph.nodes(), 3);  // the buffer is zeroed, and a kernel for each phase
  for (const Data data : {Data::kNormal, Data::kOneNan, Data::kAllZero, Data::kHugeAndTiny}) {
    for (int64_t i = 0; i < count; ++i) {
      const Tensor x(DType::kFloat32, {65, 300});
      fill(x, data, static_cast<uint32_t>(i));
      gpu.set(i, x.view().reshape({65 * 300}));
      cpu.set(i, x.view().reshape({65 * 300}));
    }
    graph.launch(stream);
    cpu.cast(Stream());
    EXPECT_EQ(difference("reduction", to_host(gpu.reduction(), stream), cpu.reduction()), "");
    for (int64_t i = 0; i < count; ++i) {
      QuantizedView got = gpu.out(i).view();
      std::vector<Tensor> copies;
      for (TensorView* x : {&got.row_data, &got.row_scales, &got.col_data, &got.col_scales,
                            &got.amax, &got.tensor_scale, &got.flags}) {
        if (!x->defined()) continue;
        copies.push_back(to_host(*x, stream));
        *x = copies.back();
      }
      EXPECT_EQ(difference(got, cpu.out(i)), "") << i << " " << name(data);
    }
  }
}

// Prints the time that the host spends on a call; it does not grow with the number of tensors.
TEST_F(PartialCastGpu, HostTimeOfACall) {
  for (const int64_t tensors : {1, 1000}) {
    const Weights weights(tensors, kGpu);
    weights.cast(stream);
    stream.synchronize();
    constexpr int kCalls = 100;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) weights.cast(stream);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    stream.synchronize();
    std::printf("partial_amax and partial_cast of %lld tensors: %.1f us of the host\n",
                static_cast<long long>(tensors), time.count() / kCalls);
  }
}

TEST_F(PartialCastGpu, NoTensors) {
  const PartialCastPlan plan({}, false);
  const PartialCastTable table(plan, {});
  const Tensor reduction(DType::kUInt8, {0}, kGpu);
  partial_amax(plan, table, reduction, stream);
  partial_cast(plan, table, reduction, stream);
  stream.synchronize();
}

TEST_F(PartialCastGpu, AllArraysAreOnTheStreamsDevice) {
  const QuantSpec spec = QuantSpec::of(Format::kMxfp8);
  const PartialCastItem item{spec, 32, 48, 0, 32 * 48, false, false};
  const PartialCastPlan plan(std::span(&item, 1), false);
  const QuantizedTensor out(spec, 32, 48, {true, false}, kGpu);
  const Tensor here(DType::kFloat32, {32 * 48}), there(DType::kFloat32, {32 * 48}, kGpu);
  PartialCastArrays arrays{here, out};
  const auto make = [&] { PartialCastTable(plan, std::span(&arrays, 1)); };
  EXPECT_NE(
      kind_and_error_of(make).find("item 0: master float32[1536] is on cpu, others on cuda:0"),
      std::string::npos);
  arrays.master = there;
  const PartialCastTable table(plan, std::span(&arrays, 1));
  const Tensor reduction(DType::kUInt8, {plan.reduction_bytes()});
  EXPECT_NE(
      kind_and_error_of([&] { partial_amax(plan, table, reduction, Stream()); }).find("cuda:0"),
      std::string::npos);
  EXPECT_NE(
      kind_and_error_of([&] { partial_cast(plan, table, reduction, stream); }).find("reduction is"),
      std::string::npos);
}

}  // namespace
}  // namespace moiety::quant
