// A training of two MoE layers, whose steps take milliseconds.
#pragma once

#include <string>

#include "moiety/train/config.h"

namespace moiety::train {

// Steps of 8 samples, which the ranks share as data.
inline TrainConfig tiny_config(const std::string& directory, int64_t ranks = 1) {
  TrainConfig c;
  c.run.dir = directory;
  c.run.ranks = ranks;
  c.model.vocab = 264;
  c.model.d_model = 32;
  c.model.layers = 2;
  c.model.heads = 4;
  c.model.d_ffn = 32;
  c.model.router.experts = 4;
  c.data.seq_len = 16;
  c.train.micro_batch = 8 / ranks;
  c.train.global_batch = 8;
  c.optim.lr = 0.01;
  c.optim.warmup_steps = 3;
  c.log.peak_tflops = 1;
  return c;
}

}  // namespace moiety::train
