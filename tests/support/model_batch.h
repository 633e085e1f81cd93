// A batch of the loader in the memory of the host, as a model there takes it.
#pragma once

#include "moiety/data/batch_loader.h"
#include "moiety/model/transformer.h"

namespace moiety {

inline model::Batch model_batch(const data::Batch& batch) {
  model::Batch out;
  out.token_BS = batch.token_BS;
  out.target_BS = batch.target_BS;
  out.position_BS = batch.position_BS;
  out.routed_BS = batch.routed_BS;
  return out;
}

}  // namespace moiety
