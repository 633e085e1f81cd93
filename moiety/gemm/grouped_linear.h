// A grouped linear layer as an object (docs/spec/grouped.md#grouped-linear): the weights [E, N, C] of
// its experts, an optional bias [E, N], the targets of their gradients, and the weight gradients that
// wait. Rows, groups and epilogue are those of grouped_gemm.h; y = x w^T + b, or with a probability
// for each row + prob b.
//
//    linear.forward(...)            for every micro-batch
//    linear.backward_data(...)      dx, dprob, and the bias's gradient, which is then complete
//    linear.backward_weights(...)   the weight's gradient of the oldest micro-batch that waits
//
// backward_weights may come at once, or any number of micro-batches later; the bits do not depend on
// it. One call is one contribution: it adds (beta 1) or overwrites (beta 0, also NaN), records
// `ready` behind its last write, on its stream, and counts; also where groups are empty, and with E
// = 0. So whoever waits for gradients hears of each target once a contribution.
//
// With a recipe (quantized_linear.h) products are of quantized operands; forward then leaves x's column
// codes for the weight's gradient, and x itself need not stay.
//
// The object owns no tensor: weights, targets and the rows of jobs that wait are the caller's, who
// may give a job what keeps its memory alive. Calls of one object do not overlap.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "moiety/base/stream.h"
#include "moiety/gemm/grouped_mlp.h"
#include "moiety/gemm/quantized_linear.h"

namespace moiety::gemm {

// The gradients that somebody wants. Without dw no operand is kept for it; what is absent here is
// neither computed nor checked.
struct LinearNeeds {
  bool dx = true, dw = true, db = true, dprob = true;
};

struct WeightTarget {
  GradTarget into;  // float32 or bfloat16; beta is read when the contribution is made
  Event ready;      // behind the latest contribution
  int64_t contributions = 0;
};
struct BiasTarget {
  TensorView grad_EN;  // float32 or the dtype of dy
  GroupScalar beta = {};
  Event ready;
  int64_t contributions = 0;
};

class GroupedLinear {
 public:
  // `name` is for errors. Without a bias neither db nor dprob is there to be wanted.
  GroupedLinear(std::string name, GroupedWeight weight_ENC, TensorView bias_EN = {},
                LinearNeeds needs = {});
  // With linear.recipe. Its gradient_bits, rows and columns do not count: each call has its own.
  GroupedLinear(std::string name, const QuantizedLinear& linear, TensorView bias_EN = {},
                LinearNeeds needs = {});
  // Logs if weight gradients wait, which nobody will get.
  ~GroupedLinear();
  GroupedLinear(const GroupedLinear&) = delete;
  GroupedLinear& operator=(const GroupedLinear&) = delete;

  // Set before the first backward_data of a step.
  WeightTarget& weight_target() { return weight_target_; }
  BiasTarget& bias_target() { return bias_target_; }

  const LinearNeeds& needs() const { return needs_; }
  // Whether x is to be kept from forward to backward, or its column codes.
  bool keeps_x() const { return needs_.dw && !quantized_; }
  bool keeps_columns() const { return needs_.dw && quantized_; }

  struct Forward {
    Groups groups;
    GroupedTensor x;         // [., C]
    TensorView prob_R = {};  // float32 [capacity], optional, only with a bias
    TensorView y;            // result [capacity, N]
    // With a recipe: the products' temporaries; and, if columns are kept, where to
    // (allocate_columns).
    Arena* arena = nullptr;
    QuantizedView columns = {};
  };
  void forward(const Forward& args, Stream stream) const;

  struct Backward {
    Groups groups;
    GroupedTensor dy;         // [., N]
    GroupedTensor x = {};     // as in forward, if it is kept
    TensorView prob_R = {};   // as in forward
    TensorView dx = {};       // result [capacity, C], if it is wanted
    TensorView dprob_R = {};  // result, float32 [capacity]: of the bias alone; with prob, if wanted
    // Optional: held until the weight's gradient has been computed, which reads groups, dy and x, or
    // the columns.
    std::shared_ptr<const void> memory = {};
    // With a recipe: as in forward, and what rounds dy.
    Arena* arena = nullptr;
    QuantizedView columns = {};
    RandomBits gradient_bits = {};
  };
  void backward_data(const Backward& args, Stream stream);
  // Computes the weight's gradient of the oldest backward_data without one. Throws
  // Error(kInvalidArgument), naming the layer, if none waits. `arena` as in forward.
  void backward_weights(Stream stream, Arena* arena = nullptr);

  // The weight gradients that wait.
  int64_t pending() const { return static_cast<int64_t>(jobs_.size()); }
  // Throws Error(kInvalidArgument) if any waits: before an optimizer's step, which `before` names.
  void check_idle(const char* before) const;

 private:
  struct Job {
    Groups groups;
    GroupedTensor dy, x;
    std::shared_ptr<const void> memory;
    QuantizedView columns;
    RandomBits gradient_bits;
  };
  Arena& temporaries(Arena* arena) const;  // with a recipe
  void input_gradient(const Backward& args, const Stream& stream) const;
  void weight_gradient(const Job& job, Arena* arena, const Stream& stream) const;

  std::string name_;
  GroupedWeight weight_;
  std::optional<QuantizedLinear> quantized_;  // in use instead of the weight
  TensorView bias_;
  LinearNeeds needs_;
  WeightTarget weight_target_;
  BiasTarget bias_target_;
  std::deque<Job> jobs_;
};

}  // namespace moiety::gemm
