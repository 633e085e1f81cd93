// The exchange of experts among processes on GPUs of their own, or on one that they share: small cases
// of the conformance suite, through memory that they map and over their communicator, which is NCCL's
// under --nccl. Processes that share a GPU take turns on it, some milliseconds each, so there are few
// rows; compute-sanitizer runs HaveTheBitsOfAFewCases alone.
#include "tests/moe/early_run.h"
#include "tests/moe/ep_conformance.h"
#include "tests/moe/ep_quantized.h"
#include "tests/moe/ep_row_map.h"
#include "tests/moe_gpu/ranks_on_gpu.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mpi/world.h"

namespace moiety::moe {
namespace {

using comm::testing::over_nccl;
using comm::testing::world;

OnGpuRank place() { return OnGpuRank(GpuRank::of(world().rank(), gpu_status().count)); }

template <class T, class Out>
void run_case(const conformance::Case& c, int seed, EpTransport transport) {
  SCOPED_TRACE(text("rank {} of case {}: {}", world().rank(), seed, c.describe()));
  const conformance::Problem<T> problem(c, seed);
  const conformance::Expected<T, Out> expected(problem);
  conformance::RankRun<T, Out, OnGpuRank>(world(), problem, expected, transport, place()).run();
}
template <class T>
void run_case_of(const conformance::Case& c, int seed, EpTransport transport) {
  c.out_fp32 ? run_case<T, float>(c, seed, transport) : run_case<T, T>(c, seed, transport);
}

// So many cases of as many ranks as there are processes, with few rows.
void run_cases(size_t most, EpTransport transport) {
  std::vector<conformance::Case> cases = conformance::all_cases();
  std::erase_if(cases, [&](const conformance::Case& c) {
    const bool carried = transport == EpTransport::kCollectives;
    return c.experts > 64 || (carried && c.reduction == Reduction::kToken);
  });
  const size_t every = std::max<size_t>(1, cases.size() / most);
  for (size_t i = 0; i < cases.size() && !testing::Test::HasFailure(); i += every) {
    conformance::Case& c = cases[i];
    c.ranks = world().size();
    c.tokens = std::min<int64_t>(c.tokens, 17);
    c.model = std::min<int64_t>(c.model, 200);
    const int seed = static_cast<int>(i);
    if (c.dtype == DType::kBFloat16) run_case_of<bf16>(c, seed, transport);
    if (c.dtype == DType::kFloat16) run_case_of<fp16>(c, seed, transport);
    if (c.dtype == DType::kFloat32) run_case_of<float>(c, seed, transport);
  }
}

class EpGpuRanks : public GpuTest {
 protected:
  // NCCL refuses processes that share a GPU; without --nccl they map each other's memory.
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) GpuRank::of(world().rank(), gpu_status().count);
    world().barrier();
  }
};

TEST_F(EpGpuRanks, HaveTheBitsOfAFewCases) {
  if (over_nccl()) GTEST_SKIP() << "memory is not mapped";
  run_cases(3, EpTransport::kMapped);
}
TEST_F(EpGpuRanks, HaveTheBitsOfTheOracle) {
  if (over_nccl()) GTEST_SKIP() << "memory is not mapped";
  run_cases(40, EpTransport::kMapped);
}
TEST_F(EpGpuRanks, HaveTheBitsOfTheOracleOverCollectives) {
  run_cases(20, EpTransport::kCollectives);
}

TEST_F(EpGpuRanks, MoveQuantizedRows) {
  if (over_nccl()) GTEST_SKIP() << "memory is not mapped";
  const std::vector<quantized::Case> cases = quantized::all_cases();
  for (size_t i = 0; i < cases.size() && !HasFailure(); i += 8) {
    quantized::Case c = cases[i];
    c.ranks = world().size();
    c.tokens = std::min<int64_t>(c.tokens, 17);
    c.model = std::min<int64_t>(c.model, 300);
    c.experts = std::min(c.experts, 6);
    conformance::shrink(c);
    const quantized::Problem problem(c, static_cast<int>(i));
    SCOPED_TRACE(text("rank {} of case {}: {}", world().rank(), i, c.describe()));
    quantized::run_rank(world(), problem, EpTransport::kMapped, place());
  }
}

TEST_F(EpGpuRanks, RowsMayComeBeforeCountsAreKnown) {
  if (over_nccl()) GTEST_SKIP() << "memory is not mapped";
  for (const int experts : {7, 1500}) {
    const ExpertMap map(experts, world().size());
    const Batch batch(map, std::vector<int64_t>(static_cast<size_t>(world().size()), 17), 4, 4, 200,
                      1);
    OnGpuRank here = place();
    EpGroup group = EpGroup::create(world(), map, {.tokens = 40, .model = 200, .topk = 4},
                                    {.name = "moe", .chunk_rows = 3, .device = here.device()});
    EarlyRun<OnGpuRank> early(batch, world().rank(), batch.capacity, here);
    for (int round = 0; round < 3; ++round) early.run(group, OverflowPolicy::kDrop, here.stream);
    group.check(group.epoch());
    early.expect("early");
    group.close();
  }
}

TEST_F(EpGpuRanks, BringRowsOnceByAMap) {
  for (row_map::Sizes z : row_map::kSizes) {
    z.ranks = world().size();
    OnGpuRank here = place();
    row_map::run_rank(world(), z, {.chunk_rows = 4, .device = here.device()}, here,
                      [](EpGroup&) {});
  }
}

}  // namespace
}  // namespace moiety::moe
