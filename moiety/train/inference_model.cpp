#include "moiety/train/inference_model.h"

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/checkpoint/box.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/comm/thread_group.h"
#include "moiety/train/precision.h"

namespace moiety::train {

namespace {

// The specs, once the checkpoint is known to have their tensors: before memory is taken for them, as
// its configuration may speak of far more.
std::vector<optim::ParamSpec> specs_in(const std::string& path,
                                       std::vector<optim::ParamSpec> specs) {
  const checkpoint::Manifest manifest = checkpoint::read_manifest(path);
  for (const optim::ParamSpec& spec : specs) {
    for (const optim::LogicalTensor& tensor : spec.tensors) {
      const auto at = manifest.tensors.find(tensor.name);
      if (at == manifest.tensors.end() || at->second.shape != tensor.shape) {
        throw CheckpointError("{}: by its config {} is {}, but {}", path, tensor.name,
                              checkpoint::shape_text(tensor.shape),
                              at == manifest.tensors.end()
                                  ? "it is not there"
                                  : "it is stored as " + checkpoint::shape_text(at->second.shape));
      }
    }
  }
  return specs;
}

}  // namespace

InferenceModel::InferenceModel(const std::string& path, const TrainConfig& config, int64_t tokens,
                               comm::Communicator& world, const Stream& stream)
    : model_(config.model, storage_dtype(config), Grid(), tokens, config.guard.comm_timeout_s,
             world, stream.device()),
      weights_(specs_in(path, transformer().parameter_specs()), storage_dtype(config),
               stream.device()) {
  transformer().bind(weights_.parameters());
  load_weights(path, weights_.state_view(), model_);
  weights_.publish(stream);
}

void run_alone(const std::function<void(comm::Communicator& world)>& body) {
  comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) {
    set_log_rank(-1);
    body(world);
  });
}

}  // namespace moiety::train
