// Symmetric memory between processes of one host.
#include "moiety/comm/symmetric_buffer.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "moiety/comm/agree.h"
#include "moiety/comm/barrier.h"
#include "tests/support/error_of.h"
#include "tests/support/mpi/world.h"

namespace moiety::comm {
namespace {

using testing::world;

int64_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

// Lines of this process's map that are such memory.
int64_t mappings() {
  std::ifstream maps("/proc/self/maps");
  int64_t out = 0;
  for (std::string line; std::getline(maps, line);)
    out += line.find("memfd:moiety") != std::string::npos;
  return out;
}

class MpiSymmetricBuffer : public ::testing::Test {
  void SetUp() override {
    if (world().size() == 1) GTEST_SKIP() << "one process";
    if (!mappable(world())) GTEST_SKIP() << "told not to map";
  }
};

TEST(MpiMappable, IsWhatTheOptionSays) {
  // Asked for a group whose ranks are not those of the world.
  const auto group = world().split(0, -world().rank(), "reversed");
  EXPECT_EQ(mappable(*group), world().may_map_memory());
  EXPECT_EQ(mappable(*group), world().may_map_memory());  // known by now
  if (mappable(*group)) return;
  EXPECT_EQ(error_of([&] { SymmetricBuffer::create(*group, "moe", 64); }),
            "symmetric buffer \"moe\": the ranks do not map each other's memory: rank 0 was told "
            "not to");
}

TEST_F(MpiSymmetricBuffer, PeersReachEachOthersMemory) {
  Communicator& comm = world();
  SymmetricBuffer buffer = SymmetricBuffer::create(comm, "test", 3 << 20);
  EXPECT_EQ(buffer.bytes(), 3 << 20);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.local()) % 4096, 0u);
  EXPECT_EQ(buffer.local(), buffer.peer(comm.rank()));
  for (int64_t i = 0; i < buffer.bytes(); ++i) ASSERT_EQ(buffer.local()[i], std::byte{0});
  comm.barrier();
  // Both ends are checked: byte 10 w of rank r says r + 1 and w.
  for (int r = 0; r < comm.size(); ++r) {
    buffer.peer(r)[10 * comm.rank()] = std::byte(16 * comm.rank() + r + 1);
    buffer.peer(r)[buffer.bytes() - 1 - comm.rank()] = std::byte(r + 1);
  }
  comm.barrier();
  for (int r = 0; r < comm.size(); ++r) {
    EXPECT_EQ(buffer.local()[10 * r], std::byte(16 * r + comm.rank() + 1));
    EXPECT_EQ(buffer.local()[buffer.bytes() - 1 - r], std::byte(comm.rank() + 1));
  }
  EXPECT_TRUE(buffer.contains(buffer.local() + 9999, 1));
  EXPECT_FALSE(buffer.contains(buffer.local() - 1, 1));
  buffer.close();
  EXPECT_FALSE(buffer);
}

TEST_F(MpiSymmetricBuffer, LeavesNothingBehind) {
  Communicator& comm = world();
  const int64_t files = open_files(), maps = mappings();
  for (int i = 0; i < 20; ++i) {
    SymmetricBuffer buffer = SymmetricBuffer::create(comm, "test", 100000);
    EXPECT_EQ(open_files(), files);
    EXPECT_EQ(mappings(), maps + comm.size());
    buffer.close();
  }
  EXPECT_EQ(open_files(), files);
  EXPECT_EQ(mappings(), maps);
}

TEST_F(MpiSymmetricBuffer, LivesUntilItsLastUser) {
  Communicator& comm = world();
  SymmetricBuffer buffer = SymmetricBuffer::create(comm, "test", 4096);
  const auto word = [&](int r) { return reinterpret_cast<uint64_t*>(buffer.peer(r)); };
  if (comm.rank() == 0) buffer = SymmetricBuffer();
  comm.barrier();
  if (comm.rank() != 0) store_release(word(0)[comm.rank()], 5);
  comm.barrier();
  if (comm.rank() != 0) {
    EXPECT_EQ(load_acquire(word(0)[comm.size() - 1]), 5u);
  }
}

TEST_F(MpiSymmetricBuffer, OfASubGroup) {
  const auto pair = world().split(world().rank() / 2, -world().rank(), "pair");
  SymmetricBuffer buffer = SymmetricBuffer::create(*pair, "test", 64);
  for (int r = 0; r < pair->size(); ++r) buffer.peer(r)[pair->rank()] = std::byte(world().rank());
  pair->barrier();
  EXPECT_EQ(buffer.local()[pair->rank()], std::byte(world().rank()));
  EXPECT_EQ(buffer.local()[0], std::byte(pair->size() == 2 ? world().rank() | 1 : world().rank()));
  buffer.close();
}

TEST_F(MpiSymmetricBuffer, AFailureIsTheSameErrorEverywhere) {
  Communicator& comm = world();
  const int64_t files = open_files();
  EXPECT_EQ(error_of([&] { SymmetricBuffer::create(comm, "huge", int64_t{1} << 60); }),
            "symmetric buffer \"huge\": rank 0 could not allocate 1048576.0 TiB: out of memory");
  EXPECT_EQ(
      error_of([&] { SymmetricBuffer::create(comm, "uneven", comm.rank() == 1 ? 8192 : 4096); }),
      "symmetric buffer \"uneven\": rank 0 asks for 4096 bytes, rank 1 for 8192");
  SymmetricBuffer::create(comm, "good", 0).close();  // the group is as good as before
  EXPECT_EQ(open_files(), files);
}

TEST_F(MpiSymmetricBuffer, BarriersSeparateEpochs) {
  constexpr int kEpochs = 200;
  Communicator& comm = world();
  const int ranks = comm.size();
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
}

}  // namespace
}  // namespace moiety::comm
