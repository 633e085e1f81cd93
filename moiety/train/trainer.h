// Training on one rank: from the first step (or a checkpoint's) to the last.
#pragma once

#include <memory>

#include "moiety/comm/communicator.h"
#include "moiety/train/plan.h"
#include "moiety/train/watchdog.h"

namespace moiety::train {

enum class RunEnd {
  kDone,     // all steps are made, or the data has ended
  kStopped,  // a request or run.max_hours: the run goes on from its checkpoint
};

class TrainerRun;

class Trainer {
 public:
  // Collective over `world`: allocates, and loads or draws the weights. All three outlive it.
  // Throws Error: of kNumerical where the guard ends the run, of kCheckpoint, kIo, kComm,
  // kOutOfMemory, kData.
  Trainer(const TrainingPlan& plan, comm::Communicator& world, Heartbeat& heartbeat);
  ~Trainer();

  RunEnd run();

 private:
  std::unique_ptr<TrainerRun> run_;
};

// Trains on this rank: the directory of the run, a heartbeat of the plan's watchdog, a check of the
// memory, and a Trainer. Collective; throws what that throws.
RunEnd train(const TrainingPlan& plan, comm::Communicator& world);

}  // namespace moiety::train
