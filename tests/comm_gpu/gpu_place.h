// Operands of the conformance suite on GPUs, for ranks that are threads, or processes, and share
// GPU 0 or have one each.
#pragma once

#include <cstring>
#include <map>
#include <random>
#include <span>

#include "moiety/base/copy.h"
#include "moiety/base/graph.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/thread_group.h"
#include "tests/comm/conformance.h"
#include "tests/support/gpu_of_rank.h"

namespace moiety::comm {

inline constexpr Device kGpu{DeviceType::kCuda, 0};

// Keeps the stream busy for this long.
void spin(const Stream& stream, int64_t nanoseconds);

// What one rank has on the GPU. It is made before ranks start, since nothing may be allocated while
// a kernel waits, and is used again by the next group.
class RankMemory {
 public:
  static constexpr int64_t kBytes = int64_t{64} << 20;

  explicit RankMemory(Device gpu = kGpu)
      : gpu(gpu), own(kBytes, gpu), pinned(Buffer::pinned(kBytes)), stream(Stream::on(gpu)) {}

  const Device gpu;
  Buffer own, pinned;
  Stream stream;
  SymmetricBuffer shared;  // attached to the group, if its operands are to lie there
  Communicator* comm = nullptr;
  int64_t used = 0;    // of own or shared, by arrays since `begin`
  int64_t arrays = 0;  // made by this group, the same on all its ranks
  std::mt19937 random{1};

  // Of the calling thread's rank.
  static RankMemory*& mine() {
    static thread_local RankMemory* memory = nullptr;
    return memory;
  }
};

// Arrays with guards of poison around them, at odd places too.
struct GpuPlace {
  static constexpr int64_t kGuard = 64;
  static constexpr int kPoison = 0xA5;

  static void begin(Communicator& comm) {
    RankMemory& memory = *RankMemory::mine();
    memory.comm = &comm;
    memory.used = 0;
  }
  // Nothing may be allocated while a kernel waits, whichever group it belongs to.
  static void prepare(Communicator& comm, Communicator& world) {
    RankMemory& memory = *RankMemory::mine();
    world.synchronize(memory.stream);
    world.barrier();
    comm.prepare(memory.gpu, {.staging_bytes = 1 << 20});
    world.barrier();
  }
  // The rank's stream, now and then late.
  static Stream stream() {
    RankMemory& memory = *RankMemory::mine();
    if (memory.random() % 3 == 0) spin(memory.stream, memory.random() % 30000);
    return memory.stream;
  }

  template <class T>
  class Array {
   public:
    explicit Array(const std::vector<T>& x, bool alike = true) : n_(int64_t(x.size())) {
      RankMemory& memory = *RankMemory::mine();
      const bool shared = memory.shared && alike;
      const int64_t bytes = n_ * int64_t(sizeof(T));
      // Every other array begins at one element behind a multiple of 256.
      const int64_t odd = ++memory.arrays % 2 * int64_t(sizeof(T));
      const int64_t begin = (memory.used + 255) / 256 * 256 + odd;
      memory.used = begin + bytes + 2 * kGuard;
      MOIETY_CHECK(memory.used <= RankMemory::kBytes, "the tests' memory is used up");
      base_ = (shared ? memory.shared.local() : memory.own.data()) + begin;
      std::byte* staged = memory.pinned.data();
      std::memset(staged, kPoison, size_t(bytes + 2 * kGuard));
      if (n_ > 0) std::memcpy(staged + kGuard, x.data(), size_t(bytes));
      copy(whole(base_, memory.gpu), whole(staged, {}), memory.stream);
      memory.comm->synchronize(memory.stream);
    }

    TensorView view() const {
      return TensorView(base_ + kGuard, dtype_of<T>, {n_}, RankMemory::mine()->gpu);
    }
    std::vector<T> get() const {
      RankMemory& memory = *RankMemory::mine();
      std::byte* staged = memory.pinned.data();
      copy(whole(staged, {}), whole(base_, memory.gpu), memory.stream);
      memory.comm->synchronize(memory.stream);
      const int64_t bytes = n_ * int64_t(sizeof(T));
      for (int64_t i = 0; i < kGuard; ++i) {
        EXPECT_EQ(int(staged[i]), kPoison) << i << " before the array";
        EXPECT_EQ(int(staged[kGuard + bytes + i]), kPoison) << i << " behind the array";
      }
      std::vector<T> out(n_);
      if (n_ > 0) std::memcpy(out.data(), staged + kGuard, size_t(bytes));
      return out;
    }

   private:
    TensorView whole(std::byte* p, Device device) const {
      return TensorView(p, DType::kUInt8, {n_ * int64_t(sizeof(T)) + 2 * kGuard}, device);
    }

    int64_t n_;
    std::byte* base_;
  };
};

// Runs the body on this rank, prepared for the GPU; with `shared`, arrays lie in an attached buffer.
inline void run_gpu_rank(RankMemory& memory, Communicator& comm, bool shared,
                         const GpuLinkOptions& options,
                         const std::function<void(Communicator&)>& body) {
  RankMemory::mine() = &memory;
  memory.comm = &comm;
  memory.random.seed(unsigned(comm.rank()));
  memory.arrays = 0;
  comm.prepare(memory.gpu, options);
  if (shared && comm.size() > 1) {
    memory.shared = SymmetricBuffer::create(comm, "operands", RankMemory::kBytes, memory.gpu);
    comm.attach(memory.shared);
  }
  struct Release {
    RankMemory& memory;
    ~Release() { memory.shared = {}; }
  } release{memory};
  body(comm);
  comm.synchronize(memory.stream);
  comm.barrier();
}

// The step of all ranks as a graph, behind a run of it, in which it takes its memory.
inline Graph captured(Communicator& comm, const Stream& stream, const std::function<void()>& step) {
  step();
  comm.synchronize(stream);
  comm.barrier();
  Graph graph(stream, step);
  comm.barrier();
  return graph;
}

// Replays the step of all ranks, captured, with changing inputs, which it takes from `fresh`: `whole`
// is their sum over ranks, `little` begins with the sum over ranks of whole's element 5. Each replay
// has the bits of the same operations without a graph.
inline void expect_replays_are_eager(Communicator& comm, const Stream& stream,
                                     std::span<float> fresh, const GpuPlace::Array<float>& whole,
                                     const GpuPlace::Array<float>& little,
                                     const std::function<void()>& step) {
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
  };
  comm.barrier();  // all have allocated
  Graph graph = captured(comm, stream, step);
  for (int round = 0; round < 10; ++round) {
    for (size_t i = 0; i < fresh.size(); ++i) {
      fresh[i] = conformance::value<float>(comm.rank(), int64_t(i), round);
    }
    for (int k = 0; k < 3; ++k) graph.launch(stream);
    comm.synchronize(stream);
    const std::vector<float> got = whole.get(), few = little.get();
    for (size_t i = 0; i < fresh.size(); i += 997) {
      ASSERT_EQ(got[i], conformance::reduced<float>(comm.size(), int64_t(i), ReduceOp::kSum, round))
          << i;
    }
    const float one = conformance::reduced<float>(comm.size(), 5, ReduceOp::kSum, round);
    float sum = 0;
    for (int r = 0; r < comm.size(); ++r) sum += one;
    ASSERT_EQ(few[0], sum);
    step();
    EXPECT_TRUE(same(whole.get(), got));
    EXPECT_TRUE(same(little.get(), few));
  }
  comm.synchronize(stream);
  graph = {};
  comm.barrier();
}

// Runs the body on ranks that are threads.
inline void run_gpu_ranks(int ranks, Seconds deadline, bool shared, const GpuLinkOptions& options,
                          const std::function<void(Communicator&)>& body) {
  static auto& pool = *new std::map<int, RankMemory>;  // CUDA may end before it
  for (int r = 0; r < ranks; ++r) pool.try_emplace(r, gpu_of(r));
  run_thread_ranks(ranks, {.deadline = deadline}, [&](Communicator& comm) {
    run_gpu_rank(pool.at(comm.rank()), comm, shared, options, body);
  });
}

// The same, each rank on a GPU of its own.
inline void run_ranks_apart(int ranks, const ThreadGroupOptions& group, bool shared,
                            const GpuLinkOptions& options,
                            const std::function<void(Communicator&)>& body) {
  static auto& pool = *new std::map<int, RankMemory>;
  for (int r = 0; r < ranks; ++r) pool.try_emplace(r, Device{DeviceType::kCuda, r});
  run_thread_ranks(ranks, group, [&](Communicator& comm) {
    run_gpu_rank(pool.at(comm.rank()), comm, shared, options, body);
  });
}

}  // namespace moiety::comm
