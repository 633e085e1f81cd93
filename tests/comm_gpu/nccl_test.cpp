// Ranks over NCCL, each on a GPU of its own: the contract of every transport, graphs, failures. What
// needs no GPU is in tests/comm/nccl_link_test.cpp.
#include <chrono>
#include <regex>
#include <thread>

#include "moiety/base/graph.h"
#include "tests/comm_gpu/gpu_place.h"
#include "tests/support/error_of.h"
#include "tests/support/gpu_test.h"

namespace moiety::comm {
namespace {

using conformance::reduced;
using conformance::value;
using conformance::values;
using Floats = GpuPlace::Array<float>;

constexpr GpuLinkOptions kOptions{.staging_bytes = 1 << 20};

ThreadGroupOptions over_nccl(double deadline = 20) {
  return {.deadline = Seconds(deadline), .gpu_transport = GpuTransport::kNccl};
}

class NcclGpu : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    if (!nccl_status().available) GTEST_SKIP() << nccl_status().text;
    if (gpu_status().count < 2) GTEST_SKIP() << "needs two GPUs";
  }
};

TEST_F(NcclGpu, GraphsGiveWhatEagerOperationsGive) {
  run_ranks_apart(2, over_nccl(), false, kOptions, [&](Communicator& comm) {
    RankMemory& memory = *RankMemory::mine();
    const Stream stream = memory.stream;
    GpuPlace::begin(comm);
    const auto other = comm.split(0, -comm.rank(), "other");
    other->prepare(memory.gpu, kOptions);
    const int64_t n = 150001;
    Floats input{std::vector<float>(2 * n)}, part{std::vector<float>(n)},
        whole{std::vector<float>(2 * n)}, little{std::vector<float>(1000)};
    Buffer inputs = Buffer::pinned(8 * n);
    auto* fresh = reinterpret_cast<float*>(inputs.data());
    const Stream beside = Stream::on(memory.gpu);
    const auto step = [&] {
      copy(input.view(), TensorView(fresh, DType::kFloat32, {2 * n}), stream);
      comm.reduce_scatter(input.view(), part.view(), ReduceOp::kSum, stream).wait();
      comm.all_gather(part.view(), whole.view(), stream).wait();
      copy(little.view(), whole.view().slice(0, 5, 1005), stream);
      Event fork, join;
      fork.record(stream);
      beside.wait(fork);
      other->all_reduce(little.view(), ReduceOp::kSum, beside).wait();
      comm.all_reduce(whole.view(), ReduceOp::kMin, stream).wait();
      join.record(beside);
      stream.wait(join);
    };
    expect_replays_are_eager(comm, stream, {fresh, size_t(2 * n)}, whole, little, step);
  });
}

TEST_F(NcclGpu, LargeOperandsAndManyOperations) {
  run_ranks_apart(2, over_nccl(), false, {.staging_bytes = 4 << 20}, [&](Communicator& comm) {
    GpuPlace::begin(comm);
    const Stream stream = GpuPlace::stream();
    const int64_t n = 3000001;
    Floats x(values<float>(comm.rank(), n)), parts(std::vector<float>(2 * n));
    comm.all_gather(x.view(), parts.view(), stream).wait();
    comm.all_reduce(x.view(), ReduceOp::kSum, stream).wait();
    const std::vector<float> sums = x.get(), all = parts.get();
    for (int64_t i = 0; i < n; i += 13) {
      ASSERT_EQ(sums[i], reduced<float>(2, i, ReduceOp::kSum)) << i;
      ASSERT_EQ(all[n + i], value<float>(1, i)) << i;
    }
    // A host far ahead does not fill its queue.
    for (int i = 0; i < 2000; ++i) {
      comm.all_reduce(x.view().slice(0, 0, 100), ReduceOp::kMax, stream).wait();
    }
    EXPECT_EQ(x.get()[0], reduced<float>(2, 0, ReduceOp::kSum));
  });
}

// What the ranks say, where they fail, and that the next group works.
std::vector<std::string> errors_of(double deadline,
                                   const std::function<void(Communicator&, const Stream&)>& body) {
  std::vector<std::string> out(2);
  const auto start = std::chrono::steady_clock::now();
  try {
    run_ranks_apart(2, over_nccl(deadline), false, kOptions, [&](Communicator& comm) {
      try {
        const Stream stream = RankMemory::mine()->stream;
        GpuPlace::begin(comm);
        body(comm, stream);
        comm.synchronize(stream);
      } catch (const Error& e) {
        out[comm.rank()] = e.what();
        throw;
      }
    });
  } catch (const Error&) {
  }
  std::printf("        failed after %.2f s\n",
              Seconds(std::chrono::steady_clock::now() - start).count());
  run_ranks_apart(2, over_nccl(), false, kOptions, [&](Communicator& comm) {
    GpuPlace::begin(comm);
    Floats x(values<float>(comm.rank(), 100));
    comm.all_reduce(x.view(), ReduceOp::kSum, GpuPlace::stream()).wait();
    EXPECT_EQ(x.get()[7], reduced<float>(2, 7, ReduceOp::kSum));
  });
  return out;
}

TEST_F(NcclGpu, ALatePeerIsNamed) {
  const auto errors = errors_of(2, [](Communicator& comm, const Stream& stream) {
    Floats x(values<float>(comm.rank(), 100));
    comm.all_reduce(x.view(), ReduceOp::kSum, stream).wait();
    comm.synchronize(stream);
    if (comm.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3000));
      return comm.bootstrap().all_gather(""), void();
    }
    comm.all_reduce(x.view(), ReduceOp::kSum, stream).wait();
  });
  EXPECT_EQ(errors[1],
            "comm \"world\", all_reduce 2 (float32, 400 B): rank 1 waited 2.0 s for rank 0 (its "
            "word is at 1 of 2)");
  EXPECT_NE(errors[0].find(errors[1]), std::string::npos) << errors[0];
}

// In a graph that stays alive while the group is ended.
TEST_F(NcclGpu, ALatePeerOfAReplayIsNamed) {
  const auto errors = errors_of(2, [](Communicator& comm, const Stream& stream) {
    Floats x(values<float>(comm.rank(), 100000));
    comm.all_reduce(x.view(), ReduceOp::kSum, stream).wait();
    comm.synchronize(stream);
    comm.barrier();
    Graph graph(stream, [&] {
      for (int i = 0; i < 3; ++i) comm.all_reduce(x.view(), ReduceOp::kSum, stream).wait();
    });
    comm.barrier();
    for (int i = 0; i < 5 - 3 * comm.rank(); ++i) graph.launch(stream);
    comm.synchronize(stream);
    std::this_thread::sleep_for(std::chrono::milliseconds(3000));
  });
  EXPECT_EQ(errors[0],
            "comm \"world\", all_reduce 8 (float32, 400000 B): rank 0 waited 2.0 s for rank 1 (its "
            "word is at 7 of 8)");
}

TEST_F(NcclGpu, AnotherOperationIsNamed) {
  const auto errors = errors_of(8, [](Communicator& comm, const Stream& stream) {
    Floats x{std::vector<float>(200)}, y{std::vector<float>(100)};
    if (comm.rank() == 0) comm.all_gather(y.view(), x.view(), stream).wait();
    if (comm.rank() == 1) comm.all_reduce(x.view(), ReduceOp::kMax, stream).wait();
  });
  const std::string one = "all_gather(float32, 400 B)", other = "all_reduce(float32, 800 B, max)";
  const std::string of_0 =
      text("comm \"world\", operation 1: rank 0 runs {}, rank 1 runs {}", one, other);
  const std::string of_1 =
      text("comm \"world\", operation 1: rank 1 runs {}, rank 0 runs {}", other, one);
  for (const std::string& error : errors) EXPECT_TRUE(error == of_0 || error == of_1) << error;
}

TEST_F(NcclGpu, ARankThatThrowsEndsTheWaitsOfOthers) {
  const auto errors = errors_of(10, [](Communicator& comm, const Stream& stream) {
    Floats x{std::vector<float>(50000)};
    if (comm.rank() == 1) fail(ErrorKind::kIo, "disk full");
    comm.all_reduce(x.view(), ReduceOp::kSum, stream).wait();
  });
  EXPECT_EQ(errors[0],
            "comm \"world\", all_reduce 1 (float32, 200000 B): rank 0 stopped waiting for rank 1: "
            "rank 1 failed: disk full");
}

TEST_F(NcclGpu, TakesOverWhereMemoryIsNotMapped) {
  run_ranks_apart(2, {.deadline = Seconds(20), .map_memory = false}, false, kOptions,
                  [](Communicator& comm) {
                    EXPECT_FALSE(mappable(comm, RankMemory::mine()->gpu));
                    GpuPlace::begin(comm);
                    Floats x(values<float>(comm.rank(), 1000));
                    comm.all_reduce(x.view(), ReduceOp::kSum, GpuPlace::stream()).wait();
                    EXPECT_EQ(x.get()[9], reduced<float>(2, 9, ReduceOp::kSum));
                    EXPECT_EQ(kind_and_error_of([&] { comm.attach(SymmetricBuffer()); }),
                              "unsupported: communicator \"world\" over NCCL: attach: its ranks "
                              "share no memory");
                  });
}

// Bytes of the GPU that a first, a second communicator and one of a split take.
TEST_F(NcclGpu, TellsWhatItTakes) {
  run_thread_ranks(2, over_nccl(), [](Communicator& world) {
    const Device gpu{DeviceType::kCuda, world.rank()};
    const auto second = world.split(0, world.rank(), "second");
    std::unique_ptr<Communicator> part;
    int64_t before = gpu_free_memory(gpu.index);
    const auto tell = [&](const char* what, bool first) {
      world.barrier();
      const int64_t now = gpu_free_memory(gpu.index);
      if (world.rank() == 0) {
        std::printf("        %s: %.1f MiB, estimated %.1f\n", what, double(before - now) / 1048576,
                    double(nccl_link_bytes(2, first)) / 1048576);
      }
      before = now;
      world.barrier();
    };
    world.prepare(gpu);
    tell("first", true);
    second->prepare(gpu);
    tell("second", true);
    part = world.split(0, world.rank(), "part");
    part->prepare(gpu);
    tell("of a split", false);
  });
}

// Two ranks on one GPU need no second one to be refused.
TEST(NcclOnOneGpu, IsRefused) {
  if (gpu_status().count == 0) GTEST_SKIP() << gpu_status().text;
  const auto error = [](const ThreadGroupOptions& options) {
    return kind_and_error_of(
        [&] { run_thread_ranks(2, options, [](Communicator& comm) { comm.prepare(kGpu); }); });
  };
  EXPECT_EQ(error(over_nccl()),
            "usage: comm.transport = \"nccl\": ranks 0 and 1 share cuda:0, which NCCL refuses");
  EXPECT_EQ(
      error({.map_memory = false}),
      "usage: symmetric buffer \"world, link\": the ranks do not map each other's memory: rank "
      "0 was told not to: ranks 0 and 1 share cuda:0, which NCCL refuses");
}

TEST(OwnGpus, TwoRanksOnOneAreNamed) {
  if (gpu_status().count == 0) GTEST_SKIP() << gpu_status().text;
  const std::string error = kind_and_error_of([&] {
    run_thread_ranks(2, {}, [](Communicator& comm) { check_own_gpus(comm.bootstrap(), kGpu); });
  });
  EXPECT_TRUE(std::regex_match(
      error, std::regex(".*ranks 0 and 1 would share GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-"
                        "[0-9a-f]{12} \\(cuda:0\\): check CUDA_VISIBLE_DEVICES, or "
                        "--run.share_gpus=true")))
      << error;
}

}  // namespace

namespace conformance {
namespace {

struct NcclBackend {
  using Place = GpuPlace;
  static void run(int ranks, Seconds, const std::function<void(Communicator&)>& body) {
    if (!nccl_status().available) GTEST_SKIP() << nccl_status().text;
    if (ranks > gpu_status().count) return;
    run_ranks_apart(ranks, over_nccl(), false, kOptions, body);
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(OverNccl, Conformance, NcclBackend);

}  // namespace
}  // namespace conformance
}  // namespace moiety::comm
