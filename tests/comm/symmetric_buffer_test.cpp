// Symmetric memory between threads, the barrier in it, waits on its words, and the exchange of
// memory that processes use.
#include "moiety/comm/symmetric_buffer.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/log.h"
#include "moiety/comm/agree.h"
#include "moiety/comm/barrier.h"
#include "moiety/comm/memory_exchange.h"
#include "moiety/comm/thread_group.h"
#include "tests/support/error_of.h"

namespace moiety::comm {
namespace {

constexpr Seconds kPatience{60};

TEST(SymmetricBuffer, PeersReachEachOthersMemory) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    run_thread_ranks(ranks, {kPatience}, [&](Communicator& comm) {
      SymmetricBuffer buffer = SymmetricBuffer::create(comm, "test", 10000);
      EXPECT_EQ(buffer.bytes(), 10000);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.local()) % 4096, 0u);
      EXPECT_EQ(buffer.local(), buffer.peer(comm.rank()));
      for (int64_t i = 0; i < 10000; ++i) ASSERT_EQ(buffer.local()[i], std::byte{0});
      comm.barrier();
      for (int r = 0; r < ranks; ++r) buffer.peer(r)[10 * comm.rank()] = std::byte(r + 1);
      comm.barrier();
      for (int r = 0; r < ranks; ++r) EXPECT_EQ(buffer.local()[10 * r], std::byte(comm.rank() + 1));
      EXPECT_TRUE(buffer.contains(buffer.local() + 9999, 1));
      EXPECT_FALSE(buffer.contains(buffer.local() + 9999, 2));
      EXPECT_FALSE(buffer.contains(buffer.local() - 1, 1));
      EXPECT_FALSE(buffer.contains(&ranks, 4));
      buffer.close();
      EXPECT_FALSE(buffer);
    });
  }
}

TEST(SymmetricBuffer, LivesUntilItsLastUser) {
  run_thread_ranks(2, {kPatience}, [](Communicator& comm) {
    SymmetricBuffer buffer = SymmetricBuffer::create(comm, "test", 4096);
    comm.barrier();
    if (comm.rank() == 0) return;  // lets go of it, unlike rank 1
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    buffer.peer(0)[0] = std::byte{1};
  });
}

TEST(SymmetricBuffer, AFailureIsTheSameErrorEverywhere) {
  run_thread_ranks(3, {kPatience}, [](Communicator& comm) {
    EXPECT_EQ(error_of([&] { SymmetricBuffer::create(comm, "huge", int64_t{1} << 60); }),
              "symmetric buffer \"huge\": rank 0 could not allocate 1048576.0 TiB: out of memory");
    EXPECT_EQ(
        error_of([&] { SymmetricBuffer::create(comm, "uneven", comm.rank() == 2 ? 8192 : 4096); }),
        "symmetric buffer \"uneven\": rank 0 asks for 4096 bytes, rank 2 for 8192");
    EXPECT_EQ(error_of([&] { agree(comm.bootstrap(), comm.rank() == 1 ? "rank 1: no disk" : ""); }),
              "rank 1: no disk");
    SymmetricBuffer::create(comm, "good", 0).close();  // the group is as good as before
  });
}

TEST(SymmetricBuffer, NotWhereRanksWereToldNotTo) {
  run_thread_ranks(2, {.deadline = kPatience}, [](Communicator& comm) {
    EXPECT_TRUE(mappable(comm));
    EXPECT_TRUE(mappable(*comm.split(0, 0, "again")));
  });
  std::mutex mutex;
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    lines.emplace_back(line);
  });
  const ThreadGroupOptions options{.deadline = kPatience, .map_memory = false};
  run_thread_ranks(2, options, [](Communicator& comm) {
    EXPECT_FALSE(mappable(comm));
    EXPECT_FALSE(mappable(comm));
    EXPECT_FALSE(mappable(*comm.split(comm.rank(), 0, "alone")));
    EXPECT_EQ(error_of([&] { SymmetricBuffer::create(comm, "moe", 64); }),
              "symmetric buffer \"moe\": the ranks do not map each other's memory: rank 0 was told "
              "not to");
  });
  set_log_sink({});
  EXPECT_EQ(lines.size(), 3u);  // rank 0 of each group says it once
  EXPECT_EQ(
      std::count(lines.begin(), lines.end(),
                 "[rank 0] communicator \"world\" works without symmetric memory: symmetric "
                 "buffer \"probe\": the ranks do not map each other's memory: rank 0 was told "
                 "not to"),
      1);
}

std::vector<Nonce> all_nonces(Communicator& comm, const Nonce& mine) {
  std::vector<Nonce> out(comm.size());
  const auto all =
      comm.bootstrap().all_gather({reinterpret_cast<const char*>(&mine), sizeof(mine)});
  for (int r = 0; r < comm.size(); ++r) std::memcpy(&out[r], all[r].data(), sizeof(Nonce));
  return out;
}

// Threads do what processes do: every rank maps the memory of all at addresses of its own.
TEST(MemoryExchange, MapsTheMemoryOfAllRanks) {
  run_thread_ranks(3, {kPatience}, [](Communicator& comm) {
    const std::vector<Nonce> nonces = all_nonces(comm, random_nonce());
    const std::vector<Memory> memory = exchange_memory(comm.bootstrap(), "test", 5000, nonces);
    for (int i = 0; i < 5000; ++i) ASSERT_EQ(memory[comm.rank()].get()[i], std::byte{0});
    comm.barrier();
    for (int r = 0; r < 3; ++r) memory[r].get()[4990 + comm.rank()] = std::byte(r + 1);
    comm.barrier();
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(memory[comm.rank()].get()[4990 + r], std::byte(comm.rank() + 1));
    }
  });
}

TEST(MemoryExchange, AFailureIsTheSameErrorEverywhere) {
  run_thread_ranks(3, {kPatience}, [](Communicator& comm) {
    const auto exchange = [&](int64_t bytes, const std::vector<Nonce>& nonces) {
      return error_of([&] { exchange_memory(comm.bootstrap(), "test", bytes, nonces); });
    };
    std::vector<Nonce> nonces = all_nonces(comm, random_nonce());
    // Ranks 1 and 2 want one name.
    std::vector<Nonce> same{nonces[0], nonces[1], nonces[1]};
    const std::string error = exchange(64, same);
    EXPECT_TRUE(error ==
                    "test: rank 1 could not open a socket: bind: Address already in "
                    "use" ||
                error ==
                    "test: rank 2 could not open a socket: bind: Address already in "
                    "use")
        << error;
    // Nobody listens where rank 0 looks for rank 2.
    nonces = all_nonces(comm, random_nonce());
    if (comm.rank() == 0) nonces[2][0] ^= 1;
    EXPECT_EQ(exchange(64, nonces),
              "test: rank 0 could not hand over its memory: connect: Connection refused");
    // Nothing of that is left.
    EXPECT_EQ(exchange(64, all_nonces(comm, random_nonce())), "no error");
  });
}

TEST(Barrier, SeparatesEpochs) {
  constexpr int kEpochs = 300;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    run_thread_ranks(ranks, {kPatience}, [&](Communicator& comm) {
      const int64_t words = Barrier::bytes(ranks);
      SymmetricBuffer buffer = SymmetricBuffer::create(comm, "test", 3 * words);
      Barrier before(comm, buffer, 0, "before"), after(comm, buffer, words, "after");
      const auto slot = [&](int owner, int writer) -> int64_t& {
        return reinterpret_cast<int64_t*>(buffer.peer(owner) + 2 * words)[writer];
      };
      for (int e = 1; e <= kEpochs; ++e) {
        for (int r = 0; r < ranks; ++r) slot(r, comm.rank()) = e;
        before.arrive_and_wait();
        for (int r = 0; r < ranks; ++r) ASSERT_EQ(slot(comm.rank(), r), e);
        after.arrive_and_wait();
      }
      EXPECT_EQ(before.epoch(), uint64_t{kEpochs});
      buffer.close();
    });
  }
}

TEST(Barrier, NamesThePeerThatDoesNotArrive) {
  run_thread_ranks(3, {Seconds(1.0)}, [](Communicator& comm) {
    SymmetricBuffer buffer = SymmetricBuffer::create(comm, "test", 64);
    Barrier barrier(comm, buffer, 8, "moe");
    barrier.arrive_and_wait();
    if (comm.rank() == 2) return;
    EXPECT_EQ(
        error_of([&] { barrier.arrive_and_wait(); }),
        text("barrier \"moe\", epoch 2: rank {} waited 1.0 s for rank 2 (word at 1)", comm.rank()));
  });
  run_thread_ranks(1, {}, [](Communicator& comm) {
    SymmetricBuffer buffer = SymmetricBuffer::create(comm, "test", 8);
    EXPECT_EQ(error_of([&] { Barrier(comm, buffer, 8, "moe"); }),
              "barrier \"moe\": offset 8 with 1 ranks in a buffer of 8 bytes");
  });
}

TEST(Barrier, StopsWhenAPeerFails) {
  std::string seen;
  EXPECT_EQ(error_of([&] {
              run_thread_ranks(2, {kPatience}, [&](Communicator& comm) {
                SymmetricBuffer buffer = SymmetricBuffer::create(comm, "test", 64);
                Barrier barrier(comm, buffer, 0, "moe");
                if (comm.rank() == 1) fail(ErrorKind::kIo, "disk full");
                seen = error_of([&] { barrier.arrive_and_wait(); });
              });
            }),
            "disk full");
  EXPECT_EQ(
      seen,
      "barrier \"moe\", epoch 1: rank 0 stopped waiting for rank 1: rank 1 failed: disk full");
}

TEST(Wait, EndsForEveryReason) {
  uint64_t word = 4, poison = 0;
  WaitLimits limits{.deadline = Seconds(0.02), .poison = &poison};
  EXPECT_EQ(wait_at_least(word, 4, limits), WaitResult::kReady);
  EXPECT_EQ(wait_at_least(word, 5, limits), WaitResult::kExpired);
  poison = 1;
  EXPECT_EQ(wait_at_least(word, 5, limits), WaitResult::kPoisoned);
  EXPECT_EQ(wait_at_least(word, 4, limits), WaitResult::kReady);
}

}  // namespace
}  // namespace moiety::comm
