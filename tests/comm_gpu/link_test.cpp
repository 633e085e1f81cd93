// What the conformance suite does not ask: graphs, several communicators and streams, failures, and
// memory that ranks share.
#include <chrono>
#include <deque>
#include <thread>

#include "moiety/base/graph.h"
#include "moiety/comm/gpu_waits.h"
#include "tests/comm_gpu/gpu_place.h"
#include "tests/support/error_of.h"
#include "tests/support/gpu_test.h"

namespace moiety::comm {
namespace {

using conformance::reduced;
using conformance::value;
using conformance::values;
using Floats = GpuPlace::Array<float>;

class CommGpu : public GpuTest {};

double seconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return Seconds(std::chrono::steady_clock::now() - start).count();
}

TEST_F(CommGpu, SymmetricMemoryIsZeroedAlignedAndReachable) {
  run_thread_ranks(3, {.deadline = Seconds(10)}, [](Communicator& comm) {
    const Device gpu = gpu_of(comm.rank());
    EXPECT_TRUE(mappable(comm, gpu));
    SymmetricBuffer buffer = SymmetricBuffer::create(comm, "test", 5000, gpu);
    EXPECT_EQ(buffer.bytes(), 5000);
    EXPECT_EQ(buffer.device(), gpu);
    EXPECT_TRUE(buffer.contains(buffer.local() + 4000, 1000));
    EXPECT_FALSE(buffer.contains(buffer.local() + 4000, 1001));
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.peer(r)) % (2 << 20), 0u);
    }
    const Stream stream = Stream::on(gpu);
    const TensorView mine(buffer.local(), DType::kUInt8, {5000}, gpu);
    const Tensor zeros = to_host(mine, stream);
    for (int64_t i = 0; i < 5000; ++i) ASSERT_EQ(zeros.data<uint8_t>()[i], 0);
    comm.barrier();
    const int next = (comm.rank() + 1) % 3;
    fill_bytes(TensorView(buffer.peer(next), DType::kUInt8, {5000}, gpu), uint8_t(1 + comm.rank()),
               stream);
    stream.synchronize();
    comm.barrier();
    EXPECT_EQ(to_host(mine, stream).data<uint8_t>()[4999], 1 + (comm.rank() + 2) % 3);
    // The two even ranks, in descending order.
    const auto even = comm.split(comm.rank() % 2 == 0 ? 0 : -1, -comm.rank(), "even");
    if (even) {
      SymmetricBuffer view = buffer.view(*even);
      EXPECT_EQ(view.ranks(), 2);
      EXPECT_EQ(view.local(), buffer.local());
      EXPECT_EQ(view.peer(0), buffer.peer(2));
      EXPECT_EQ(view.peer(1), buffer.peer(0));
    }
    comm.barrier();
    buffer.close();
  });
}

TEST_F(CommGpu, CreationFailsAlikeOnAllRanks) {
  run_thread_ranks(2, {.deadline = Seconds(10)}, [](Communicator& comm) {
    const int64_t much = int64_t{1} << 42;
    const std::string error =
        error_of([&] { SymmetricBuffer::create(comm, "gradients", much, kGpu); });
    EXPECT_NE(
        error.find("symmetric buffer \"gradients\": rank 0 could not allocate 4.0 TiB on cuda:0: "
                   "out of memory ("),
        std::string::npos)
        << error;
    EXPECT_EQ(error_of([&] {
                SymmetricBuffer::create(comm, "mixed", 64, comm.rank() == 0 ? kGpu : Device{});
              }),
              "symmetric buffer \"mixed\": rank 0 asks for memory of a GPU, rank 1 of a CPU");
    SymmetricBuffer::create(comm, "good", 64, kGpu).close();
  });
}

TEST_F(CommGpu, CreatingAndClosingReturnsAllMemory) {
  int64_t before = 0, after = 0;
  run_thread_ranks(2, {.deadline = Seconds(10)}, [&](Communicator& comm) {
    const auto round = [&] {
      const auto group = comm.split(0, 0, "group");
      group->prepare(kGpu, {.staging_bytes = 8 << 20});
      SymmetricBuffer::create(*group, "test", 40 << 20, kGpu).close();
      comm.barrier();
    };
    for (int i = 0; i < 3; ++i) round();
    comm.barrier();
    if (comm.rank() == 0) before = gpu_free_memory(0);
    comm.barrier();
    for (int i = 0; i < 100; ++i) round();
    comm.barrier();
    if (comm.rank() == 0) after = gpu_free_memory(0);
    comm.barrier();
  });
  EXPECT_GE(after, before - (2 << 20));
}

// One communicator's operations on one stream and then on another are in order.
TEST_F(CommGpu, TwoStreamsInTurn) {
  run_gpu_ranks(3, Seconds(10), false, {.staging_bytes = 1 << 20}, [](Communicator& comm) {
    const Stream one = RankMemory::mine()->stream, other = Stream::on(RankMemory::mine()->gpu);
    comm.barrier();
    GpuPlace::begin(comm);
    const int64_t n = 40000;
    Floats x(values<float>(comm.rank(), n));
    for (int i = 0; i < 20; ++i) {
      spin(i % 2 ? one : other, 20000);
      comm.all_reduce(x.view(), ReduceOp::kMax, i % 2 ? one : other).wait();
    }
    comm.synchronize(one);
    comm.synchronize(other);
    const std::vector<float> got = x.get();
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(got[i], reduced<float>(3, i, ReduceOp::kMax));
    EXPECT_EQ(waiting_streams(comm), 2);
  });
}

// Five groups at once, whose memory is made anew, and larger, between replays.
TEST_F(CommGpu, MemoryOfFiveGroupsGrowsBetweenReplays) {
  run_gpu_ranks(2, Seconds(10), false, {.staging_bytes = 1 << 20}, [](Communicator& comm) {
    const Device gpu = RankMemory::mine()->gpu;
    const Stream stream = RankMemory::mine()->stream;
    std::vector<std::unique_ptr<Communicator>> groups;
    for (int g = 0; g < 5; ++g) {
      groups.push_back(comm.split(0, comm.rank(), text("group {}", g)));
      groups.back()->prepare(gpu, {.staging_bytes = 1 << 20});
    }
    for (const int64_t n : {30000, 3000000}) {
      std::vector<SymmetricBuffer> buffers;
      std::vector<TensorView> wholes;
      for (const auto& group : groups) {
        buffers.push_back(SymmetricBuffer::create(*group, "grown", 8 * n, gpu));
        group->attach(buffers.back());
        wholes.emplace_back(buffers.back().local(), DType::kFloat32, std::initializer_list{2 * n},
                            gpu);
      }
      const auto own = [&](size_t g) {
        return wholes[g].slice(0, comm.rank() * n, (comm.rank() + 1) * n);
      };
      comm.barrier();
      Graph graph(stream, [&] {
        for (size_t g = 0; g < groups.size(); ++g) {
          groups[g]->all_gather(own(g), wholes[g], stream).wait();
        }
      });
      for (int replay = 0; replay < 3; ++replay) {
        for (size_t g = 0; g < groups.size(); ++g) {
          fill_bytes(own(g), uint8_t(16 * replay + 2 * int(g) + comm.rank() + 1), stream);
        }
        stream.synchronize();
        comm.barrier();
        graph.launch(stream);
        comm.synchronize(stream);
        comm.barrier();
        for (size_t g = 0; g < groups.size(); ++g) {
          const Tensor here = to_host(wholes[g], stream);
          const auto* bytes = reinterpret_cast<const uint8_t*>(here.data<float>());
          for (int r = 0; r < 2; ++r) {
            EXPECT_EQ(bytes[4 * n * r + 4 * n - 1], 16 * replay + 2 * int(g) + r + 1) << n;
          }
        }
      }
      graph = Graph();
      comm.barrier();
    }
  });
}

// The first work of a stream begins while a peer's kernel waits for it (gpu_runtime.h).
TEST_F(CommGpu, AnOperationMayBeAStreamsFirstWork) {
  run_gpu_ranks(2, Seconds(2), false, {.staging_bytes = 1 << 20}, [](Communicator& comm) {
    GpuPlace::begin(comm);
    RankMemory& memory = *RankMemory::mine();
    const int64_t n = 40000;
    Floats x(values<float>(comm.rank(), n));
    std::vector<Stream> streams;
    for (int i = 0; i < 12; ++i) streams.push_back(Stream::on(memory.gpu));
    for (int i = 0; i < 12; ++i) {
      // What the stream waits for ends on one rank while the other's operation waits already.
      comm.barrier();
      spin(memory.stream, comm.rank() == i % 2 ? 8000000 : 1000000);
      Event here;
      here.record(memory.stream);
      streams[i].wait(here);
      comm.barrier();
      comm.all_reduce(x.view(), ReduceOp::kMax, streams[i]).wait();
      comm.synchronize(streams[i]);
    }
    const std::vector<float> got = x.get();
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(got[i], reduced<float>(2, i, ReduceOp::kMax));
  });
}

// Random operations on three communicators, each on a stream of its own, eagerly, in graphs and
// mixed: what they give, and that nobody waits for long.
TEST_F(CommGpu, RandomOperationsOnThreeCommunicators) {
  // Four ranks with graphs of three branches take more queues than the GPU has
  // (docs/adr/0028-ranks-on-gpus.md).
  for (const int ranks : {2, 3}) {
    run_gpu_ranks(ranks, Seconds(2), false, {.staging_bytes = 1 << 20}, [&](Communicator& comm) {
      const int communicators = ranks == 2 ? 3 : 2;
      constexpr int64_t kMost = 60000;
      const Stream origin = RankMemory::mine()->stream;
      std::vector<std::unique_ptr<Communicator>> groups;
      std::vector<Stream> streams;
      for (int g = 0; g < communicators; ++g) {
        groups.push_back(comm.split(0, g == 1 ? -comm.rank() : comm.rank(), text("group {}", g)));
        groups.back()->prepare(RankMemory::mine()->gpu,
                               {.staging_bytes = 1 << 20, .beside_compute = g == 2});
        streams.push_back(Stream::on(RankMemory::mine()->gpu));
      }
      GpuPlace::begin(comm);
      std::deque<Floats> parts, wholes;
      for (int g = 0; g < communicators; ++g) {
        parts.emplace_back(std::vector<float>(kMost));
        wholes.emplace_back(std::vector<float>(ranks * kMost));
      }
      std::mt19937 same(7);  // the same on all ranks
      // Sums of what was gathered are gathered again; the integers stay exact. Element i of rank r's
      // part is c * (r + 1) + i % 5 at first, and afterwards a constant of all ranks.
      struct Planned {
        int group, kind;
        int64_t n;
      };
      const auto draw = [&](int count) {
        std::vector<Planned> out;
        for (int i = 0; i < count; ++i) {
          out.push_back({int(same() % communicators), int(same() % 3),
                         int64_t(same() % 3 ? 1 + same() % 3000 : 20000 + same() % 40000)});
        }
        return out;
      };
      const auto issue = [&](const Planned& p) {
        Communicator& group = *groups[p.group];
        const Stream& stream = streams[p.group];
        const TensorView part = parts[p.group].view().slice(0, 0, p.n);
        const TensorView whole = wholes[p.group].view().slice(0, 0, ranks * p.n);
        if (p.kind == 0) group.all_reduce(part, ReduceOp::kMax, stream).wait();
        if (p.kind == 1) group.all_gather(part, whole, stream).wait();
        if (p.kind == 2) group.reduce_scatter(whole, part, ReduceOp::kMax, stream).wait();
      };
      const auto forked = [&](const std::vector<Planned>& list) {
        Event begin;
        begin.record(origin);
        for (const Stream& s : streams) s.wait(begin);
        for (const Planned& p : list) issue(p);
        for (const Stream& s : streams) {
          Event end;
          end.record(s);
          origin.wait(end);
        }
      };
      std::vector<std::vector<Planned>> lists;
      std::vector<Graph> graphs;
      for (int i = 0; i < 4; ++i) {
        lists.push_back(draw(30));
        comm.barrier();
        graphs.emplace_back(origin, [&] { forked(lists.back()); });
        comm.barrier();
      }
      const double took = seconds_of([&] {
        for (int round = 0; round < 340; ++round) {  // more than 10,000 operations
          const int which = int(same() % 4);
          if (same() % 2) {
            graphs[which].launch(origin);
          } else {
            forked(lists[which]);
          }
        }
        comm.synchronize(origin);
      });
      EXPECT_LT(took, 30);
      for (int g = 0; g < communicators; ++g) groups[g]->synchronize(streams[g]);
      // After all of it, one operation of each group has its exact result.
      for (int g = 0; g < communicators; ++g) {
        GpuPlace::begin(comm);
        Floats x(values<float>(groups[g]->rank(), 30000));
        groups[g]->all_reduce(x.view(), ReduceOp::kSum, origin).wait();
        const std::vector<float> got = x.get();
        for (int64_t i = 0; i < 30000; ++i) {
          ASSERT_EQ(got[i], reduced<float>(ranks, i, ReduceOp::kSum)) << i << " of group " << g;
        }
      }
      comm.barrier();
    });
  }
}

// A rank whose host is far ahead does not fill its queue of the GPU: who stands before a full queue
// keeps the other threads of the process from making events.
TEST_F(CommGpu, ARankFarAheadDoesNotHoldUpItsPeer) {
  run_gpu_ranks(2, Seconds(5), false, {.staging_bytes = 1 << 20}, [](Communicator& comm) {
    const Stream stream = RankMemory::mine()->stream;
    GpuPlace::begin(comm);
    Floats x(values<float>(comm.rank(), 100));
    comm.barrier();
    std::vector<Event> events(comm.rank() == 1 ? 2000 : 0);
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    for (Event& event : events) event.record(stream);
    for (int i = 0; i < 3000; ++i) comm.all_reduce(x.view(), ReduceOp::kMax, stream).wait();
    comm.synchronize(stream);
    const std::vector<float> got = x.get();
    for (int64_t i = 0; i < 100; ++i) ASSERT_EQ(got[i], reduced<float>(2, i, ReduceOp::kMax));
  });
}

// Sums that take many rounds of all blocks, and several chunks of the staging; operands that can be
// streamed in packs, and such as end within one.
TEST_F(CommGpu, SumsOfManyElements) {
  for (const bool shared : {false, true}) {
    run_gpu_ranks(3, Seconds(20), shared, {.staging_bytes = 1 << 20}, [](Communicator& comm) {
      for (const int64_t n : {400000, 400003}) {
        conformance::check_reductions<float, GpuPlace>(comm, n);
        conformance::check_reductions<bf16, GpuPlace>(comm, n);
        conformance::check_reductions<int64_t, GpuPlace>(comm, n);
      }
    });
  }
}

// A captured step is replayed with changing inputs; each replay has the bits of the same operations
// without a graph.
TEST_F(CommGpu, GraphsGiveWhatEagerOperationsGive) {
  for (const bool shared : {false, true}) {
    run_gpu_ranks(4, Seconds(10), shared, {.staging_bytes = 1 << 20}, [&](Communicator& comm) {
      RankMemory& memory = *RankMemory::mine();
      const Stream stream = memory.stream;
      GpuPlace::begin(comm);
      const int64_t n = 150001;
      Floats input{std::vector<float>(4 * n)}, part{std::vector<float>(n)},
          whole{std::vector<float>(4 * n)}, little{std::vector<float>(1000)};
      Buffer inputs = Buffer::pinned(16 * n);
      auto* fresh = reinterpret_cast<float*>(inputs.data());
      const auto step = [&] {
        copy(input.view(), TensorView(fresh, DType::kFloat32, {4 * n}), stream);
        comm.reduce_scatter(input.view(), part.view(), ReduceOp::kSum, stream).wait();
        comm.all_gather(part.view(), whole.view(), stream).wait();
        copy(little.view(), whole.view().slice(0, 5, 1005), stream);
        comm.all_reduce(little.view(), ReduceOp::kSum, stream).wait();
        comm.all_reduce(whole.view(), ReduceOp::kMin, stream).wait();
      };
      expect_replays_are_eager(comm, stream, {fresh, size_t(4 * n)}, whole, little, step);
    });
  }
}

// What the ranks say, where they fail, and that the next group works.
std::vector<std::string> errors_of(int ranks, double deadline,
                                   const std::function<void(Communicator&, const Stream&)>& body) {
  std::vector<std::string> out(ranks);
  const double took = seconds_of([&] {
    try {
      run_gpu_ranks(ranks, Seconds(deadline), false, {.staging_bytes = 1 << 20},
                    [&](Communicator& comm) {
                      try {
                        const Stream stream = RankMemory::mine()->stream;
                        body(comm, stream);
                        comm.synchronize(stream);
                      } catch (const Error& e) {
                        out[comm.rank()] = e.what();
                        throw;
                      }
                    });
    } catch (const Error&) {
    }
  });
  EXPECT_LT(took, deadline + 1);
  run_gpu_ranks(ranks, Seconds(10), false, {.staging_bytes = 1 << 20}, [&](Communicator& comm) {
    GpuPlace::begin(comm);
    Floats x(values<float>(comm.rank(), 100));
    comm.all_reduce(x.view(), ReduceOp::kSum, GpuPlace::stream()).wait();
    EXPECT_EQ(x.get()[7], reduced<float>(ranks, 7, ReduceOp::kSum));
  });
  return out;
}

// What is there now, whatever the communicator says.
std::vector<float> content(const Floats& x) {
  const Tensor here = to_host(x.view(), RankMemory::mine()->stream);
  return {here.data<float>(), here.data<float>() + here.view().numel()};
}

TEST_F(CommGpu, ALatePeerIsNamed) {
  const auto errors = errors_of(3, 1, [](Communicator& comm, const Stream& stream) {
    GpuPlace::begin(comm);
    Floats x(values<float>(comm.rank(), 100));
    comm.all_reduce(x.view(), ReduceOp::kSum, stream).wait();
    if (comm.rank() == 0) {  // it has nothing more to do, and no wait of its own
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      comm.all_reduce(x.view(), ReduceOp::kSum, stream).wait();
      return;
    }
    const std::vector<float> before = x.get();
    const std::string late = error_of([&] {
      comm.all_reduce(x.view(), ReduceOp::kSum, stream).wait();
      Event end;
      end.record(stream);
      comm.wait(end);
    });
    EXPECT_EQ(content(x), before) << "of an operation that a peer did not come to";
    fail(ErrorKind::kComm, "{}", late);
  });
  for (int r = 0; r < 3; ++r) {
    EXPECT_NE(errors[r].find("comm \"world\", all_reduce 2 (float32, 400 B): rank "),
              std::string::npos)
        << errors[r];
    EXPECT_NE(errors[r].find(" waited 1.0 s for rank 0 (its word is at 1 of 2)"), std::string::npos)
        << errors[r];
  }
}

// Copies and sums that are one kernel with their meetings leave outputs alone.
TEST_F(CommGpu, NothingIsDoneWhereAPeerDoesNotCome) {
  const auto errors = errors_of(2, 1, [](Communicator& comm, const Stream& stream) {
    GpuPlace::begin(comm);
    const int64_t n = 100000;
    Floats part(values<float>(comm.rank(), n)), whole(std::vector<float>(2 * n, 7));
    const Floats odd(std::vector<float>(1));  // so that the sum's place is even
    Floats sum(std::vector<float>(n, 7));
    if (comm.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      return;
    }
    comm.all_gather(part.view(), whole.view(), stream).wait();
    comm.reduce_scatter(whole.view(), sum.view(), ReduceOp::kSum, stream).wait();
    Event end;
    end.record(stream);
    const std::string late = error_of([&] { comm.wait(end); });
    const std::vector<float> gathered = content(whole), summed = content(sum);
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(gathered[i], 7);
      ASSERT_EQ(summed[i], 7);
    }
    fail(ErrorKind::kComm, "{}", late);
  });
  EXPECT_NE(errors[1].find("comm \"world\", all_gather 1 (float32, 400000 B): rank 1 waited 1.0 s"),
            std::string::npos)
      << errors[1];
}

TEST_F(CommGpu, AnotherOperationIsNamed) {
  const auto errors = errors_of(2, 5, [](Communicator& comm, const Stream& stream) {
    GpuPlace::begin(comm);
    Floats x{std::vector<float>(200)}, y{std::vector<float>(100)};
    if (comm.rank() == 0) comm.all_gather(y.view(), x.view(), stream).wait();
    if (comm.rank() == 1) comm.all_reduce(x.view(), ReduceOp::kMax, stream).wait();
  });
  const std::string one = "all_gather(float32, 400 B)", other = "all_reduce(float32, 800 B, max)";
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(errors[r] == text("comm \"world\", operation 1: rank 0 runs {}, rank 1 runs {}",
                                  one, other) ||
                errors[r] ==
                    text("comm \"world\", operation 1: rank 1 runs {}, rank 0 runs {}", other, one))
        << errors[r];
  }
}

TEST_F(CommGpu, ARankThatThrowsEndsTheWaitsOfOthers) {
  const auto errors = errors_of(2, 8, [](Communicator& comm, const Stream& stream) {
    GpuPlace::begin(comm);
    Floats x{std::vector<float>(50000)};
    if (comm.rank() == 1) fail(ErrorKind::kIo, "disk full");
    comm.all_reduce(x.view(), ReduceOp::kSum, stream).wait();
  });
  EXPECT_EQ(errors[0],
            "comm \"world\", all_reduce 1 (float32, 200000 B): rank 0 stopped waiting for rank 1: "
            "rank 1 failed: disk full");
}

}  // namespace
}  // namespace moiety::comm
