// What ranks on GPUs say of a rank that does not come, or that does something else: in eager calls and
// in replays, within the deadline and a second. The host runs the same steps in
// tests/moe/peers_test.cpp.
#include <chrono>

#include "moiety/base/graph.h"
#include "moiety/comm/gpu_waits.h"
#include "tests/moe_gpu/twins.h"
#include "tests/support/error_of.h"
#include "tests/support/gpu_test.h"

namespace moiety::moe {
namespace {

// Ranks are threads on so many GPUs.
class PeersFaultGpu : public GpuTest, public testing::WithParamInterface<int> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && gpu_status().count < GetParam()) GTEST_SKIP() << "one GPU";
  }
  static EpOptions options(const OnGpuRank& place, double deadline = 20) {
    return {
        .name = "moe", .deadline = Seconds(deadline), .chunk_rows = 4, .device = place.device()};
  }
  void run(int ranks, const std::function<void(comm::Communicator&, OnGpuRank)>& body) {
    run_on_gpus(GetParam(), ranks, Seconds(20), body);
  }
};
INSTANTIATE_TEST_SUITE_P(Gpus, PeersFaultGpu, testing::Values(1, 2));

// Whether kernels behind the rank's waits can see that one has failed.
bool knows_of_fault(comm::Communicator& world, const OnGpuRank& place) {
  for (const uint64_t* word : comm::fault_words(world)) {
    const TensorView there(const_cast<uint64_t*>(word), DType::kUInt64, {1}, place.device());
    if (*to_host(there, place.stream).data<uint64_t>() != 0) return true;
  }
  return false;
}

// A new group whose operations, behind a prepare, fail by `act` on some rank: what check() then says
// here. All of it ends in time.
template <class Act>
std::string fail_with(comm::Communicator& world, const OnGpuRank& place, Twins& twins,
                      const EpOptions& options, Act&& act) {
  EpGroup group = EpGroup::create(world, Step::map(), Step::kLimits, options);
  twins.got[0]->prepare_plan(group, twins.at(), place.stream);
  place.stream.synchronize();
  world.barrier();
  const auto begin = std::chrono::steady_clock::now();
  const std::string thrown = error_of([&] { act(group); });  // by an operation behind the first
  place.stream.synchronize();
  EXPECT_LT((std::chrono::steady_clock::now() - begin) / Seconds(1), options.deadline.count() + 1);
  const std::string said = error_of([&] { group.check(); });
  EXPECT_TRUE(thrown == "no error" || thrown == said) << thrown;
  EXPECT_EQ(knows_of_fault(world, place), said != "no error");
  world.barrier();
  group.close();
  return said;
}
// Ranks 0 and 1 waited in vain for rank 2 in a dispatch, or one of them stopped the other.
void expect_late_dispatch(const std::string* said_R, int epoch) {
  for (const int r : {0, 1}) {
    const bool mine =
        said_R[r].find(text("ep dispatch, group \"moe\", epoch {}: rank {} waited 0.5 "
                            "s for rank 2, chunk 1 of ",
                            epoch, r)) == 0;
    EXPECT_TRUE(mine ||
                said_R[r] == text("ep, group \"moe\", epoch {}: stopped by rank {}, which waited "
                                  "for rank 2",
                                  epoch, 1 - r))
        << said_R[r];
  }
}
void expect_said(const std::string* said_R, std::string_view what) {
  for (int r = 0; r < Step::kRanks; ++r) {
    EXPECT_NE(said_R[r].find(what), std::string::npos) << said_R[r];
  }
}

// A rank that does not come is named after the deadline; the context, and another group, go on.
TEST_P(PeersFaultGpu, ALateRankAndAnotherOperationAreNamed) {
  std::string late[Step::kRanks], replay[Step::kRanks], other[Step::kRanks];
  run(Step::kRanks, [&](comm::Communicator& world, OnGpuRank place) {
    const int me = world.rank();
    Twins twins(world, place);
    Step& step = *twins.got[0];
    const auto forward = [&](EpGroup& group) { step.forward(group, twins.at(), place.stream); };
    late[me] = fail_with(world, place, twins, options(place, 0.5), [&](EpGroup& group) {
      if (me != 2) forward(group);
    });
    replay[me] = fail_with(world, place, twins, options(place, 0.5), [&](EpGroup& group) {
      forward(group);
      place.stream.synchronize();
      world.barrier();
      const Graph graph(place.stream, [&] { forward(group); });
      world.barrier();
      for (int round = me == 2 ? 1 : 0; round < 3; ++round) graph.launch(place.stream);
      place.stream.synchronize();
      world.barrier();
    });
    other[me] = fail_with(world, place, twins, options(place, 10), [&](EpGroup& group) {
      me == 1 ? step.backward(group, twins.at(), place.stream) : forward(group);
    });
    EpGroup fresh = EpGroup::create(world, Step::map(), Step::kLimits, options(place));
    twins.run(fresh, place.stream);
    fresh.check(fresh.epoch());
    twins.expect_same(place);
    fresh.close();
  });
  expect_late_dispatch(late, 2);
  expect_late_dispatch(replay, 8);
  expect_said(other, "rank 1 runs combine_backward(bf16, 80 B) of plan 1");
}

TEST_P(PeersFaultGpu, OtherColumnsAndAnotherPrepareAreNamed) {
  std::string columns[Step::kRanks], alignment[Step::kRanks];
  run(Step::kRanks, [&](comm::Communicator& world, OnGpuRank place) {
    const int me = world.rank();
    Twins twins(world, place);
    Step& step = *twins.got[0];
    const auto first_columns = [&](const Tensor& x, int64_t n) {
      const TensorView t = twins.there.at(&x);
      const int64_t sizes[] = {t.size(0), n}, strides[] = {t.stride(0), 1};
      return TensorView(t.raw(), t.dtype(), sizes, strides, t.device());
    };
    columns[me] = fail_with(world, place, twins, options(place, 10), [&](EpGroup& group) {
      const int64_t n = me == 2 ? 24 : Step::kModel;
      dispatch(group, step.plan,
               {.x_TD = first_columns(step.x_in, n), .rows_CD = first_columns(step.rows, n)},
               place.stream);
    });
    alignment[me] = fail_with(world, place, twins, options(place, 10), [&](EpGroup& group) {
      const PrepareArgs args{.idx_TK = twins.there.at(&step.idx),
                             .alignment = me == 0 ? 4 : 8,
                             .capacity = Step::kCapacity};
      prepare(group, args, twins.there.at(&step.memory), place.stream);
    });
  });
  expect_said(columns, "dispatch(bf16, 48 B) of plan 1");
  int named = 0;
  for (const std::string& said : alignment) {
    const bool mine = said ==
                      "ep prepare, group \"moe\", epoch 2: alignment differs: rank 0 has 4, rank 1 "
                      "has 8";
    named += mine;
    EXPECT_TRUE(mine || said.find("whose prepare differs from that of rank") != std::string::npos)
        << said;
  }
  EXPECT_GT(named, 0);
}

}  // namespace
}  // namespace moiety::moe
