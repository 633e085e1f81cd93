// The search for values that are not finite: in weights, and in tensors that the operations of a
// pass store.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moiety/base/json_line.h"
#include "moiety/base/tensor_probe.h"
#include "moiety/optim/parameter.h"

namespace moiety::train {

struct TensorStatistics {
  std::string tensor;  // "float32[128, 32]"
  int64_t elements = 0, nan = 0, infinite = 0;
  double min = 0, max = 0, mean = 0, rms = 0;  // over the finite values
};
// The statistics of float32, bfloat16 and float64 tensors of any strides; other dtypes have no
// elements. With `rows` only the rows of experts count.
TensorStatistics tensor_statistics(const TensorView& x, const ExpertRows* rows = nullptr);

// The place of the first such value.
struct Finding {
  int64_t order = 0;  // of the tensor among those that the step has stored; 0: a weight, before all
  int64_t layer = -1;
  int expert = -1;
  bool backward = false;
  std::string operation;  // "weight", or the operation that stored the tensor
  std::string tensor;
  std::vector<int64_t> index;
  double value = 0;
  TensorStatistics statistics;
  std::vector<TensorStatistics> inputs;  // inputs of the operation

  // The finding as a sentence: "layer 1, expert 3: weight layers.1.moe.experts.fc2.weight is nan at
  // [3, 0, 5]".
  std::string sentence() const;
  JsonLine json() const;
};

// Keeps the first non-finite value that it is shown. Tensors on a GPU are copied by `stream`, on which
// they are in place: a stream of its own, made while kernels of another rank wait on that GPU, might
// not begin before they end (docs/adr/0031-processes-without-mpi.md#what-stood-still).
class FirstNonFinite final : public TensorProbe {
 public:
  explicit FirstNonFinite(Stream stream = {}) : stream_(std::move(stream)) {}

  void enter(int64_t layer, bool backward) override { layer_ = layer, backward_ = backward; }
  void stored(const StoredTensor& tensor) override;
  // Looks at the weights as they are, by their logical names and indices.
  void look_at_weights(std::span<const optim::Parameter> parameters);

  const std::optional<Finding>& finding() const { return finding_; }

 private:
  Stream stream_;
  int64_t layer_ = -1, order_ = 0;
  bool backward_ = false;
  std::optional<Finding> finding_;
};

}  // namespace moiety::train
