// Ranks as threads: the conformance suite, and what happens when a rank fails.
#include "moiety/comm/thread_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "tests/comm/conformance.h"

namespace moiety::comm {
namespace {

struct ThreadBackend {
  static void run(int ranks, Seconds deadline, const std::function<void(Communicator&)>& body) {
    run_thread_ranks(ranks, {.deadline = deadline}, body);
  }
};

}  // namespace

namespace conformance {
INSTANTIATE_TYPED_TEST_SUITE_P(Thread, Conformance, ThreadBackend);
}  // namespace conformance

namespace {

using conformance::view;

struct Outcome {
  std::vector<std::string> errors;  // by rank, empty where the body returned
  std::string rethrown;
  double seconds = 0;
};

Outcome run_failing(int ranks, Seconds deadline, const std::function<void(Communicator&)>& body) {
  Outcome out;
  out.errors.resize(ranks);
  const auto start = std::chrono::steady_clock::now();
  try {
    run_thread_ranks(ranks, {.deadline = deadline}, [&](Communicator& comm) {
      try {
        body(comm);
      } catch (const std::exception& e) {
        out.errors[comm.rank()] = e.what();
        throw;
      }
    });
  } catch (const std::exception& e) {
    out.rethrown = e.what();
  }
  out.seconds = Seconds(std::chrono::steady_clock::now() - start).count();
  return out;
}

constexpr Seconds kShort{0.3};

TEST(ThreadRanks, HaveTheirOwnLogRankAndBudget) {
  const int caller_budget = thread_budget();
  run_thread_ranks(3, {}, [](Communicator& comm) {
    EXPECT_EQ(log_rank(), comm.rank());
    EXPECT_EQ(thread_budget(), std::max(1, core_count() / 3));
    EXPECT_EQ(comm.name(), "world");
  });
  EXPECT_EQ(log_rank(), -1);
  EXPECT_EQ(thread_budget(), caller_budget);
  EXPECT_THROW(run_thread_ranks(0, {}, [](Communicator&) {}), Error);
}

TEST(ThreadRanks, BarrierOrdersWhatRanksDo) {
  std::atomic<int> arrived{0};
  run_thread_ranks(4, {}, [&](Communicator& comm) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      comm.barrier();
      EXPECT_EQ(arrived, 4 * round);
      comm.barrier();
    }
  });
}

TEST(ThreadFailure, ARankThatNeverArrives) {
  const Outcome out = run_failing(3, kShort, [](Communicator& comm) {
    std::vector<float> x(16);
    if (comm.rank() != 2) comm.all_reduce(view(x), ReduceOp::kSum, Stream()).wait();
  });
  // Chance decides which rank gives up first; the other one learns of it.
  const auto expected = [](int r) {
    return text(
        "communicator \"world\", operation 1: rank {} waited 0.3 s in "
        "all_reduce(float32[16], sum) for rank 2",
        r);
  };
  const std::set<std::string> allowed{expected(0), expected(1)};
  EXPECT_TRUE(allowed.count(out.rethrown)) << out.rethrown;
  EXPECT_TRUE(allowed.count(out.errors[0])) << out.errors[0];
  EXPECT_TRUE(allowed.count(out.errors[1])) << out.errors[1];
  EXPECT_EQ(out.errors[2], "");
  EXPECT_GE(out.seconds, 0.3);
  EXPECT_LT(out.seconds, 5.0);
}

TEST(ThreadFailure, ARankThatNeverArrivesAtTheBootstrap) {
  const Outcome out = run_failing(3, kShort, [](Communicator& comm) {
    if (comm.rank() == 1) comm.bootstrap().all_gather("here");
  });
  EXPECT_EQ(out.rethrown, "bootstrap of \"world\": rank 1 waited 0.3 s for ranks 0, 2");
  EXPECT_LT(out.seconds, 5.0);
}

TEST(ThreadFailure, ARankThatThrows) {
  const Outcome out = run_failing(3, conformance::kPatience, [](Communicator& comm) {
    std::vector<float> x(16);
    if (comm.rank() == 1) fail(ErrorKind::kIo, "disk full");
    if (comm.rank() == 0) comm.bootstrap().all_gather("");
    comm.all_reduce(view(x), ReduceOp::kSum, Stream()).wait();
  });
  EXPECT_EQ(out.rethrown, "disk full");
  EXPECT_EQ(out.errors[0], "bootstrap of \"world\": rank 0 stopped: rank 1 failed: disk full");
  EXPECT_EQ(out.errors[2],
            "communicator \"world\", operation 1: all_reduce(float32[16], sum) stopped: rank 1 "
            "failed: disk full");
  EXPECT_LT(out.seconds, 5.0);
}

TEST(ThreadFailure, ARankThatThrowsStopsSubGroupsToo) {
  const Outcome out = run_failing(4, conformance::kPatience, [](Communicator& comm) {
    const auto half = comm.split(comm.rank() % 2, 0, "half");
    if (comm.rank() == 3) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      fail(ErrorKind::kIo, "disk full");
    }
    half->barrier();
    if (comm.rank() != 1) comm.barrier();
  });
  EXPECT_EQ(out.rethrown, "disk full");
  EXPECT_EQ(out.errors[1],
            "communicator \"half\", operation 1: barrier stopped: rank 3 failed: disk full");
  EXPECT_EQ(out.errors[0],
            "communicator \"world\", operation 1: barrier stopped: rank 3 failed: disk full");
  EXPECT_LT(out.seconds, 5.0);
}

struct Mismatch {
  const char* name;
  std::function<void(Communicator&, std::vector<float>&)> odd_one;  // what rank 1 does
  std::string text;
};

class ThreadMismatch : public ::testing::TestWithParam<Mismatch> {};

TEST_P(ThreadMismatch, IsTheSameErrorOnEveryRank) {
  const Outcome out = run_failing(3, conformance::kPatience, [](Communicator& comm) {
    std::vector<float> x(18);
    if (comm.rank() == 1) {
      GetParam().odd_one(comm, x);
    } else {
      comm.all_reduce(view(x).slice(0, 0, 16), ReduceOp::kSum, Stream()).wait();
    }
  });
  const std::string expected = "communicator \"world\", operation 1: " + GetParam().text;
  for (const std::string& error : out.errors) EXPECT_EQ(error, expected);
  EXPECT_EQ(out.rethrown, expected);
}

const std::string kRank0 = "rank 0 runs all_reduce(float32[16], sum), rank 1 runs ";

INSTANTIATE_TEST_SUITE_P(
    ThreadFailure, ThreadMismatch,
    ::testing::Values(Mismatch{"operation",
                               [](Communicator& c, std::vector<float>& x) {
                                 c.broadcast(view(x), 2, Stream()).wait();
                               },
                               kRank0 + "broadcast(float32[18], root 2)"},
                      Mismatch{"barrier", [](Communicator& c, std::vector<float>&) { c.barrier(); },
                               kRank0 + "barrier"},
                      Mismatch{"size",
                               [](Communicator& c, std::vector<float>& x) {
                                 c.all_reduce(view(x), ReduceOp::kSum, Stream()).wait();
                               },
                               kRank0 + "all_reduce(float32[18], sum)"},
                      Mismatch{"dtype",
                               [](Communicator& c, std::vector<float>& x) {
                                 const TensorView ints(x.data(), DType::kInt32, {16});
                                 c.all_reduce(ints, ReduceOp::kSum, Stream()).wait();
                               },
                               kRank0 + "all_reduce(int32[16], sum)"},
                      Mismatch{
                          "reduction",
                          [](Communicator& c, std::vector<float>& x) {
                            c.all_reduce(view(x).slice(0, 0, 16), ReduceOp::kMax, Stream()).wait();
                          },
                          kRank0 + "all_reduce(float32[16], max)"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(ThreadFailure, CountsThatDisagree) {
  const Outcome out = run_failing(2, conformance::kPatience, [](Communicator& comm) {
    std::vector<float> send(4), recv(4);
    const int64_t expected = comm.rank() == 1 ? 2 : 0;
    const std::array<int64_t, 2> to{1, 3}, from{1, expected + 1};
    comm.all_to_all(view(send), to, view(recv).slice(0, 0, expected + 2), from, Stream()).wait();
  });
  for (const std::string& error : out.errors) {
    EXPECT_EQ(error,
              "communicator \"world\", operation 1: all_to_all: rank 0 sends 3 rows to rank 1, "
              "which expects 1");
  }
}

TEST(ThreadFailure, AFailedCommunicatorStaysFailed) {
  const Outcome out = run_failing(2, kShort, [](Communicator& comm) {
    if (comm.rank() == 1) return;
    std::vector<float> x(4);
    EXPECT_THROW(comm.barrier(), Error);
    comm.all_reduce(view(x), ReduceOp::kSum, Stream()).wait();
  });
  EXPECT_EQ(out.rethrown,
            "communicator \"world\", operation 1: rank 0 waited 0.3 s in barrier for rank 1");
}

TEST(ThreadFailure, ADroppedTicketLogsItsError) {
  std::mutex mutex;
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    lines.emplace_back(line);
  });
  run_thread_ranks(2, {.deadline = kShort}, [](Communicator& comm) {
    std::vector<float> x(4);
    if (comm.rank() == 0) Ticket dropped = comm.all_reduce(view(x), ReduceOp::kSum, Stream());
  });
  set_log_sink({});
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0],
            "error: [rank 0] an operation that nobody waited for failed: communicator \"world\", "
            "operation 1: rank 0 waited 0.3 s in all_reduce(float32[4], sum) for rank 1");
}

// A rank that gives up frees its tensors; the peer that comes too late must not read them.
TEST(ThreadFailure, ALatePeerDoesNotTouchFreedTensors) {
  const Outcome out = run_failing(2, Seconds(0.1), [](Communicator& comm) {
    std::vector<float> x(100000, 1.0f);
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    comm.all_reduce(view(x), ReduceOp::kSum, Stream()).wait();
  });
  const std::string expected =
      "communicator \"world\", operation 1: rank 0 waited 0.1 s in all_reduce(float32[100000], "
      "sum) for rank 1";
  EXPECT_EQ(out.errors[0], expected);
  EXPECT_EQ(out.errors[1], expected);
}

TEST(Collectives, RefuseWhatDoesNotFit) {
  run_thread_ranks(1, {}, [](Communicator& comm) {
    std::vector<float> x(12);
    std::vector<uint8_t> bytes(4);
    const auto error = [](auto&& f) {
      try {
        f();
      } catch (const Error& e) {
        return std::string(e.what());
      }
      return std::string("no error");
    };
    const TensorView columns = view(x).reshape({3, 4}).slice(1, 0, 2);
    const std::array<int64_t, 1> one{1};
    EXPECT_EQ(error([&] { comm.all_reduce(columns, ReduceOp::kSum, Stream()).wait(); }),
              "all_reduce: x is float32[3, 2] with strides [4, 1], it must be contiguous");
    EXPECT_EQ(error([&] {
                comm.all_reduce(view(bytes).as(DType::kE4M3), ReduceOp::kSum, Stream()).wait();
              }),
              "all_reduce: e4m3 cannot be reduced");
    EXPECT_EQ(error([&] { comm.all_reduce(TensorView(), ReduceOp::kSum, Stream()).wait(); }),
              "all_reduce: x is absent");
    EXPECT_EQ(
        error([&] { comm.all_gather(view(x).slice(0, 0, 5), view(x), Stream()).wait(); }),
        "all_gather: send is float32[5], recv is float32[12], expected 1 times as many elements");
    EXPECT_EQ(error([&] { comm.broadcast(view(x), 1, Stream()).wait(); }),
              "broadcast: root 1 of 1 ranks");
    EXPECT_EQ(error([&] { comm.all_to_all(view(x), one, view(x), one, Stream()).wait(); }),
              "all_to_all: send is float32[12], its counts sum to 1");
  });
}

}  // namespace
}  // namespace moiety::comm
