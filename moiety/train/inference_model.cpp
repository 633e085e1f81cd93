#include "moiety/train/inference_model.h"

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/reshard.h"
#include "moiety/comm/thread_group.h"
#include "moiety/train/precision.h"

namespace moiety::train {
namespace {

// The specs, once their shapes are those of the checkpoint. A load compares all of it; but by then
// the memory is taken and filled that a false configuration asks for.
std::vector<optim::ParamSpec> fitting(std::vector<optim::ParamSpec> specs,
                                      const std::string& path) {
  const checkpoint::Manifest manifest = checkpoint::read_manifest(path);
  const checkpoint::PackedState state(manifest);
  for (const optim::ParamSpec& spec : specs) {
    for (const optim::LogicalTensor& tensor : spec.tensors) {
      const checkpoint::PackedSlot* found = state.find(tensor.name, "weight");
      if (!found || found->shape == tensor.shape) continue;
      throw CheckpointError("{}: {} is {}, by its configuration {}", path, tensor.name,
                            checkpoint::shape_text(found->shape),
                            checkpoint::shape_text(tensor.shape));
    }
  }
  return specs;
}

// The configuration without what concerns the machine of its training.
TrainConfig anywhere(TrainConfig config) {
  config.model.path.reset();
  return config;
}

}  // namespace

InferenceModel::InferenceModel(const std::string& path, const TrainConfig& config, int64_t tokens,
                               comm::Communicator& world, const Stream& stream)
    : model_(anywhere(config), Grid(), tokens, world, stream.device()),
      weights_(fitting(transformer().parameter_specs(), path), storage_dtype(config),
               stream.device()) {
  transformer().bind(weights_.parameters());
  load_weights(path, weights_.state_view(), model_);
  weights_.publish(stream);
}

void run_alone(int64_t threads, const std::function<void(comm::Communicator& world)>& body) {
  comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) {
    set_log_rank(-1);
    const ThreadBudget budget(threads > 0 ? int(threads) : thread_budget());
    body(world);
  });
}

}  // namespace moiety::train
