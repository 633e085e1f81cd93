#include "moiety/train/plan.h"

#include "moiety/base/error.h"
#include "moiety/base/gpu_runtime.h"
#include "moiety/hf/load.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/config_check.h"

namespace moiety::train {

TrainingPlan TrainingPlan::of_rank(int rank_on_host) const {
  TrainingPlan out = *this;
  if (device.type == DeviceType::kCpu) return out;
  out.device.index += rank_on_host % gpus;
  gpu::make_current(out.device.index);
  out.memory_of_rank = train::memory_of_rank(share, out.device);
  return out;
}

TrainingPlan make_plan(const TrainConfig& config, Device device, RankShare share) {
  TrainingPlan plan;
  plan.config = config;
  plan.grid = check_layout(config);
  check_training(config, plan.grid);
  check_cuts(config, plan.grid);
  check_gpu_layout(plan.grid, device);
  check_graph(config, device);
  check_overlap(config, device);
  check_path(config, device);
  plan.steps = total_steps(config);
  plan.device = device;
  plan.share = share;
  // The rank on a GPU asks it: who asks has a context there, which takes memory.
  if (device.type == DeviceType::kCpu) plan.memory_of_rank = memory_of_rank(share, device);
  if (const std::string& from = config.run.init_from; !from.empty()) {
    try {
      if (hf::is_folder(from)) {
        hf::check_model(hf::Folder::open(from), config.model, config.data.seq_len);
        plan.init_from = from;
      } else {
        plan.init_from = find_checkpoint(from);
      }
    } catch (const CheckpointError& e) {
      throw CheckpointError("run.init_from: {}", e.what());
    }
  }
  return plan;
}

}  // namespace moiety::train
