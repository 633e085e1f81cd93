// The checkpoints that a training writes: beside it at an interval or a request, and one for good
// at its end. A save that fails is tried again at the next interval.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "moiety/checkpoint/saver.h"
#include "moiety/train/journal.h"
#include "moiety/train/plan.h"
#include "moiety/train/step/learner.h"
#include "moiety/train/watchdog.h"

namespace moiety::train {

class CheckpointKeeper {
 public:
  // `run_state` gives the state of a checkpoint beside tensors, after the steps completed so far.
  CheckpointKeeper(const TrainingPlan& plan, Learner& learner, comm::Communicator& world,
                   Heartbeat& heartbeat, const Journal& journal,
                   std::function<checkpoint::RunState()> run_state);

  // Takes the memory for a copy of the state, if checkpoints are written beside training.
  void reserve();
  // Begins a checkpoint after step `step`, unless there is one. Collective.
  void save(int64_t step);
  // From the next save on, leaves older checkpoints where they are.
  void keep_all(bool all) { saver_.keep_all(all); }
  // Writes the last checkpoint of the run and waits for it; its failure ends the run. Collective.
  void save_for_good(int64_t step);
  // Makes rank 0 report how a save ended. Called at every step border.
  void hear_of_saves();

  // Seconds that the last save took.
  double seconds() const { return seconds_; }

 private:
  void write(int64_t step, bool in_background);
  // Whether the newest save succeeded; the same on all ranks.
  bool saved_well();
  void tell(const checkpoint::SaveResult& result);
  void tell_of_failure(int64_t step, std::string_view error);

  const TrainingPlan& plan_;
  Learner& learner_;
  Heartbeat& heartbeat_;
  const Journal& journal_;
  std::function<checkpoint::RunState()> run_state_;
  checkpoint::Saver saver_;
  int64_t started_ = -1;  // step of the newest save
  int64_t told_ = -1;
  double seconds_ = 0;
};

}  // namespace moiety::train
