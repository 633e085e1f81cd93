#include "moiety/train/inference_model.h"

#include "apps/moiety/config/model_options.h"
#include "moiety/base/log.h"
#include "moiety/comm/thread_group.h"
#include "moiety/data/tokenizer.h"

namespace moiety::app {

InferenceModel::InferenceModel(const CheckpointInfo& checkpoint, int64_t tokens,
                               comm::Communicator& world, const Stream& stream)
    : model_(model_config(checkpoint.options,
                          data::Tokenizer::load(checkpoint.options.data.tokenizer).vocab()),
             storage_dtype(checkpoint.options), Grid(), tokens,
             checkpoint.options.guard.comm_timeout_s, world, stream.device()),
      weights_(transformer().parameter_specs(), storage_dtype(checkpoint.options),
               stream.device()) {
  transformer().bind(weights_.parameters());
  load_weights(checkpoint.path, weights_.state_view(), model_);
  weights_.publish(stream);
}

void run_alone(const std::function<void(comm::Communicator& world)>& body) {
  comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) {
    set_log_rank(-1);
    body(world);
  });
}

}  // namespace moiety::app
