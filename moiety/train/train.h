// Training, as a program that embeds it calls it (docs/embedding.md, examples/train.cpp).
#pragma once

#include "moiety/comm/communicator.h"
#include "moiety/train/plan.h"

namespace moiety::train {

enum class RunEnd {
  kDone,     // all steps are made, or the data has ended
  kStopped,  // a request or run.max_hours: the run goes on from its checkpoint
};

// Trains on this rank, in the directory of the run, which is made where it is missing: from the
// first step, or from a checkpoint of plan.resume_from, to the last. Collective over `world`, whose
// size is that of the plan's grid; plan and world outlive it. Throws Error: kNumerical where the
// guard ends the run, kCheckpoint, kData, kIo, kComm, kOutOfMemory.
RunEnd train(const TrainingPlan& plan, comm::Communicator& world);

}  // namespace moiety::train
