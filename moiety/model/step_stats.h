// The model's report on the micro-batches of a step: sums, which a trainer adds over its ranks and
// divides once.
#pragma once

#include <cstdint>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/stream.h"

namespace moiety::model {

struct MoeLayerStats {
  std::vector<int64_t> expert_pairs;  // [E]: (token, expert) pairs of own tokens, before any drop
  // rows that the fullest rank of the group needed, in the largest micro-batch
  int64_t required = 0;
  int64_t capacity = 0;  // rows of this rank, in the last micro-batch
  int64_t dropped = 0;   // pairs dropped in the group, summed
  bool overflow = false;
};

struct StepStats {
  double loss_sum = 0;  // cross-entropy, over valid targets
  // Routing losses without coefficients, each micro-batch's weighted with its valid targets:
  // divided by the targets of all ranks they are the values in the objective.
  double aux_sum = 0;
  double z_sum = 0;
  int64_t targets = 0;  // number of valid targets
  int64_t tokens = 0;
  std::vector<MoeLayerStats> moe;  // by MoE layer, ascending

  // Adds the sums of later micro-batches.
  void add(const StepStats& later);

  int64_t required() const {
    int64_t rows = 0;
    for (const MoeLayerStats& layer : moe) rows = layer.required > rows ? layer.required : rows;
    return rows;
  }
  bool overflow() const {
    for (const MoeLayerStats& layer : moe) {
      if (layer.overflow) return true;
    }
    return false;
  }
};

// The words of a layer in StepSums, in the order of MoeLayerStats.
enum LayerWord : int {
  kLayerRequired = 0,
  kLayerCapacity = 1,
  kLayerDropped = 2,
  kLayerOverflow = 3,  // 1 or 0
  kLayerWords = 4,
};

// StepStats in the making: memory of the model's device, zero at first, that passes add to in
// stream order. It is one piece, so that one copy brings it to the host.
class StepSums {
 public:
  StepSums() = default;
  StepSums(int64_t moe_layers, int64_t experts, Device device = {});

  TensorView loss_3() const;                     // float64: loss_sum, aux_sum, z_sum
  TensorView count_2() const;                    // int64: targets, tokens
  TensorView layer_L4() const;                   // int64 [L, kLayerWords]
  TensorView pairs_LE() const;                   // int64 [L, E]
  TensorView memory() const { return memory_; }  // uint8, all of the parts

  void clear(Stream stream) const;
  // The statistics in a copy of the memory, `on_host`.
  StepStats read(TensorView on_host) const;
  // The statistics when the stream has come here. It waits for that, so it is not for use within a
  // step.
  StepStats read(Stream stream = {}) const;

 private:
  TensorView part(DType dtype, int64_t first_word, std::initializer_list<int64_t> sizes) const;

  int64_t layers_ = 0, experts_ = 0;
  Tensor memory_;
};

}  // namespace moiety::model
