// Ranks that are processes, on GPUs of their own or sharing one, through memory that they map and over
// NCCL: the contract of every transport, that memory, graphs. Processes that share a GPU take turns on
// it, some milliseconds each, so whatever waits for a peer takes a turn.
#include "moiety/base/graph.h"
#include "tests/comm_gpu/gpu_place.h"
#include "tests/support/error_of.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mpi/world.h"

namespace moiety::comm {
namespace {

using testing::world;
using Floats = GpuPlace::Array<float>;

// What this process has on the GPU, for all tests.
RankMemory& memory() {
  static auto& it = *new RankMemory(gpu_of(world().rank()));  // CUDA may end before it
  return it;
}

template <bool shared>
struct ProcessBackend {
  using Place = GpuPlace;
  static void run(int ranks, Seconds deadline, const std::function<void(Communicator&)>& body) {
    if (gpu_status().count == 0) GTEST_SKIP() << gpu_status().text;
    if (testing::over_nccl()) GTEST_SKIP() << "shares a GPU, without --nccl";
    testing::MpiBackend::run(ranks, deadline, [&](Communicator& comm) {
      run_gpu_rank(memory(), comm, shared, {.staging_bytes = 1 << 20}, body);
    });
  }
};

// Each on a GPU of its own (--nccl).
struct NcclBackend {
  using Place = GpuPlace;
  static void run(int ranks, Seconds deadline, const std::function<void(Communicator&)>& body) {
    if (!testing::over_nccl()) GTEST_SKIP() << "without --nccl";
    static auto& own = *new RankMemory(Device{DeviceType::kCuda, world().rank()});
    testing::MpiBackend::run(ranks, deadline, [&](Communicator& comm) {
      run_gpu_rank(own, comm, false, {.staging_bytes = 1 << 20}, body);
    });
  }
};

class CommGpuRanks : public GpuTest {
 protected:
  void SetUp() override {
    if (testing::over_nccl()) GTEST_SKIP() << "shares a GPU, without --nccl";
    GpuTest::SetUp();
  }
};

TEST_F(CommGpuRanks, MapEachOthersMemory) {
  EXPECT_TRUE(mappable(world(), memory().gpu));
  const int me = world().rank(), ranks = world().size();
  const Stream on =
      memory().stream;  // of this rank's GPU, which alone of its process maps the memory
  SymmetricBuffer buffer = SymmetricBuffer::create(world(), "test", 5000, memory().gpu);
  const TensorView mine(buffer.local(), DType::kUInt8, {5000}, memory().gpu);
  const Tensor zeros = to_host(mine, on);
  for (int64_t i = 0; i < 5000; ++i) ASSERT_EQ(zeros.data<uint8_t>()[i], 0);
  world().barrier();
  for (int r = 0; r < ranks; ++r) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.peer(r)) % (2 << 20), 0u);
    // One range, the ranks in order.
    EXPECT_EQ(buffer.peer(r) - buffer.peer(0), r * (buffer.peer(1) - buffer.peer(0)));
  }
  const int next = (me + 1) % ranks;
  fill_bytes(TensorView(buffer.peer(next), DType::kUInt8, {5000}, memory().gpu), uint8_t(1 + me),
             on);
  on.synchronize();
  world().barrier();
  EXPECT_EQ(to_host(mine, on).data<uint8_t>()[4999], 1 + (me + ranks - 1) % ranks);
  buffer.close();
}

TEST_F(CommGpuRanks, CreationFailsAlikeOnAllRanks) {
  // Rank 1 alone asks for memory of a CPU, then all for more than there is.
  EXPECT_EQ(error_of([&] {
              SymmetricBuffer::create(world(), "mixed", 64, world().rank() == 1 ? Device{} : kGpu);
            }),
            "symmetric buffer \"mixed\": rank 0 asks for memory of a GPU, rank 1 of a CPU");
  const std::string error =
      error_of([&] { SymmetricBuffer::create(world(), "gradients", int64_t{1} << 42, kGpu); });
  EXPECT_NE(error.find("symmetric buffer \"gradients\": rank 0 could not allocate 4.0 TiB on "
                       "cuda:0: out of memory ("),
            std::string::npos)
      << error;
  SymmetricBuffer::create(world(), "good", 64, kGpu).close();
}

TEST_F(CommGpuRanks, ClosingReturnsAllMemory) {
  int64_t before = 0;
  for (int i = 0; i < 8; ++i) {
    world().barrier();
    if (i == 2) before = gpu_free_memory(0);
    world().barrier();
    SymmetricBuffer::create(world(), "test", 40 << 20, kGpu).close();
  }
  world().barrier();
  // A peer lets go of its mapping when it comes to that.
  const Deadline deadline(Seconds(5));
  while (gpu_free_memory(0) < before - (2 << 20) && !deadline.expired()) {
  }
  EXPECT_GE(gpu_free_memory(0), before - (2 << 20));
}

TEST_F(CommGpuRanks, GraphsGiveWhatEagerOperationsGive) {
  run_gpu_rank(memory(), world(), true, {.staging_bytes = 1 << 20}, [&](Communicator& comm) {
    const Stream on = memory().stream;
    GpuPlace::begin(comm);
    const int64_t n = 150001, ranks = comm.size();
    Floats input{std::vector<float>(ranks * n)}, part{std::vector<float>(n)},
        whole{std::vector<float>(ranks * n)};
    Buffer inputs = Buffer::pinned(4 * ranks * n);
    auto* fresh = reinterpret_cast<float*>(inputs.data());
    const auto step = [&] {
      copy(input.view(), TensorView(fresh, DType::kFloat32, {ranks * n}), on);
      comm.reduce_scatter(input.view(), part.view(), ReduceOp::kSum, on).wait();
      comm.all_gather(part.view(), whole.view(), on).wait();
    };
    Graph graph = captured(comm, on, step);
    for (int round = 0; round < 3; ++round) {
      for (int64_t i = 0; i < ranks * n; ++i) {
        fresh[i] = conformance::value<float>(comm.rank(), i, uint64_t(round));
      }
      graph.launch(on);
      comm.synchronize(on);
      const std::vector<float> got = whole.get();
      for (int64_t i = 0; i < ranks * n; i += 97) {
        ASSERT_EQ(got[i],
                  conformance::reduced<float>(int(ranks), i, ReduceOp::kSum, uint64_t(round)));
      }
      step();
      EXPECT_TRUE(same_bits(whole.get(), got));
    }
  });
}

}  // namespace

namespace conformance {
using ProcessBackends = ::testing::Types<ProcessBackend<false>, ProcessBackend<true>>;
INSTANTIATE_TYPED_TEST_SUITE_P(GpuRanks, Conformance, ProcessBackends);
INSTANTIATE_TYPED_TEST_SUITE_P(NcclRanks, Conformance, NcclBackend);
}  // namespace conformance
}  // namespace moiety::comm
