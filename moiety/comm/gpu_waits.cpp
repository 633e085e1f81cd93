#include "moiety/comm/gpu_waits.h"

#include <algorithm>
#include <mutex>

#include "moiety/base/error.h"
#include "moiety/base/gpu_runtime.h"
#include "moiety/comm/lane.h"

namespace moiety::comm {
namespace {

// What the communicator's rank shares among its communicators; null if it is of another kind.
std::shared_ptr<RankLanes> lanes_of(const Communicator& comm) {
  const auto* lane = dynamic_cast<const LaneCommunicator*>(&comm);
  return lane ? lane->lanes() : nullptr;
}

// All blocks of this process that may wait.
struct AllWaiting {
  std::mutex mutex;
  std::vector<const WaitingBlocks*> all;
};
AllWaiting& all_waiting() {
  static auto& waiting = *new AllWaiting;
  return waiting;
}

}  // namespace

WaitingBlocks::WaitingBlocks(Device gpu, std::string of, int blocks)
    : gpu_(gpu), of_(std::move(of)), blocks_(blocks) {
  AllWaiting& waiting = all_waiting();
  const std::lock_guard lock(waiting.mutex);
  waiting.all.push_back(this);
}

WaitingBlocks::~WaitingBlocks() {
  AllWaiting& waiting = all_waiting();
  const std::lock_guard lock(waiting.mutex);
  std::erase(waiting.all, this);
}

std::string too_many_waiting(const WaitingBlocks& mine, int multiprocessors) {
  std::vector<std::pair<std::string, int>> of{{mine.of(), 0}};
  int sum = 0;
  {
    AllWaiting& waiting = all_waiting();
    const std::lock_guard lock(waiting.mutex);
    for (const WaitingBlocks* w : waiting.all) {
      if (w->gpu() != mine.gpu()) continue;
      auto place = std::ranges::find(of, w->of(), &std::pair<std::string, int>::first);
      if (place == of.end()) place = of.insert(of.end(), {w->of(), 0});
      place->second += w->blocks();
      sum += w->blocks();
    }
  }
  if (sum <= multiprocessors - kMultiprocessorsWithoutWaits) return {};
  std::string out = text("{} blocks of this group", of[0].second);
  for (size_t i = 1; i < of.size(); ++i) {
    out += text("{}{} of {}", i + 1 < of.size() ? ", " : " and ", of[i].second, of[i].first);
  }
  return text("{} may wait at once, but this GPU has {} SMs less {}", out, multiprocessors,
              kMultiprocessorsWithoutWaits);
}

const uint64_t* fault_word(const Communicator& comm) {
  const auto* lane = dynamic_cast<const LaneCommunicator*>(&comm);
  return lane && lane->link() ? lane->link()->fault_word() : nullptr;
}

const uint64_t* waited_word(const Communicator& comm) {
  const auto* lane = dynamic_cast<const LaneCommunicator*>(&comm);
  return lane && lane->link() ? lane->link()->waited_word() : nullptr;
}

std::vector<const uint64_t*> fault_words(Communicator& comm) {
  std::vector<const uint64_t*> words;
  const std::shared_ptr<RankLanes> lanes = lanes_of(comm);
  if (!lanes) return words;
  for (const GpuWaits* waits : lanes->waits) {
    if (const uint64_t* const word = waits->fault_word()) words.push_back(word);
  }
  return words;
}

GpuWatch::GpuWatch(Communicator& comm, GpuWaits& waits) : lanes_(lanes_of(comm)), waits_(&waits) {
  if (lanes_) lanes_->waits.push_back(waits_);
}

GpuWatch::~GpuWatch() {
  if (lanes_) std::erase(lanes_->waits, waits_);
}

int waiting_streams(const Communicator& comm) {
  const std::shared_ptr<RankLanes> lanes = lanes_of(comm);
  if (!lanes) return 0;
  return static_cast<int>(lanes->gpu.waiting.size()) + lanes->gpu.lane.has_value();
}

void meet(Communicator& comm, const Stream& stream) {
  auto* lane = dynamic_cast<LaneCommunicator*>(&comm);
  MOIETY_CHECK(lane, "communicator \"{}\": its ranks do not meet on GPUs", comm.name());
  lane->meet(stream);
}

void enqueue(Communicator& comm, const Stream& stream, const std::function<void()>& operation) {
  const std::shared_ptr<RankLanes> lanes = lanes_of(comm);
  Communicator* const alone = lanes ? lanes->alone : nullptr;
  if (lanes && stream.device().type == DeviceType::kCuda) {
    std::vector<void*>& waiting = lanes->gpu.waiting;
    void* const handle = stream.cuda_stream();
    if (std::find(waiting.begin(), waiting.end(), handle) == waiting.end()) {
      waiting.push_back(handle);
    }
  }
  if (!alone) return operation();
  // Behind a peer's wait nothing may have to begin that the GPU has not begun: neither what streams
  // have yet to do, nor the first work of this one in a while.
  const bool on_gpu = stream.device().type == DeviceType::kCuda;
  Event mark;
  if (on_gpu) gpu::touch_stream(stream.device().index, stream.cuda_stream());
  mark.record(stream);
  comm.wait(mark);
  alone->barrier();
  if (on_gpu) {
    gpu::synchronize_device(stream.device().index);
    alone->barrier();
  }
  operation();
  mark.record(stream);
  comm.wait(mark);
}

}  // namespace moiety::comm
