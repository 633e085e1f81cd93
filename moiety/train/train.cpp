#include "moiety/train/train.h"

#include <filesystem>

#include "moiety/base/error.h"
#include "moiety/train/trainer.h"

namespace moiety::train {

RunEnd train(const TrainingPlan& plan, comm::Communicator& world) {
  if (world.rank() == 0) {
    std::error_code error;
    std::filesystem::create_directories(plan.config.run.dir, error);
    if (error) {
      throw IoError("{}: cannot create the directory: {}", plan.config.run.dir, error.message());
    }
  }
  const TrainingPlan mine = plan.of_rank(world.rank());
  world.barrier();  // the directory is there, and all know what is free
  Heartbeat heartbeat(plan.watchdog, world.rank());
  check_memory(mine.config, mine.grid, mine.memory_of_rank, mine.device);
  return Trainer(mine, world, heartbeat).run();
}

}  // namespace moiety::train
