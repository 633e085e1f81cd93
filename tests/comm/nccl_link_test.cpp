// Operations over NCCL on CPUs, where a table of functions stands for it: what they give, what they
// call in which order, and how they fail.
#include <algorithm>
#include <atomic>
#include <thread>

#include "moiety/comm/nccl/link.h"
#include "moiety/comm/thread_group.h"
#include "tests/comm/conformance.h"
#include "tests/comm/nccl_stand_in.h"
#include "tests/support/error_of.h"

namespace moiety::comm::nccl {
namespace {

const Functions kStandIn = stand_in::functions();
constexpr GpuLinkOptions kOptions{.staging_bytes = 1 << 20};

// A communicator whose operations go over the link.
class OverNccl final : public Communicator {
 public:
  explicit OverNccl(Communicator& inner, std::shared_ptr<Group> group = nullptr)
      : inner_(inner), link(inner, Device{}, kOptions, kStandIn, std::move(group), Stream()) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  const std::string& name() const override { return inner_.name(); }
  Bootstrap& bootstrap() override { return inner_.bootstrap(); }
  Ticket all_reduce(TensorView x, ReduceOp op, Stream stream) override {
    return issue(all_reduce_call(x, op), stream);
  }
  Ticket all_gather(TensorView send, TensorView recv, Stream stream) override {
    return issue(all_gather_call(size(), send, recv), stream);
  }
  Ticket reduce_scatter(TensorView send, TensorView recv, ReduceOp op, Stream stream) override {
    return issue(reduce_scatter_call(size(), send, recv, op), stream);
  }
  Ticket all_to_all(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                    std::span<const int64_t> recv_counts, Stream stream) override {
    return issue(all_to_all_call(size(), send, send_counts, recv, recv_counts), stream);
  }
  Ticket broadcast(TensorView x, int root, Stream stream) override {
    return issue(broadcast_call(size(), x, root), stream);
  }
  void barrier() override { inner_.barrier(); }
  void prepare(Device, const GpuLinkOptions&) override {}
  void attach(const SymmetricBuffer& buffer) override { link.attach(buffer); }
  void synchronize(const Stream& stream) override { stream.synchronize(); }
  std::unique_ptr<Communicator> split(int, int, const std::string&) override { return nullptr; }

 private:
  Ticket issue(const CollectiveCall& call, const Stream& stream) {
    link.issue(call, stream);
    return {};
  }
  Communicator& inner_;

 public:
  Link link;
};

void run(int ranks, const std::function<void(OverNccl&)>& body, Seconds deadline = Seconds(20)) {
  run_thread_ranks(ranks, {.deadline = deadline}, [&](Communicator& inner) {
    OverNccl comm(inner);
    body(comm);
  });
}

TEST(Nccl, SaysThatThereIsNoWayBetweenRanks) {
  Functions none;
  none.text = "NCCL was not found (pip install nvidia-nccl-cu13)";
  EXPECT_EQ(kind_and_error_of([&] {
              run_thread_ranks(2, {}, [&](Communicator& comm) {
                check_possible(
                    comm.bootstrap(), Device{},
                    "symmetric buffer \"world, link\": no peer access between cuda:0 and "
                    "cuda:1",
                    none);
              });
            }),
            "cuda: symmetric buffer \"world, link\": no peer access between cuda:0 and cuda:1, and "
            "there is no NCCL: NCCL was not found (pip install nvidia-nccl-cu13)");
}

TEST(Nccl, GivesWhatEveryTransportGives) {
  for (const int ranks : {2, 3, 8}) {
    run(ranks, [ranks](OverNccl& comm) {
      for (const int64_t n : {0, 1, 65, 1000}) {
        conformance::check_reductions<double>(comm, n);
        conformance::check_reductions<float>(comm, n);
        conformance::check_reductions<bf16>(comm, n);
        conformance::check_reductions<fp16>(comm, n);
        conformance::check_reductions<int64_t>(comm, n);
        conformance::check_reductions<uint8_t>(comm, n);
        conformance::check_moves<float>(comm, n);
        conformance::check_moves<uint8_t>(comm, n);
      }
      conformance::check_reductions<bf16>(comm, 70001);
      conformance::check_reductions<double>(comm, 70001);
      // Several chunks of staging, the last one of another size.
      if (ranks < 8) conformance::check_reductions<float>(comm, 600001);
      for (const int64_t width : {0, 1, 7}) conformance::check_all_to_all<bf16>(comm, width);
    });
  }
}

TEST(Nccl, SubGroupsKeepTheOrderOfKeys) {
  run(4, [](OverNccl& comm) {
    const auto outside = comm.link.split(comm.rank() == 0 ? -1 : 3, 0);
    EXPECT_EQ(outside == nullptr, comm.rank() == 0);
  });
  run_thread_ranks(4, {}, [](Communicator& world) {
    OverNccl comm(world);
    const int me = world.rank();
    const auto half = world.split(me % 2, -me, "half");
    OverNccl over(*half, comm.link.split(me % 2, -me));
    conformance::check_reductions<float>(over, 100);
    conformance::check_all_to_all<float>(over, 3);
  });
}

// All ranks call the same things in the same order, posts first; what two ranks send each other
// stands between begin and end (the stand-in refuses all else).
TEST(Nccl, CallsAreInOneOrder) {
  std::vector<std::string> calls(3);
  run(3, [&](OverNccl& comm) {
    const auto group = comm.link.split(0, comm.rank());
    stand_in::Part& part = stand_in::part_of(group->get());
    Link link(comm, Device{}, kOptions, kStandIn, group, Stream());
    part.calls.clear();
    std::vector<float> x(30000), parts(90000);
    const auto issue = [&](const CollectiveCall& call) {
      link.issue(call, Stream());
      part.calls += ' ';
    };
    issue(all_gather_call(3, conformance::view(x), conformance::view(parts)));
    issue(broadcast_call(3, conformance::view(x), 1));
    issue(reduce_scatter_call(3, conformance::view(parts), conformance::view(x), ReduceOp::kSum));
    issue(all_reduce_call(conformance::view(x), ReduceOp::kSum));  // parts of unequal size
    issue(all_reduce_call(conformance::view(x).slice(0, 0, 100), ReduceOp::kSum));
    issue(all_reduce_call(conformance::view(x).slice(0, 0, 29952), ReduceOp::kSum));
    calls[comm.rank()] = part.calls;
  });
  for (const std::string& text : calls) {
    EXPECT_EQ(text, "SRSRG SRSRB SRSRSRSR SRSRSRSRSRSR SRSRG SRSRSRSRG ");
  }
}

TEST(Nccl, AnotherCallIsNamed) {
  std::vector<std::string> errors(2);
  run(2, [&](OverNccl& comm) {
    std::vector<float> x(200), y(100);
    errors[comm.rank()] = error_of(
        [&] {
          if (comm.rank() == 0) {
            comm.all_gather(conformance::view(y), conformance::view(x), {}).wait();
          } else {
            comm.all_reduce(conformance::view(x), ReduceOp::kMax, {}).wait();
          }
        },
        ErrorKind::kComm);
    // It has failed for good.
    EXPECT_EQ(error_of([&] { comm.broadcast(conformance::view(x), 0, {}).wait(); }),
              errors[comm.rank()]);
  });
  const std::string one = "all_gather(float32, 400 B)", other = "all_reduce(float32, 800 B, max)";
  EXPECT_EQ(errors[0],
            text("comm \"world\", operation 1: rank 0 runs {}, rank 1 runs {}", one, other));
  EXPECT_EQ(errors[1],
            text("comm \"world\", operation 1: rank 1 runs {}, rank 0 runs {}", other, one));
}

TEST(Nccl, RowsThatDoNotFitAreNamed) {
  std::vector<std::string> errors(2);
  run(2, [&](OverNccl& comm) {
    const int64_t me = comm.rank();
    std::vector<float> x(24), y(24);
    const std::vector<int64_t> sends{1, 2}, receives{1, 2 + me};
    const auto rows = [](std::vector<float>& v, int64_t n) {
      return conformance::view(v).slice(0, 0, 4 * n).reshape({n, 4});
    };
    errors[me] =
        error_of([&] { comm.all_to_all(rows(x, 3), sends, rows(y, 3 + me), receives, {}).wait(); });
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(
        error,
        "comm \"world\", operation 1: all_to_all: rank 0 sends 2 rows to rank 1, which expects 1");
  }
}

TEST(Nccl, FailuresOfNcclAreNamed) {
  std::vector<std::string> broken(2), late(2);
  run(2, [&](OverNccl& comm) {
    std::vector<float> x(100);
    comm.barrier();
    stand_in::world().broken = true;
    comm.barrier();
    broken[comm.rank()] =
        error_of([&] { comm.broadcast(conformance::view(x), 0, {}).wait(); }, ErrorKind::kComm);
    comm.barrier();
    stand_in::world().broken = false;
    comm.barrier();
    stand_in::world().async_error = stand_in::kBroken;
    EXPECT_FALSE(comm.link.failed());  // not at once: the bootstrap may know why
    std::this_thread::sleep_for(std::chrono::milliseconds(2100));
    EXPECT_TRUE(comm.link.failed());
    late[comm.rank()] = error_of([&] { comm.link.check(); }, ErrorKind::kComm);
  });
  stand_in::world().async_error = 0;
  EXPECT_EQ(broken[0], "ncclSend and ncclRecv: the link is broken (4)");
  EXPECT_EQ(late[1], "communicator \"world\" over NCCL: rank 1: the link is broken");
}

TEST(Nccl, ARankThatThrowsIsNamedByWhoGetsNoPost) {
  std::string error;
  EXPECT_EQ(error_of([&] {
              run(2, [&](OverNccl& comm) {
                if (comm.rank() == 1) {
                  {
                    const std::lock_guard lock(stand_in::world().mutex);
                    stand_in::world().cut = true;
                  }
                  stand_in::world().changed.notify_all();
                  fail(ErrorKind::kIo, "disk full");
                }
                std::vector<float> x(100);
                error = error_of(
                    [&] { comm.all_reduce(conformance::view(x), ReduceOp::kSum, {}).wait(); },
                    ErrorKind::kComm);
              });
            }),
            "disk full");
  stand_in::world().cut = false;
  EXPECT_EQ(error,
            "comm \"world\", all_reduce 1 (float32, 400 B): rank 0 stopped waiting for rank 1: "
            "rank 1 failed: disk full");
}

TEST(Nccl, ARankThatDoesNotJoinIsWaitedForNoLongerThanTheDeadline) {
  std::string error;
  EXPECT_THROW(run_thread_ranks(2, {.deadline = Seconds(1)},
                                [&](Communicator& world) {
                                  if (world.rank() == 1) {
                                    world.bootstrap().all_gather("");  // takes the id
                                    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
                                    return;
                                  }
                                  try {
                                    Group::join(kStandIn, world.bootstrap(), "group", 0);
                                  } catch (const Error& e) {
                                    error = e.what();
                                    throw;
                                  }
                                }),
               Error);
  EXPECT_EQ(error, "group: rank 0 waited 1.0 s for its peers");
}

TEST(Nccl, AGroupEndsWithItsLastOwner) {
  run_thread_ranks(2, {}, [](Communicator& world) {
    auto group = Group::join(kStandIn, world.bootstrap(), "group", 0);
    const auto shared = stand_in::part_of(group->get()).shared;
    auto other = Group::join(kStandIn, world.bootstrap(), "other", 0);
    const auto its = stand_in::part_of(other->get()).shared;
    group.reset();
    other->abort();
    other->abort();
    other.reset();
    world.barrier();
    EXPECT_EQ(shared->ended, 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_EQ(its->ended, 0);
    EXPECT_EQ(its->aborted, 2);
  });
}

}  // namespace
}  // namespace moiety::comm::nccl
