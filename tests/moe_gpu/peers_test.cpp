// Expert parallelism of ranks that are threads and share one GPU, or two: the conformance suite,
// several plans in flight, graphs, growth. The host runs the same steps in
// tests/moe/peers_test.cpp.
#include "moiety/base/copy.h"
#include "moiety/base/graph.h"
#include "tests/moe/early_run.h"
#include "tests/moe/ep_conformance.h"
#include "tests/moe/ep_quantized.h"
#include "tests/moe/ep_row_map.h"
#include "tests/moe_gpu/ranks_on_gpu.h"
#include "tests/moe_gpu/twins.h"
#include "tests/support/gpu_test.h"

namespace moiety::moe {
namespace {

// On so many GPUs.
class PeersGpu : public GpuTest, public testing::WithParamInterface<int> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && gpu_status().count < gpus()) GTEST_SKIP() << "one GPU";
  }
  virtual int gpus() const { return GetParam(); }
  static EpOptions options(const OnGpuRank& place, double deadline = 20) {
    return {
        .name = "moe", .deadline = Seconds(deadline), .chunk_rows = 4, .device = place.device()};
  }
  void run(int ranks, const std::function<void(comm::Communicator&, OnGpuRank)>& body,
           comm::GpuTransport transport = comm::GpuTransport::kAuto) {
    run_on_gpus(gpus(), ranks, Seconds(20), body, transport);
  }
  // What carries the operations of a communicator: NCCL, where each rank has a GPU.
  comm::GpuTransport carrier(int ranks) const {
    return ranks <= gpus() ? comm::GpuTransport::kNccl : comm::GpuTransport::kMapped;
  }

  template <class T, class Out>
  void run_case(const conformance::Case& c, int seed, EpTransport transport) {
    const bool carried = transport == EpTransport::kCollectives;
    const conformance::Problem<T> problem(c, seed);
    const conformance::Expected<T, Out> expected(problem);
    run(
        c.ranks,
        [&](comm::Communicator& world, const OnGpuRank& place) {
          SCOPED_TRACE(text("rank {} of case {}: {}", world.rank(), seed, c.describe()));
          conformance::RankRun<T, Out, OnGpuRank>(world, problem, expected, transport, place).run();
        },
        carried ? carrier(c.ranks) : comm::GpuTransport::kAuto);
  }
  template <class T>
  void run_case_of(const conformance::Case& c, int seed, EpTransport transport) {
    c.out_fp32 ? run_case<T, float>(c, seed, transport) : run_case<T, T>(c, seed, transport);
  }
  void run_any(conformance::Case c, int seed, EpTransport transport) {
    conformance::shrink(c);
    if (c.dtype == DType::kBFloat16) run_case_of<bf16>(c, seed, transport);
    if (c.dtype == DType::kFloat16) run_case_of<fp16>(c, seed, transport);
    if (c.dtype == DType::kFloat32) run_case_of<float>(c, seed, transport);
  }
};

INSTANTIATE_TEST_SUITE_P(Gpus, PeersGpu, testing::Values(1, 2));

// A part of the cases, first those on one GPU.
class PeersGpuCases : public PeersGpu {
 public:
  static constexpr int kParts = 8;

 protected:
  int gpus() const override { return 1 + GetParam() / kParts; }
  int part() const { return GetParam() % kParts; }
};
INSTANTIATE_TEST_SUITE_P(Part, PeersGpuCases, testing::Range(0, 2 * PeersGpuCases::kParts));

TEST_P(PeersGpuCases, HaveTheBitsOfTheOracle) {
  std::vector<conformance::Case> cases = conformance::all_cases();
  std::erase_if(cases, [](const conformance::Case& c) { return c.ranks == 1; });
  for (size_t i = part(); i < cases.size() && !HasFailure(); i += kParts) {
    run_any(cases[i], static_cast<int>(i), EpTransport::kAuto);
  }
}

// A communicator carries rows and counts, as between ranks that do not map each other's memory. On
// two GPUs that is NCCL for two ranks, whose communicators take a while to make.
TEST_P(PeersGpuCases, HaveTheBitsOfTheOracleOverCollectives) {
  std::vector<conformance::Case> cases = conformance::all_cases();
  std::erase_if(cases, [&](const conformance::Case& c) {
    return c.ranks == 1 || (gpus() == 2 && c.ranks > 2);
  });
  for (size_t i = part(); i < cases.size() && !HasFailure(); i += 2 * kParts) {
    run_any(cases[i], static_cast<int>(i), EpTransport::kCollectives);
  }
}

TEST_P(PeersGpu, MoveQuantizedRows) {
  std::vector<quantized::Case> cases = quantized::all_cases();
  std::erase_if(cases, [](const quantized::Case& c) { return c.ranks == 1; });
  for (size_t i = 0; i < cases.size() && !HasFailure(); ++i) {
    quantized::Case& c = cases[i];
    if (c.swizzled()) c.experts = std::min(c.experts, 6);  // each has 128 rows or none
    conformance::shrink(c);
    const quantized::Problem problem(c, static_cast<int>(i));
    run(c.ranks, [&](comm::Communicator& world, const OnGpuRank& place) {
      SCOPED_TRACE(text("rank {} of case {}: {}", world.rank(), i, c.describe()));
      quantized::run_rank(world, problem, EpTransport::kAuto, place);
    });
  }
}

TEST_P(PeersGpu, BringRowsOnceByAMap) {
  for (const row_map::Sizes& z : row_map::kSizes) {
    run(z.ranks, [&](comm::Communicator& world, OnGpuRank place) {
      SCOPED_TRACE(text("{} ranks, {} slots", z.ranks, z.capacity));
      row_map::run_rank(world, z, options(place), place, [](EpGroup&) {});
    });
  }
}

// prepare and dispatch in one: rows that turn out dead, a rank without tokens, other operations
// between, eager and in a graph.
TEST_P(PeersGpu, RowsMayComeBeforeCountsAreKnown) {
  int seed = 0;
  for (const int ranks : {2, 3, 8}) {
    for (const int experts : {7, 1500}) {
      const ExpertMap map(experts, ranks);
      std::vector<int64_t> tokens(static_cast<size_t>(ranks), 100);
      tokens[1] = ++seed % 2 == 0 ? 0 : 256;
      const int topk = 1 + 3 * (seed % 3);
      const Batch batch(map, tokens, topk, 4, 520, seed);
      std::vector<int64_t> capacity = batch.capacity;
      for (int64_t& c : capacity) c = c / (seed % 3 + 1);
      const EpLimits limits{.tokens = 256, .model = 520, .topk = topk, .depth = 2 + seed % 2};
      run(ranks, [&](comm::Communicator& world, const OnGpuRank& place) {
        SCOPED_TRACE(text("rank {} of {}, {} experts, K {}", world.rank(), ranks, experts, topk));
        EpOptions how = options(place);
        how.chunk_rows = 1 + seed % 5;
        EpGroup group = EpGroup::create(world, map, limits, how);
        EarlyRun<OnGpuRank> early(batch, world.rank(), capacity, place);
        const auto both = [&] {
          early.run(group, OverflowPolicy::kDrop, place.stream);
          early.run(group, OverflowPolicy::kDrop, place.stream);
        };
        both();
        world.barrier();
        const Graph graph(place.stream, both);
        world.barrier();
        for (int round = 0; round < 20; ++round) {
          graph.launch(place.stream);
          if (round % 3 == 0) both();
        }
        group.check(group.epoch());
        early.expect("early");
        group.close();
      });
    }
  }
}

// Plans in flight, eagerly and in a graph; and with other memory, which a graph of operations over
// collectives does not find.
void expect_plans_in_flight(comm::Communicator& world, OnGpuRank& place, const EpOptions& how) {
  Twins twins(world, place);
  EpGroup group = EpGroup::create(world, Step::map(), Step::kLimits, how);
  for (int round = 0; round < 20; ++round) twins.run(group, place.stream);
  group.check(group.epoch());
  world.barrier();
  const Graph graph(place.stream, [&] { twins.run(group, place.stream); });
  world.barrier();
  for (int round = 0; round < 20; ++round) {
    graph.launch(place.stream);
    if (round % 3 == 0) twins.run(group, place.stream);
  }
  group.check(group.epoch());
  EpLimits larger = Step::kLimits;
  larger.tokens *= 3;
  larger.depth = 3;
  if (how.transport != EpTransport::kCollectives) group.reserve(larger);
  for (int round = 0; round < 5; ++round) graph.launch(place.stream);
  group.check(group.epoch());
  twins.expect_same(place);
  group.close();
}

TEST_P(PeersGpu, PlansInFlightEagerAndInOneGraphThatOutlivesMemory) {
  run(Step::kRanks, [](comm::Communicator& world, OnGpuRank place) {
    expect_plans_in_flight(world, place, options(place));
  });
}

TEST_P(PeersGpu, PlansInFlightEagerAndInOneGraphOverCollectives) {
  run(
      Step::kRanks,
      [](comm::Communicator& world, OnGpuRank place) {
        EpOptions how = options(place);
        how.transport = EpTransport::kCollectives;
        expect_plans_in_flight(world, place, how);
      },
      carrier(Step::kRanks));
}

TEST_P(PeersGpu, ClosingReturnsAllMemory) {
  int64_t before = 0, after = 0;
  run(2, [&](comm::Communicator& world, const OnGpuRank& place) {
    const EpLimits limits{.tokens = 512, .model = 1024, .topk = 2};
    for (int round = 0; round < 20; ++round) {
      world.barrier();
      if (round == 2 && world.rank() == 0) before = gpu_free_memory(0);
      world.barrier();
      EpGroup group = EpGroup::create(world, {4, 2}, limits, options(place));
      EXPECT_EQ(group.bytes().total, EpGroup::bytes({4, 2}, limits, options(place)).total);
      group.close();
    }
    world.barrier();
    if (world.rank() == 0) after = gpu_free_memory(0);
    world.barrier();
  });
  EXPECT_GE(after, before - (2 << 20));
}

}  // namespace
}  // namespace moiety::moe
