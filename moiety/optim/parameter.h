// What optimizer, checkpoint and initialization know about a parameter: its matrix in memory, the
// logical (checkpoint) tensors whose rows that matrix holds, and how its gradient is summed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moiety/base/tensor_view.h"
#include "moiety/formats/quantized.h"
#include "moiety/gtp/layout.h"
#include "moiety/gtp/trace.h"

namespace moiety::optim {

// A tensor as a checkpoint names it: uncut, unpadded, in plain row order. Rank 1 to 3; `shape` of
// experts is [E, N, K]. Its rows are those of the matrix [product of all but the last, last];
// a vector [D] is one row of D elements.
struct LogicalTensor {
  std::string name;
  std::vector<int64_t> shape;
  int64_t row_elements() const { return shape.back(); }
};

// `rows` consecutive rows of the parameter's matrix hold as many consecutive rows of tensor
// `tensor`. (A fused q-k-v weight has one run per head group and part; local experts have one run.)
struct RowRun {
  int64_t memory_row = 0;
  int tensor = 0;
  int64_t logical_row = 0;
  int64_t rows = 0;
};

enum class InitKind { kNormal, kOnes, kZeros };
enum class ParameterClass { kDense, kExpert, kRouter, kEmbedding };  // norms are reported per class

struct ParamSpec {
  std::string name;  // of the parameter in memory; the logical name unless several are fused
  std::vector<LogicalTensor> tensors;
  // Ascending memory rows; rows of no run are padding: zero in weight, state and gradient, always.
  std::vector<RowRun> row_map;
  int64_t rows = 0;  // of the matrix in memory, on this rank
  int64_t row_elements = 0;
  // Of the tensors, the column that the matrix's rows begin at; not 0 where TP cuts columns.
  int64_t first_column = 0;
  std::vector<int64_t>
      shape;  // of the weight view that the model reads, rows * row_elements in all
  InitKind init = InitKind::kNormal;
  float init_std = 0;
  bool decay = true;    // weight decay applies
  bool expert = false;  // of the expert grid
  // The axes along which ranks hold this same part of the parameter and compute different terms of
  // its gradient: the optimizer sums over them and divides its state among them.
  gtp::Axes domain = {gtp::Axis::kTp, gtp::Axis::kGtp, gtp::Axis::kDp};
  ParameterClass kind = ParameterClass::kDense;
  // Of a big weight how tp cuts it and (e)gtp may cut the rows of what is left; of several members
  // each. None: a part is the whole, always.
  std::optional<gtp::Layout> layout = {};
  // The weight is kept in this format, one tensor for each expert, in place of the storage dtype.
  std::optional<QuantSpec> format = {};
  // Parameters that have equal formats at every time of a run; they share buckets.
  int format_class = 0;

  int64_t numel() const { return rows * row_elements; }
};

// A parameter bound to memory: `weight` in the storage dtype or, of one that is kept in a format,
// `quantized`, one for each expert (elsewhere 1); `grad` (main_grad, fp32).
// Undefined `grad`: the parameter is not trained here (evaluation).
struct Parameter {
  ParamSpec spec;
  TensorView weight;
  std::vector<QuantizedView> quantized = {};
  TensorView grad;
  // Of a weight that (e)gtp cuts, at the executor that gathers it: `weight` or `quantized` and
  // `grad` are those of the own shard.
  gtp::BundleId bundle = gtp::kNoBundle;
  // The next contribution overwrites `grad`; set at the start of a step, cleared by the first
  // contribution. (So there is no pass that zeroes gradients.)
  bool overwrite = true;
};

}  // namespace moiety::optim
