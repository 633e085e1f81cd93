#include "moiety/train/inference_model.h"

#include "moiety/base/log.h"
#include "moiety/comm/thread_group.h"
#include "moiety/train/precision.h"

namespace moiety::train {

InferenceModel::InferenceModel(const std::string& path, const TrainConfig& config, int64_t tokens,
                               comm::Communicator& world, const Stream& stream)
    : model_(config.model, storage_dtype(config), Grid(), tokens, config.guard.comm_timeout_s,
             world, stream.device()),
      weights_(transformer().parameter_specs(), storage_dtype(config), stream.device()) {
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
