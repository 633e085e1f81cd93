// Weights without an optimizer, for evaluation and generation: every rank holds all elements of its
// parameters, in the storage dtype. A checkpoint's fp32 weights are loaded through `state_view` and
// rounded by `publish`.
#pragma once

#include <span>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/stream.h"
#include "moiety/optim/buffer_layout.h"
#include "moiety/optim/parameter.h"
#include "moiety/optim/state_view.h"

namespace moiety::optim {

class WeightStore {
 public:
  // Makes zero weights; `storage` is float32 or bfloat16.
  WeightStore(std::vector<ParamSpec> specs, DType storage, Device device = {});
  WeightStore(const WeightStore&) = delete;
  WeightStore& operator=(const WeightStore&) = delete;

  // The parameters in the order of the specs, without `grad`.
  std::span<Parameter> parameters() { return parameters_; }

  // Pieces of slot "weight", float32, in host memory, since a GPU need not have room for all of
  // them. They are valid until `publish`, which takes the values written to them.
  StateView state_view();
  void publish(Stream stream);

  // Draws the weights that an optimizer starts from.
  void initialize(uint64_t seed, Stream stream);

 private:
  struct Bucket {
    BucketLayout layout;
    std::vector<ElementRun> runs;
    Buffer memory, staging_memory;
    TensorView weights;  // [length]
    // float32 [length]; the weights themselves if these are float32 on the host
    TensorView staging;
    bool staged() const {
      return weights.dtype() != DType::kFloat32 || weights.device() != Device{};
    }
  };
  void stage();

  std::vector<ParamSpec> specs_;
  std::vector<Bucket> buckets_;
  std::vector<Parameter> parameters_;
};

}  // namespace moiety::optim
