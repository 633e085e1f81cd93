// Memory, copies, streams, events and errors on a GPU.
#include <algorithm>
#include <numeric>
#include <thread>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"
#include "moiety/base/trace.h"
#include "tests/base_gpu/kernels.h"
#include "tests/support/gpu_test.h"

namespace moiety {
namespace {

ErrorKind kind_of(auto&& f, std::string* text = nullptr) {
  try {
    f();
  } catch (const Error& e) {
    if (text) *text = e.what();
    return e.kind();
  }
  ADD_FAILURE() << "no error";
  return ErrorKind::kIo;
}

using Runtime = GpuTest;

std::vector<int32_t> words_of(const TensorView& x, const Stream& stream) {
  std::vector<int32_t> out(x.numel());
  copy({out.data(), DType::kInt32, x.sizes()}, x, stream);
  stream.synchronize();
  return out;
}

TEST_F(Runtime, PropertiesAreThoseOfAGpu) {
  const GpuProperties& p = gpu_properties(0);
  EXPECT_FALSE(p.name.empty());
  EXPECT_GE(p.major, 7);
  EXPECT_GE(p.multiprocessors, 1);
  EXPECT_GT(p.l2, 0);
  EXPECT_GE(p.shared_block, 48 << 10);
  EXPECT_GT(p.memory, gpu_free_memory(0));
  EXPECT_TRUE(gpu_status().text.empty());
  EXPECT_GE(gpu_status().driver, gpu_status().runtime / 1000 * 1000);
}

TEST_F(Runtime, ReciprocalsOfSigmoidsAreRoundedCorrectly) {
  const Tensor wrong(DType::kInt32, {1}, kGpu);
  count_wrong_reciprocals(wrong, stream);
  EXPECT_EQ(words_of(wrong, stream)[0], 0);
}

TEST_F(Runtime, MemoryIsZeroedAndGivenBack) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  Tensor first(DType::kInt32, {1}, kGpu);  // the run time takes memory of its own at first uses
  words_of(first, stream);
  const int64_t before = gpu_free_memory(0);
  {
    const Buffer buffer(kBytes, kGpu);
    EXPECT_EQ(buffer.device(), kGpu);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 256, 0u);
    EXPECT_LE(gpu_free_memory(0), before - kBytes);
    const TensorView words = buffer.view(DType::kInt32, {kBytes / 4});
    EXPECT_EQ(words.device(), kGpu);
    // Read by a stream that waits for no other.
    const std::vector<int32_t> host = words_of(words, stream);
    EXPECT_EQ(std::count(host.begin(), host.end(), 0), kBytes / 4);
  }
  EXPECT_GT(gpu_free_memory(0), before - kBytes / 4);
  EXPECT_EQ(Buffer(0, kGpu).data(), nullptr);
}

TEST_F(Runtime, OutOfMemoryNamesWhatAndHowMuch) {
  std::string text;
  const int64_t bytes = gpu_properties(0).memory * 2;
  EXPECT_EQ(kind_of([&] { Buffer(bytes, kGpu, "expert weights"); }, &text),
            ErrorKind::kOutOfMemory);
  EXPECT_EQ(text.find("expert weights: cuda:0 is out of memory for "), 0u) << text;
  // The error is not reported again by what follows.
  Tensor x(DType::kInt32, {4}, kGpu);
  add_one(x, stream);
  EXPECT_EQ(words_of(x, stream), std::vector<int32_t>(4, 1));
}

TEST_F(Runtime, AGpuThatIsNotThereIsNamed) {
  std::string text;
  const Device device{DeviceType::kCuda, 4096};
  EXPECT_EQ(kind_of([&] { Tensor(DType::kInt32, {1}, device, "x"); }, &text),
            ErrorKind::kUnsupported);
  EXPECT_EQ(text.find("x: cuda:4096 was asked for, but the machine has "), 0u) << text;
}

TEST_F(Runtime, CopiesOfRowsBothWays) {
  Tensor host = Tensor::pinned(DType::kInt32, {5, 7});
  std::iota(host.data<int32_t>(), host.data<int32_t>() + 35, 0);
  Tensor device(DType::kInt32, {6, 9}, kGpu);
  fill_bytes(device, 0xFF, stream);
  // Columns 1..6 of the source to columns 2..7 of rows 1..5.
  const TensorView window = device.view().slice(0, 1, 6).slice(1, 2, 7);
  copy(window, host.view().slice(1, 1, 6), stream);
  // A contiguous row from a strided one.
  Tensor column(DType::kInt32, {5, 1}, kGpu);
  copy(column, window.slice(1, 4, 5), stream);
  const std::vector<int32_t> seen = words_of(device, stream);
  for (int64_t r = 0; r < 6; ++r) {
    for (int64_t c = 0; c < 9; ++c) {
      const bool inside = r >= 1 && c >= 2 && c < 7;
      ASSERT_EQ(seen[r * 9 + c], inside ? (r - 1) * 7 + c - 1 : -1) << r << " " << c;
    }
  }
  EXPECT_EQ(words_of(column, stream), (std::vector<int32_t>{5, 12, 19, 26, 33}));
  // Inside one GPU, and bytes of a part.
  Tensor twin(DType::kInt32, {6, 9}, kGpu);
  copy(twin, device, stream);
  fill_bytes(twin.view().slice(1, 0, 1), 0, stream);
  EXPECT_EQ(words_of(twin, stream)[9], 0);
  EXPECT_EQ(words_of(twin, stream)[10], -1);
  EXPECT_EQ(kind_of([&] { copy(device, host, stream); }), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind_of([&] { copy(twin, device, Stream()); }), ErrorKind::kInvalidArgument);
}

TEST_F(Runtime, EventsOrderStreams) {
  // The producer spins for a while before it writes; the consumer must not run before that.
  const Stream consumer = Stream::on(kGpu);
  Tensor x(DType::kInt32, {1 << 20}, kGpu), y(DType::kInt32, {1 << 20}, kGpu);
  // Loading a kernel at its first launch may wait for what runs.
  spin(1, stream);
  add_one(y, stream);
  stream.synchronize();
  Event written;
  EXPECT_TRUE(written.complete());
  for (int round = 1; round <= 3; ++round) {
    spin(20'000'000, stream);
    add_one(x, stream);
    written.record(stream);
    EXPECT_FALSE(written.complete());
    consumer.wait(written);
    copy(y, x, consumer);
    const std::vector<int32_t> seen = words_of(y, consumer);
    EXPECT_EQ(seen, std::vector<int32_t>(1 << 20, round));
    EXPECT_TRUE(written.complete());
  }
}

TEST_F(Runtime, ACopyOfAnEventKeepsItsPoint) {
  Event a;
  a.record(stream);
  const Event b = a;
  stream.synchronize();
  spin(200'000'000, stream);
  a.record(stream);
  EXPECT_FALSE(a.complete());
  EXPECT_TRUE(b.complete());
  a.wait();
  EXPECT_TRUE(a.complete());
}

TEST_F(Runtime, TheHostStandsBetweenCpuAndGpuStreams) {
  const Stream cpu = Stream::deferred();
  Tensor x(DType::kInt32, {1000}, kGpu);
  std::vector<int32_t> host(1000, 41);
  // GPU after CPU: the host runs the CPU's operations first.
  cpu.run([&] { host.assign(1000, 1); });
  Event ready;
  ready.record(cpu);
  stream.wait(ready);
  copy(x, {host.data(), DType::kInt32, {1000}}, stream);
  // CPU after GPU: when its turn comes.
  spin(20'000'000, stream);
  add_one(x, stream);
  Tensor back = Tensor::pinned(DType::kInt32, {1000});
  copy(back, x, stream);
  Event done;
  done.record(stream);
  int32_t seen = 0;
  cpu.wait(done);
  cpu.run([&] { seen = back.data<int32_t>()[999]; });
  EXPECT_EQ(seen, 0);
  cpu.synchronize();
  EXPECT_EQ(seen, 2);
}

TEST_F(Runtime, TimedEventsMeasure) {
  Event begin = Event::timed(), end = Event::timed();
  begin.record(stream);
  spin(100'000'000, stream);
  end.record(stream);
  end.wait();
  const double ms = elapsed_ms(begin, end);
  EXPECT_GT(ms, 10);  // 10^8 cycles at no more than 10 GHz
  EXPECT_LT(ms, 10000);
  Event untimed;
  untimed.record(stream);
  EXPECT_EQ(kind_of([&] { elapsed_ms(begin, untimed); }), ErrorKind::kInvalidArgument);
}

TEST_F(Runtime, ExternalStreamsAreUsedAndLeftAlone) {
  Tensor x(DType::kInt32, {100}, kGpu);
  void* handle = make_cuda_stream();
  {
    const Stream external = Stream::external(kGpu, handle);
    EXPECT_EQ(external.cuda_stream(), handle);
    EXPECT_EQ(external.device(), kGpu);
    add_one(x, external);
    Event done;
    done.record(external);
    stream.wait(done);
    EXPECT_EQ(words_of(x, stream), std::vector<int32_t>(100, 1));
  }
  // Still alive after its wrapper is gone.
  add_one(x, Stream::external(kGpu, handle));
  EXPECT_TRUE(destroy_cuda_stream(handle));
  // The legacy default stream has no handle.
  const Stream legacy = Stream::external(kGpu, nullptr);
  legacy.synchronize();
  add_one(x, legacy);
  EXPECT_EQ(words_of(x, legacy), std::vector<int32_t>(100, 3));
}

TEST_F(Runtime, AStreamThatIsGivenBackIsTakenAgain) {
  void* handle = nullptr;
  {
    const Stream before = Stream::on(kGpu);
    handle = before.cuda_stream();
  }
  const Stream again = Stream::on(kGpu), other = Stream::on(kGpu);
  EXPECT_EQ(again.cuda_stream(), handle);
  EXPECT_NE(other.cuda_stream(), handle);
  const Tensor x(DType::kInt32, {4}, kGpu);
  add_one(x, again);
  EXPECT_EQ(words_of(x, again), std::vector<int32_t>(4, 1));
}

TEST_F(Runtime, WorkIsLaunchedFromAnyThread) {
  Tensor x(DType::kInt32, {100}, kGpu);
  std::thread([&] { add_one(x, stream); }).join();
  EXPECT_EQ(words_of(x, stream), std::vector<int32_t>(100, 1));
}

TEST_F(Runtime, ALaunchThatFailsNamesTheKernel) {
  Tensor x(DType::kInt32, {1}, kGpu);
  std::string text;
  EXPECT_EQ(kind_of([&] { launch_too_many_threads(x, stream); }, &text), ErrorKind::kCuda);
  EXPECT_EQ(text.find("add_one: launch of 1 blocks of 2048 threads"), 0u) << text;
  EXPECT_NE(text.find("cudaErrorInvalid"), std::string::npos) << text;
  add_one(x, stream);
  EXPECT_EQ(words_of(x, stream), std::vector<int32_t>(1, 1));
}

TEST_F(Runtime, ALaunchIsASpanOfTheHost) {
  const Tensor x(DType::kInt32, {4}, kGpu);
  Trace trace;
  set_current_trace(&trace);
  add_one(x, stream);
  set_current_trace(nullptr);
  stream.synchronize();
  ASSERT_EQ(trace.events.size(), 1u);
  EXPECT_STREQ(trace.events[0].name, "add_one");
  EXPECT_EQ(trace.events[0].lane, TraceLane::kHost);
  EXPECT_GE(trace.events[0].end, trace.events[0].begin);
}

TEST_F(Runtime, BlocksPastSixteenBitsAndMuchSharedMemory) {
  constexpr int64_t kBlocks = 200'000;
  Tensor x(DType::kInt32, {kBlocks}, kGpu);
  const int64_t shared = gpu_properties(0).shared_block;
  mark_blocks(x, kBlocks, 0, stream);
  mark_blocks(x.view().slice(0, 0, 10), 10, shared, stream);
  mark_blocks(x, 0, 0, stream);  // nothing to do
  const std::vector<int32_t> seen = words_of(x, stream);
  for (int64_t i = 0; i < kBlocks; ++i) ASSERT_EQ(seen[i], i < 10 ? 2 : 1) << i;
  EXPECT_EQ(resident_mark_blocks(1024, stream) % gpu_properties(0).multiprocessors, 0);
  EXPECT_GE(resident_mark_blocks(1024, stream), gpu_properties(0).multiprocessors);
  EXPECT_EQ(resident_mark_blocks(shared, stream), gpu_properties(0).multiprocessors);
}

// More than before must be asked for; less leaves what is allowed.
TEST_F(Runtime, SharedMemoryThatIsAllowedOnceStaysAllowed) {
  constexpr int64_t kBlocks = 10;
  Tensor x(DType::kInt32, {kBlocks}, kGpu);
  const int64_t most = gpu_properties(0).shared_block;
  int32_t launches = 0;
  for (const int64_t shared : {int64_t{0}, most / 2, int64_t{1024}, most, most / 2, most}) {
    mark_blocks_again(x, kBlocks, shared, stream);
    ++launches;
  }
  mark_blocks_again(x, 0, most, stream);  // nothing to do
  EXPECT_EQ(words_of(x, stream), std::vector<int32_t>(kBlocks, launches));
  EXPECT_EQ(kind_of([&] { mark_blocks_again(x, 1, most + 1024, stream); }), ErrorKind::kCuda);
  mark_blocks_again(x, kBlocks, most, stream);
  EXPECT_EQ(words_of(x, stream), std::vector<int32_t>(kBlocks, launches + 1));
}

TEST_F(Runtime, CpuOperationsDoNotRunOnAGpuStream) {
  std::string text;
  EXPECT_EQ(kind_of([&] { stream.run([] {}); }, &text), ErrorKind::kInvalidArgument);
  EXPECT_EQ(text, "stream: cuda:0 runs kernels, this operation has none");
  Tensor host(DType::kInt32, {3});
  EXPECT_EQ(kind_of([&] { check_device("scale", "x", host, stream); }, &text),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(text, "scale: x is int32[3], but must be on cuda:0 as the stream");
}

}  // namespace
}  // namespace moiety
