// The memory of a pass on one rank: the tensors that forward leaves, and those that blocks take
// while they run.
#pragma once

#include "moiety/base/device.h"
#include "moiety/model/precision.h"
#include "moiety/train/config.h"
#include "moiety/train/layout.h"

namespace moiety::train {

inline constexpr int64_t kFloatBytes = 4;

// The sizes of a pass on one rank, in elements unless bytes are named. Tokens are those of the data
// rank, and own ones, which residual stream, router and experts have; columns are those that tp
// leaves to a rank.
struct PassSizes {
  PassSizes(const TrainConfig& config, const Grid& grid, Device device);
  bool on_gpu() const { return device.type == DeviceType::kCuda; }

  Device device;
  int64_t tokens, own, tp, item, d, heads, qkv, o, dense, shared, vocab;
  int64_t dense_hidden, shared_hidden, hidden;  // columns before the activation
  int64_t capacity = 0;
  // Bytes of a tensor of all tokens that is gathered or summed over tp, and of the copy in which
  // several sequences change their order.
  int64_t gathered = 0, staged = 0;
  int64_t table_sum = 0;    // sum of a gradient of embedding or head beside a bf16 one
  int64_t codes = 0;        // bytes of rows that came quantized
  bool maps = false;        // experts read rows through a map (moe::RowLayout::kRank)
  bool in_place = false;    // those of h itself
  int64_t sources = 0;      // the rows that products of experts read
  int64_t lent = 0;         // bytes of rows that peers reach, beside the pass's own memory
  bool lends_rows = false;  // whether the rows that come are there
};

// Bytes that forward leaves for backward.
int64_t activation_bytes(const TrainConfig& config, const Grid& grid, const PassSizes& sizes,
                         const model::Precision& precision);
// The most bytes that blocks take beside that while they run, with tensors that they compute again.
int64_t temporary_bytes(const TrainConfig& config, const Grid& grid, const PassSizes& sizes,
                        const model::Precision& precision);
// Bytes that the loss takes: the logits of a chunk, and over tp its tokens' inputs, row statistics
// and gradients.
int64_t logits_bytes(const model::Config& model, const PassSizes& sizes);

}  // namespace moiety::train
