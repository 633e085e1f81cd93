// The facts about a parameter that optimizer, checkpoint and initialization need: its matrix in
// memory, the logical (checkpoint) tensors whose rows that matrix holds, and how its gradient is
// summed.
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

// A tensor as a checkpoint names it: uncut, unpadded, in plain row order. It has 1 to 3 dimensions;
// the `shape` of experts is [E, N, K]. Its rows are those of the matrix [product of all but the
// last, last]; a vector [D] is one row of D elements.
struct LogicalTensor {
  std::string name;
  std::vector<int64_t> shape;
  int64_t columns = 0;  // elements of a row, where rows are shorter than the last dimension
  int64_t row_elements() const { return columns > 0 ? columns : shape.back(); }
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
  std::string name;  // name in memory; the logical name unless several tensors are fused
  std::vector<LogicalTensor> tensors;
  // Runs in ascending order of memory rows. Rows in no run are padding: always zero in weight,
  // state and gradient.
  std::vector<RowRun> row_map;
  int64_t rows = 0;  // rows of the matrix in memory, on this rank
  int64_t row_elements = 0;
  // The column of the tensors at which the matrix's rows begin; not 0 where TP cuts columns.
  int64_t first_column = 0;
  std::vector<int64_t>
      shape;  // shape of the weight view that the model reads, rows * row_elements elements
  InitKind init = InitKind::kNormal;
  float init_std = 0;
  bool decay = true;    // whether weight decay applies
  bool expert = false;  // whether it belongs to the expert grid
  // The axes along which ranks hold this same part of the parameter and compute different terms of
  // its gradient: the optimizer sums over them and divides its state among them.
  gtp::Axes domain = {gtp::Axis::kTp, gtp::Axis::kGtp, gtp::Axis::kDp};
  ParameterClass kind = ParameterClass::kDense;
  // The layout of a big weight: how tp cuts it, and how (e)gtp may cut the rows of what is left;
  // each member has it. Without a layout a part is always the whole.
  std::optional<gtp::Layout> layout = {};
  // The format in which the weight is kept, one tensor for each expert, instead of the storage
  // dtype.
  std::optional<QuantSpec> format = {};
  // A class of parameters that have equal formats at every time of a run; only they share buckets.
  int format_class = 0;
  // Training leaves the values as they are: there is no gradient, no master and no moment.
  bool frozen = false;

  int64_t numel() const { return rows * row_elements; }
};

// A parameter bound to memory. `weight` is in the storage dtype; a weight that is kept in a format
// has `quantized` instead, one for each expert (otherwise 1). `grad` is main_grad; if it is
// undefined the parameter is not trained here (it is frozen, or this is evaluation).
struct Parameter {
  ParamSpec spec;
  TensorView weight;
  std::vector<QuantizedView> quantized = {};
  TensorView grad;
  // The bundle, at the executor that gathers it, of a weight that (e)gtp cuts; `weight` or
  // `quantized` and `grad` are then those of the own shard.
  gtp::BundleId bundle = gtp::kNoBundle;
  // Whether the next contribution overwrites `grad`; set at the start of a step, cleared by the
  // first contribution. (So there is no pass that zeroes gradients.)
  bool overwrite = true;

  bool trained() const { return !spec.frozen; }
};

}  // namespace moiety::optim
