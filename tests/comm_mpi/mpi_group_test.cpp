// The promises of run_mpi_rank besides the communicator.
#include "moiety/comm/mpi_group.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/comm/local_group.h"
#include "moiety/comm/process.h"
#include "tests/support/mpi/world.h"

namespace moiety::comm {
namespace {

using testing::world;

TEST(MpiRank, KnowsItsPlace) {
  const mpi::Processes launched = mpi::processes();
  EXPECT_EQ(world().rank(), launched.rank);
  EXPECT_EQ(world().size(), launched.size);
  EXPECT_EQ(world().name(), "world");
  EXPECT_EQ(log_rank(), world().rank());
  EXPECT_EQ(thread_budget(), std::max(1, core_count() / world().size()));  // none is bound
  const mpi::Status status = mpi::status();
  if (!is_started_rank()) {
    EXPECT_TRUE(status.available);
    EXPECT_NE(status.text.find("libmoiety_mpi.so"), std::string::npos) << status.text;
  }
  EXPECT_EQ(mpi::dead_peer(), std::nullopt);
}

TEST(MpiRank, IsOneOnce) {
  try {
    run_mpi_rank({}, [](Communicator&) {});
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "run_mpi_rank: a process is a rank once");
  }
}

// Sub-groups that share ranks have messages of their own, however they came to be.
TEST(MpiRank, GroupsDoNotHearEachOther) {
  const int me = world().rank();
  for (int round = 0; round < 5; ++round) {
    // Ranks take part in different numbers of splits in between.
    const auto first = world().split(me == 0 ? 0 : 1, 0, "first");
    if (me != 0 && first->size() > 1) first->split(0, 0, "inner");
    const auto a = world().split(0, 0, "a"), b = world().split(0, -me, "b");
    Tensor x(DType::kInt32, {4}), y(DType::kInt32, {4});
    std::fill_n(x.data<int32_t>(), 4, 1 + me);
    std::fill_n(y.data<int32_t>(), 4, 100 * (1 + me));
    Ticket in_a = a->all_reduce(x, ReduceOp::kSum, Stream());
    Ticket in_b = b->all_reduce(y, ReduceOp::kSum, Stream());
    in_b.wait();
    in_a.wait();
    const int sum = world().size() * (world().size() + 1) / 2;
    EXPECT_EQ(x.data<int32_t>()[3], sum);
    EXPECT_EQ(y.data<int32_t>()[3], 100 * sum);
  }
}

}  // namespace
}  // namespace moiety::comm
