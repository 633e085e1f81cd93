// What a rank's communicators do together: operations that run alone, and waits that end at one
// time.
#include <chrono>
#include <random>
#include <thread>

#include "moiety/comm/gpu_waits.h"
#include "tests/comm_gpu/gpu_place.h"
#include "tests/support/error_of.h"
#include "tests/support/gpu_test.h"

namespace moiety::comm {
namespace {

class RankGpu : public GpuTest {};

// Memory is taken and given back between operations of two communicators, which waits for all
// kernels of the GPU.
TEST_F(RankGpu, OperationsThatRunAloneLeaveRoomForAllocations) {
  run_thread_ranks(3, {.deadline = Seconds(5)}, [](Communicator& world) {
    world.run_alone(true);
    world.prepare(gpu_of(world.rank()), {.staging_bytes = 1 << 20});
    const auto group = world.split(0, -world.rank(), "group");  // prepared when it is needed
    const Stream stream = Stream::on(gpu_of(world.rank()));
    std::mt19937 random(static_cast<unsigned>(world.rank()));
    for (int i = 0; i < 40; ++i) {
      const Tensor x(DType::kFloat32, {200000 + i}, gpu_of(world.rank()));
      std::vector<float> here(size_t(x.view().numel()), float(world.rank() + i));
      copy(x, TensorView(here.data(), DType::kFloat32, x.view().sizes()), stream);
      spin(stream, random() % 100000);
      (i % 2 ? world : *group).all_reduce(x, ReduceOp::kSum, stream).wait();
      const Tensor sum = to_host(x, stream);
      ASSERT_EQ(sum.data<float>()[i], float(3 * i + 3));
    }
  });
}

// One rank issues nothing. The other waits for it on two communicators, one behind the other, and is
// told of the first after one deadline.
TEST_F(RankGpu, WaitsOfAllCommunicatorsEndTogether) {
  std::string error;
  double seconds = 0;
  run_thread_ranks(2, {.deadline = Seconds(2)}, [&](Communicator& world) {
    const auto one = world.split(0, world.rank(), "one"), other = world.split(0, 0, "other");
    for (Communicator* comm : {&world, one.get(), other.get()}) {
      comm->prepare(gpu_of(world.rank()), {.staging_bytes = 1 << 20});
    }
    const Stream stream = Stream::on(gpu_of(world.rank()));
    const Tensor x(DType::kFloat32, {50000}, gpu_of(world.rank()));
    stream.synchronize();
    world.barrier();
    if (world.rank() == 0) {
      const auto start = std::chrono::steady_clock::now();
      one->all_reduce(x, ReduceOp::kSum, stream).wait();
      other->all_reduce(x, ReduceOp::kSum, stream).wait();
      Event end;
      end.record(stream);
      error = error_of([&] { world.wait(end); });
      seconds = Seconds(std::chrono::steady_clock::now() - start).count();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    }
    world.bootstrap().all_gather("");
  });
  EXPECT_EQ(error,
            "comm \"one\", all_reduce 1 (float32, 200000 B): rank 0 waited 2.0 s for rank 1 (its "
            "word is at 0 of 1)");
  EXPECT_LT(seconds, 3.5);
}

// Waits that are no communicator's.
class OtherWaits final : public GpuWaits {
 public:
  bool failed() const override { return failed_; }
  void end_waits() override { ended = true; }
  void check() override {
    if (failed_) fail(ErrorKind::kComm, "the others failed");
  }
  bool failed_ = false, ended = false;
};

TEST_F(RankGpu, OtherWaitsFailAndEndWithThoseOfCommunicators) {
  run_thread_ranks(2, {.deadline = Seconds(5)}, [](Communicator& world) {
    const auto group = world.split(0, world.rank(), "group");
    for (Communicator* comm : {&world, group.get()}) {
      comm->prepare(gpu_of(world.rank()), {.staging_bytes = 1 << 20});
    }
    const Stream stream = Stream::on(gpu_of(world.rank()));
    OtherWaits failing, standing;
    {
      const GpuWatch one(*group, failing), other(world, standing);
      failing.failed_ = true;
      spin(stream, 300'000'000);
      Event end;
      end.record(stream);
      EXPECT_EQ(error_of([&] { world.wait(end); }, ErrorKind::kComm), "the others failed");
      EXPECT_TRUE(end.complete());
      EXPECT_TRUE(failing.ended);
      EXPECT_TRUE(standing.ended);
    }
    Event end;
    end.record(stream);
    world.wait(end);  // they are forgotten
  });
}

TEST_F(RankGpu, OtherOperationsRunAlone) {
  for (const bool alone : {true, false}) {
    run_thread_ranks(2, {.deadline = Seconds(5)}, [alone](Communicator& world) {
      const auto group = world.split(0, world.rank(), "group");
      world.run_alone(alone);
      const Stream stream = Stream::on(gpu_of(world.rank()));
      Event last;
      for (int i = 0; i < 3; ++i) {
        enqueue(*group, stream, [&] {
          EXPECT_TRUE(!alone || last.complete());
          spin(stream, 50'000'000);
          last.record(stream);
        });
        EXPECT_EQ(last.complete(), alone);
      }
      stream.synchronize();
      world.barrier();
    });
  }
}

}  // namespace
}  // namespace moiety::comm
