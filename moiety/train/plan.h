// A training before its ranks start: the configuration, checked, and what all ranks of a process
// share.
//
//   TrainConfig config;                        // sizes, batches, config.run.dir
//   TrainingPlan plan = make_plan(config);
//   plan.train = data::open_token_files(...);
//   plan.resume_from = resume_candidates(config);
//   comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) { train(plan, world); });
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moiety/base/device.h"
#include "moiety/data/sample_source.h"
#include "moiety/train/config.h"
#include "moiety/train/layout.h"
#include "moiety/train/memory_limit.h"
#include "moiety/train/observer.h"

namespace moiety::train {

class Watchdog;

// What the caller asks of a running training, from any thread or a signal handler: a checkpoint,
// or a checkpoint and the end. A step under way is completed first; `save` is cleared when it is
// heard. One rank that asks suffices.
struct TrainRequests {
  std::atomic<bool> save{false};
  std::atomic<bool> stop{false};
};

struct TrainingPlan {
  TrainConfig config;
  Grid grid;
  int64_t steps = 0;           // of the whole run
  Device device;               // of the ranks
  int64_t memory_of_rank = 0;  // bytes that one may take

  std::shared_ptr<const data::SampleSource> train;
  std::shared_ptr<const data::SampleSource> valid;  // null: none
  std::vector<std::string> resume_from;             // best first; rank 0's counts
  std::string init_from;  // a checkpoint whose weights alone are taken, or empty

  // Kept in checkpoints to the byte, a JSON object; and what a run that continues makes of that of
  // a checkpoint: sentences about what differs, or a CheckpointError. On rank 0; null: nothing.
  std::string config_text = "{}";
  std::function<std::vector<std::string>(const std::string& text, const std::string& checkpoint)>
      compare;

  Observer* observer = nullptr;       // of rank 0; null: nobody listens
  TrainRequests* requests = nullptr;  // null: nobody asks
  Watchdog* watchdog = nullptr;       // of train(); null: none
  bool dry_run = false;               // sets everything up and stops before the first step
};

// Checks the configuration and fills in grid, steps, device, memory and the checkpoint of
// run.init_from. Throws UsageError, CheckpointError.
TrainingPlan make_plan(const TrainConfig& config, Device device = {}, RankShare share = {});

}  // namespace moiety::train
