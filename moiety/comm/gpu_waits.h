// What ranks do with each other on GPUs outside of their communicators, such as the exchange of
// experts: it follows the rules of the communicators' operations (Communicator::run_alone, wait).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moiety/base/stream.h"

namespace moiety::comm {

class Communicator;
struct RankLanes;

// Waits of kernels for peers.
class GpuWaits {
 public:
  virtual ~GpuWaits() = default;
  // Whether one has failed, or a peer has told of a failure.
  virtual bool failed() const = 0;
  // Ends those that stand, and all later ones.
  virtual void end_waits() = 0;
  // Throws the error of one that has failed.
  virtual void check() = 0;
  // A word on this rank's GPU that is not 0 once one has failed, for kernels behind it; null where
  // there is none.
  virtual const uint64_t* fault_word() const { return nullptr; }
  // The nanoseconds that kernels have waited so far, a word on this rank's GPU that they add to in
  // the order of their stream; null where there is none.
  virtual const uint64_t* waited_word() const { return nullptr; }
};

// While it lives, Communicator::wait on this communicator, and on all others of its rank, sees the
// failures of these waits and ends them with its own. Used by the rank's thread alone; the waits
// outlive it.
class GpuWatch {
 public:
  GpuWatch(Communicator& comm, GpuWaits& waits);
  ~GpuWatch();
  GpuWatch(const GpuWatch&) = delete;
  GpuWatch& operator=(const GpuWatch&) = delete;

 private:
  std::shared_ptr<RankLanes> lanes_;
  GpuWaits* waits_;
};

// Blocks of kernels on a GPU that may wait for peers at the same time, while it lives. Those of all
// ranks of this process that share the GPU must be on it together, or one that waits would keep away
// what it waits for.
class WaitingBlocks {
 public:
  // `of` says whose they are: `comm "dp"`.
  WaitingBlocks(Device gpu, std::string of, int blocks);
  ~WaitingBlocks();
  WaitingBlocks(const WaitingBlocks&) = delete;
  WaitingBlocks& operator=(const WaitingBlocks&) = delete;

  Device gpu() const { return gpu_; }
  const std::string& of() const { return of_; }
  int blocks() const { return blocks_; }

 private:
  Device gpu_;
  std::string of_;
  int blocks_;
};
// So many of a GPU's multiprocessors stay free of blocks that wait.
inline constexpr int kMultiprocessorsWithoutWaits = 8;
// Says, for the error of `mine`, that more blocks may wait on its GPU than leave so many of
// `multiprocessors` free; empty if they do not.
std::string too_many_waiting(const WaitingBlocks& mine, int multiprocessors);

// The words of the communicator's own waits, good as long as it; null before `prepare`.
const uint64_t* fault_word(const Communicator& comm);
const uint64_t* waited_word(const Communicator& comm);
// The fault words of all waits of the communicator's rank, those that are watched among them.
std::vector<const uint64_t*> fault_words(Communicator& comm);

// A rank's kernels may wait for peers on so many streams, and those of all ranks that share a GPU on
// so many: a GPU has 32 queues (Note [Environment of ranks on GPUs], gpu_environment.h), and in one
// queue a waiting kernel holds up the one that it waits for.
inline constexpr int kMaxWaitingStreams = 8, kMaxWaitingStreamsOfGpu = 31;
// On how many streams operations of the communicator's rank have waited so far.
int waiting_streams(const Communicator& comm);

// Calls `operation`, which enqueues work that waits for peers; alone while the rank's operations run
// so: then all ranks that run alone make as many such calls.
void enqueue(Communicator& comm, const Stream& stream, const std::function<void()>& operation);

// An operation of the communicator without operands, on a GPU's stream: what its ranks have enqueued
// before it is done, and visible to all of them, when what they enqueue behind it begins.
void meet(Communicator& comm, const Stream& stream);

}  // namespace moiety::comm
