#include "moiety/comm/gpu_transport.h"

#include <gtest/gtest.h>

#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/thread_group.h"

namespace moiety::comm {
namespace {

TEST(GpuTransport, NcclTakesStagingAndMemoryOfItsOwn) {
  EXPECT_EQ(nccl_link_bytes(1, true), 0);
  EXPECT_GT(nccl_link_bytes(2, true), nccl_link_bytes(2, false));
  EXPECT_GT(nccl_link_bytes(2, false), GpuLinkOptions{}.staging_bytes);
}

TEST(GpuTransport, NcclIsThereOrSomethingSaysWhyNot) {
  EXPECT_NE(nccl_status().text.find("NCCL"), std::string::npos) << nccl_status().text;
}

TEST(GpuTransport, RanksOfAProcessAreOnOneHost) {
  run_thread_ranks(3, {}, [](Communicator& world) {
    EXPECT_EQ(rank_on_host(world.bootstrap()), world.rank());
    EXPECT_TRUE(maps_gpu_memory(world));
    const auto pair = world.split(world.rank() == 0 ? -1 : 0, 0, "pair");
    if (pair) {
      EXPECT_EQ(rank_on_host(pair->bootstrap()), world.rank() - 1);
    }
  });
}

// Memory is not mapped where NCCL is to carry the operations, on GPUs alone.
TEST(GpuTransport, MemoryOfCpusIsMappedWhateverGpusUse) {
  run_thread_ranks(2, {.gpu_transport = GpuTransport::kNccl},
                   [](Communicator& world) { EXPECT_TRUE(mappable(world)); });
}

}  // namespace
}  // namespace moiety::comm
