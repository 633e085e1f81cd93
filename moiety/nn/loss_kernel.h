// How thread blocks of a GPU share a row of logits: a pure choice, so that tests hold it without a
// GPU. Internal to moiety/nn.
#pragma once

#include <cstdint>

namespace moiety::nn {

// A row is cut in turns of 256 logits, of which each of 2^log blocks of a cluster has an equal part
// in shared memory: that of as many lanes of lane_sum.
struct LossShape {
  static constexpr int64_t kTurn = 256, kTurnsAtATime = 4;
  static constexpr int kMostLog = 3;  // clusters of eight, the most that every GPU runs

  bool kept =
      false;  // else the row is longer than the memory of a cluster: one block reads it again
  int log = 0;
  int64_t turns = 0;  // of a row, in whole fours

  constexpr int64_t part() const { return turns * kTurn >> log; }  // logits of a block
  constexpr int64_t bytes() const { return kStateBytes + 4 * part(); }

  static constexpr int64_t kStateBytes = 256;  // of shared memory, before the logits
};

// The smallest cluster of which a multiprocessor holds three blocks at a time, so that one reads
// while others compute; else the largest. `shared_block`: the most shared memory of a block.
LossShape choose_loss(int64_t vocabulary, int64_t shared_block);

}  // namespace moiety::nn
