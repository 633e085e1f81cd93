// What runs the steps on a GPU: each is a kernel on the caller's stream.
#include <cstddef>

#include "moiety/base/deadline.h"
#include "moiety/base/launch.cuh"
#include "moiety/comm/fault_pages.h"
#include "moiety/moe/peers/step_exchange.h"
#include "moiety/moe/peers/team_device.cuh"

namespace moiety::moe::peers {
namespace {

// The blocks of a step that a multiprocessor should have room for; of a step around another one,
// those of that.
template <class Step>
constexpr int kResident = [] {
  if constexpr (requires { Step::kResident; }) {
    return Step::kResident;
  } else {
    return 1;
  }
}();
// Beside a push it would take 134 registers, which leave room for one block in place of two.
template <>
constexpr int kResident<ExpandRows> = 2;
template <class Step>
constexpr int kResident<Last<Step>> = kResident<Step>;
template <class Own>
constexpr int kResident<PushBeside<Own>> = kResident<Own>;
template <class Step>
constexpr int kResident<ThenAwait<Step>> = kResident<Step>;

template <class Step>
__global__ void __launch_bounds__(Step::kThreads, kResident<Step>)
    run_step(const __grid_constant__ Step step) {
  extern __shared__ __align__(16) std::byte memory[];
  __shared__ int64_t parts[32];
  DeviceTeam team(memory, parts);
  step(team);
}

// Loads all steps' kernels, so that none is loaded while another one waits. Nor may one need more
// stack than there is: CUDA would wait for all kernels of the GPU to get it, also for those that
// wait for a rank which is a thread of this process.
template <class Step>
void load_kernel() {
  cudaFuncAttributes kernel{};
  size_t stack = 0;
  MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&kernel, run_step<Step>));
  MOIETY_CUDA_CHECK(cudaDeviceGetLimit(&stack, cudaLimitStackSize));
  MOIETY_CHECK(kernel.localSizeBytes <= stack,
               "a step of an exchange takes {} bytes of stack of {}", kernel.localSizeBytes, stack);
}
template <class... Steps>
void load_kernels() {
  (load_kernel<Steps>(), ...);
}
template <class T>
void load_sums() {
  load_kernels<ThenAwait<PushSums<T>>, Last<TakeSums<T, T>>, Last<TakeSums<T, float>>,
               Last<AddParts<T, T>>, Last<AddParts<T, float>>, Last<ScaleRows<T>>,
               ThenAwait<PushBeside<ScaleRows<T>>>>();
}

comm::FaultPages<FaultPage>& fault_pages() {
  static auto& pages = *new comm::FaultPages<FaultPage>("fault page of a group of experts");
  return pages;
}

// At most so many operations are under way, unless they are in graphs: a host that stands before a
// full queue of its GPU holds up the threads of other ranks (Note [Few operations under way],
// comm/mapped/link_cuda.cpp).
constexpr uint64_t kAhead = 32;

class CudaMachine {
 public:
  CudaMachine(int device, Seconds deadline)
      : device_(device), deadline_(deadline), page_(fault_pages().take()) {
    const CudaDeviceGuard guard(device);
    multiprocessors_ = gpu_properties(device).multiprocessors;
    load_kernels<Greet, Arrive, SetApart, Join, Enter, Await, AwaitReaders, TakeReport,
                 ThenAwait<PushBeside<ExpandRows>>, Last<ExpandRows>, ZeroPlaces, CountRows,
                 AddBlocks, CountPairs, NumberPairs<false>, NumberPairs<true>, ExchangeHeads,
                 SettlePlan, Last<FindSlots>, Early<false>, Early<true>>();
    load_sums<bf16>();
    load_sums<fp16>();
    load_sums<float>();
    // Made now (Note [Events are made early], comm/mapped/link_cuda.cpp).
    const Stream own = Stream::external({DeviceType::kCuda, device}, cudaStreamPerThread);
    for (Event* event : {&last_, &waited_, &marks_[0], &marks_[1]}) event->record(own);
  }
  CudaMachine(CudaMachine&& other) noexcept
      : device_(other.device_),
        deadline_(other.deadline_),
        page_(std::exchange(other.page_, nullptr)),
        multiprocessors_(other.multiprocessors_),
        last_(std::move(other.last_)),
        waited_(std::move(other.waited_)),
        marks_{std::move(other.marks_[0]), std::move(other.marks_[1])} {}
  CudaMachine& operator=(CudaMachine&&) = delete;
  // Waits for the operations that were issued, at most as long as a wait may take.
  ~CudaMachine() {
    if (!page_) return;
    const Deadline leave(deadline_ + Seconds(1));
    Backoff backoff;
    while (!last_.complete() && !leave.expired()) backoff.pause();
    if (!last_.complete()) return;  // a kernel may still write to the page
    fault_pages().give_back(page_);
  }

  comm::SymmetricBuffer share(comm::Communicator& comm, const std::string& name, int64_t bytes) {
    return comm::SymmetricBuffer::create(comm, name, bytes, {DeviceType::kCuda, device_});
  }
  std::shared_ptr<Buffer> own(int64_t bytes) const {
    const Device device{DeviceType::kCuda, device_};
    auto memory = std::make_shared<Buffer>(bytes, device, "expert parallelism");
    const CudaDeviceGuard guard(device_);
    MOIETY_CUDA_CHECK(
        cudaMemsetAsync(memory->data(), 0, static_cast<size_t>(bytes), cudaStreamPerThread));
    MOIETY_CUDA_CHECK(cudaStreamSynchronize(cudaStreamPerThread));
    return memory;
  }
  void write(std::byte* to, const void* from, int64_t bytes) const {
    move(to, from, bytes, cudaMemcpyHostToDevice);
  }
  void read(void* to, const std::byte* from, int64_t bytes) const {
    move(to, from, bytes, cudaMemcpyDeviceToHost);
  }
  FaultPage* page() const { return page_; }
  int64_t blocks() const { return 4 * int64_t{multiprocessors_}; }
  int multiprocessors() const { return multiprocessors_; }
  void ready(comm::Communicator& comm) { comm.bootstrap().all_gather(""); }

  template <class Step>
  void launch(const char* name, const Step& step, const LaunchSize& size, const Stream& stream) {
    moiety::launch(name, run_step<Step>, {size.blocks, Step::kThreads, size.shared_bytes}, stream,
                   step);
  }

  static bool captured(const Stream& stream) {
    if (stream.device().type != DeviceType::kCuda) return false;  // nothing was issued yet
    cudaStreamCaptureStatus status{};
    MOIETY_CUDA_CHECK(
        cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.cuda_stream()), &status));
    return status != cudaStreamCaptureStatusNone;
  }
  // Behind an operation.
  void end(const Stream& stream, comm::Bootstrap& bootstrap) {
    if (captured(stream)) return;
    last_.record(stream);
    if (++issued_ % (kAhead / 2) != 0) return;
    Event& mark = marks_[issued_ / (kAhead / 2) % 2];
    wait(mark, bootstrap);
    mark.record(stream);
  }
  void wait(const Stream& stream, comm::Bootstrap& bootstrap) {
    if (stream.device().type != DeviceType::kCuda) return;  // nothing was issued yet
    waited_.record(stream);
    wait(waited_, bootstrap);
  }

 private:
  void move(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) const {
    const CudaDeviceGuard guard(device_);
    MOIETY_CUDA_CHECK(
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, cudaStreamPerThread));
    MOIETY_CUDA_CHECK(cudaStreamSynchronize(cudaStreamPerThread));
  }
  // Waits by looking; a peer's abort ends the waits of steps.
  void wait(const Event& event, comm::Bootstrap& bootstrap) const {
    Backoff backoff;
    while (!event.complete()) {
      backoff.pause();
      if (!backoff.time_to_look() || !bootstrap.aborted()) continue;
      __atomic_store_n(&page_->abort, 1, __ATOMIC_RELEASE);
    }
  }

  int device_;
  Seconds deadline_;
  FaultPage* page_;
  int multiprocessors_ = 0;
  Event last_, waited_, marks_[2];
  uint64_t issued_ = 0;
};

}  // namespace

std::unique_ptr<PeerExchange> make_peer_exchange(comm::Communicator& comm, const ExpertMap& map,
                                                 const EpOptions& options) {
  if (options.transport == EpTransport::kCollectives) comm.prepare(options.device);
  return std::make_unique<StepExchange<CudaMachine>>(
      CudaMachine(options.device.index, options.deadline), comm, map, options);
}

}  // namespace moiety::moe::peers
