// A training before its ranks start: the checked configuration, and the objects that all ranks of a
// process share.
//
//    TrainConfig config;                        // sizes, batches, config.run.dir
//    TrainingPlan plan = make_plan(config);
//    plan.train = data::open_token_files(...);
//    plan.resume_from = resume_candidates(config);
//    comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) { train(plan, world); });
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moiety/base/device.h"
#include "moiety/data/sample_source.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/config.h"
#include "moiety/train/layout.h"
#include "moiety/train/memory_limit.h"
#include "moiety/train/observer.h"

namespace moiety::train {

class Watchdog;

// Requests of the caller to a running training, from any thread or a signal handler: a checkpoint,
// or a checkpoint and the end. A step under way is completed first; `save` is cleared when it is
// noticed. One rank that asks is enough.
struct TrainRequests {
  std::atomic<bool> save{false};
  std::atomic<bool> stop{false};
};

struct TrainingPlan {
  TrainConfig config;
  Grid grid;
  int64_t steps = 0;           // steps of the whole run
  Device device;               // device of the ranks; with several GPUs, of the first
  int gpus = 1;                // GPUs that the ranks of this host take in turn
  RankShare share;             // of a rank in the machine
  int64_t memory_of_rank = 0;  // bytes that one may take; on GPUs of_rank knows

  std::shared_ptr<const data::SampleSource> train;
  std::shared_ptr<const data::SampleSource> valid;  // null if there is none
  std::vector<std::string> resume_from;             // best first; rank 0's list is used
  // A checkpoint, or a Hugging Face folder, from which only the weights are taken; or empty.
  std::string init_from;

  // A JSON object that checkpoints keep byte for byte; and a function for runs that continue, which
  // gets that of the checkpoint: it returns sentences about the differences, or throws
  // CheckpointError. Used on rank 0; null for nothing.
  std::string config_text = "{}";
  std::function<std::vector<std::string>(const std::string& text, const std::string& checkpoint)>
      compare;

  // The files of the tokenizer, which checkpoints keep, and its SHA-256 in hex.
  std::vector<data::TokenizerFile> tokenizer;
  std::string tokenizer_identity;

  Observer* observer = nullptr;       // rank 0's; null if nobody listens
  TrainRequests* requests = nullptr;  // null if nobody asks
  Watchdog* watchdog = nullptr;       // the watchdog of train(); null for none
  bool dry_run = false;               // set everything up and stop before the first step

  // The plan as one rank follows it, which is this one of its host: on its own GPU, which becomes that
  // of the calling thread, with what is free there.
  TrainingPlan of_rank(int rank_on_host) const;
};

// Checks the configuration, and the folder of run.init_from against it, and fills in grid, steps,
// device, a CPU's memory and init_from. Before CUDA starts the process of several ranks on GPUs has called
// comm::prepare_gpu_environment if there are several. Throws UsageError, CheckpointError.
TrainingPlan make_plan(const TrainConfig& config, Device device = {}, RankShare share = {});

}  // namespace moiety::train
