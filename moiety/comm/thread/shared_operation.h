// One collective operation of a group while its ranks carry it out: the call of each rank and the
// stage it has reached. The ranks divide the work and read each other's tensors directly.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "moiety/comm/collective.h"
#include "moiety/comm/lane.h"

namespace moiety::comm::thread {

// The stages of an operation, which a rank passes in order. It goes on when all ranks have reached
// its stage, and is done when all have reached the last one.
enum class Stage : int { kNone, kPosted, kWorked, kShared };

class SharedOperation {
 public:
  // `label` opens the texts of errors: `communicator "world", operation 3`.
  SharedOperation(int ranks, std::string label)
      : label_(std::move(label)), calls_(ranks), stages_(ranks) {}

  // Makes rank `rank` take part; from now on peers may read its tensors.
  void post(int rank, CollectiveCall call);
  // Takes the rank as far as it can go without waiting. Throws Error(Comm) if the calls do not fit
  // each other or a peer gave up.
  Progress advance(int rank);
  // Gives up for this reason. Returns when no peer touches the rank's tensors any more, and none
  // will.
  void give_up(const std::string& reason);

  // The first peer that `rank` waits for; -1 if none.
  int waits_for(int rank) const;

 private:
  struct alignas(64) RankStage {
    std::atomic<Stage> value{Stage::kNone};
  };
  Stage stage(int rank) const { return stages_[rank].value.load(std::memory_order_acquire); }
  void work(int rank);   // stage kWorked: reductions into the rank's own part, all copies
  void share(int rank);  // stage kShared: the other ranks' parts of an all_reduce
  void begin_touching();
  void end_touching();
  [[noreturn]] void throw_failure();

  const std::string label_;
  std::vector<CollectiveCall> calls_;  // by rank; constant once posted
  std::vector<RankStage> stages_;

  std::mutex mutex_;
  std::condition_variable idle_;
  int busy_ = 0;  // ranks that touch peers' tensors now
  std::atomic<bool> failed_{false};
  std::string failure_;
};

}  // namespace moiety::comm::thread
