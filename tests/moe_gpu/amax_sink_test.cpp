// The amax of the rows that a dispatch brings to each expert, on GPUs.
#include <bit>
#include <random>

#include "tests/moe_gpu/twins.h"
#include "tests/support/gpu_test.h"

namespace moiety::moe {
namespace {

class AmaxSinkGpu : public GpuTest {};

// Whether `amax` has that of each local expert's rows, bf16.
void expect_amax_of_experts(const EpPlan& plan, const Tensor& rows, const Tensor& amax,
                            const Stream& stream) {
  const Tensor offset = to_host(plan.offset, stream), real = to_host(plan.rows_real, stream);
  const int64_t model = rows.view().size(1);
  for (int64_t e = 0; e < amax.view().size(0); ++e) {
    const auto* first =
        reinterpret_cast<const uint16_t*>(rows.view().raw()) + offset.data<int64_t>()[e] * model;
    uint32_t most = 0;
    for (int64_t i = 0; i < real.data<int64_t>()[e] * model; ++i) {
      most = std::max<uint32_t>(most, (first[i] & 0x7FFFu) << 16);
    }
    EXPECT_EQ(std::bit_cast<uint32_t>(amax.data<float>()[e]), most) << "expert " << e;
  }
}

TEST_F(AmaxSinkGpu, IsFilledByOneRank) {
  const EpLimits limits{.tokens = 200, .model = 100, .topk = 2};
  Threads::run(1, [&](comm::Communicator& world) {
    EpGroup g = EpGroup::create(world, {5, 1}, limits, {.name = "moe", .device = kGpu});
    std::mt19937 random(3);
    const Tensor idx(DType::kInt32, {200, 2}), x(DType::kBFloat16, {200, 100});
    for (int i = 0; i < 400; ++i) idx.data<int32_t>()[i] = static_cast<int32_t>(random() % 4);
    for (int i = 0; i < 20000; ++i) x.data<bf16>()[i] = bf16(0.01f * float(random() % 2001) - 10);
    x.data<bf16>()[707] = bf16(-INFINITY);
    x.data<bf16>()[1999] = bf16(NAN);
    const Tensor idx_there(DType::kInt32, {200, 2}, kGpu),
        x_there(DType::kBFloat16, {200, 100}, kGpu);
    const Tensor memory(DType::kUInt8, {1 << 16}, kGpu), rows(DType::kBFloat16, {440, 100}, kGpu),
        amax(DType::kFloat32, {5}, kGpu);
    copy(idx_there, idx, stream);
    copy(x_there, x, stream);
    const EpPlan plan =
        prepare(g, {.idx_TK = idx_there, .alignment = 8, .capacity = 440}, memory, stream);
    dispatch(g, plan, {.x_TD = x_there, .rows_CD = rows, .sink = {amax}}, stream);
    expect_amax_of_experts(plan, to_host(rows, stream), to_host(amax, stream), stream);
    g.close();
  });
}

// The amax of the rows of each expert, for a quantization that follows.
TEST_F(AmaxSinkGpu, IsFilledByEveryRank) {
  run_on_gpus(1, Step::kRanks, Seconds(20), [](comm::Communicator& world, OnGpuRank place) {
    Twins twins(world, place);
    Step& step = *twins.got[0];
    const Tensor amax(DType::kFloat32, {Step::map().local_count(world.rank())});
    const TensorView sink = place(amax, amax);
    EpGroup group =
        EpGroup::create(world, Step::map(), Step::kLimits,
                        {.name = "moe", .deadline = Seconds(20), .device = place.device()});
    step.prepare_plan(group, twins.at(), place.stream);
    const TensorView rows = twins.there.at(&step.rows);
    dispatch(group, step.plan,
             {.x_TD = twins.there.at(&step.x_in), .rows_CD = rows, .sink = {sink}}, place.stream);
    place.back();
    expect_amax_of_experts(step.plan, step.rows, amax, place.stream);
    group.close();
  });
}

}  // namespace
}  // namespace moiety::moe
