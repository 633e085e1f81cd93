// The experts of a layer, with or without a recipe. Internal to MoeLayer.
#pragma once

#include "moiety/moe/moe_layer.h"

namespace moiety::moe {

struct MoeLayer::Experts {
  static TensorView memory(Arena& arena, int64_t bytes) {
    return arena.tensor(DType::kUInt8, {bytes});
  }

  gemm::GroupedMlp plain;
  gemm::QuantizedMlp quantized;  // in use if it has a recipe
  bool has_recipe() const { return quantized.fc1.recipe; }
  void limit_sms(int limit) {
    plain.sm_limit = quantized.fc1.sm_limit = quantized.fc2.sm_limit = limit;
  }

  void forward(const gemm::MlpInput& input, TensorView h, TensorView y, Arena& arena,
               Stream stream) const {
    if (has_recipe()) return quantized_mlp_forward(quantized, input, h, y, arena, stream);
    grouped_mlp_forward(plain, input, h, y, memory(arena, grouped_mlp_workspace(plain, input)),
                        stream);
  }
  void hidden(const gemm::MlpInput& input, TensorView h, Arena& arena, Stream stream) const {
    if (has_recipe()) return quantized_mlp_hidden(quantized, input, h, arena, stream);
    grouped_mlp_hidden(plain, input, h, stream);
  }
  // `free`: memory that is not in use until dx is written, optional.
  void backward_data(const gemm::MlpInput& input, const gemm::MlpGradients& gradients,
                     TensorView free, Arena& arena, Stream stream) const {
    if (has_recipe()) {
      return quantized_mlp_backward_data(quantized, input, gradients, arena, stream);
    }
    // A GPU has read what B1 leaves when it writes dx over it.
    const int64_t need = grouped_mlp_workspace(plain, input);
    const bool fits = stream.device().type == DeviceType::kCuda && free.defined() &&
                      free.contiguous() && free.bytes() >= need;
    grouped_mlp_backward_data(
        plain, input, gradients,
        fits ? TensorView(free.raw(), DType::kUInt8, {need}, free.device()) : memory(arena, need),
        stream);
  }
  void backward_weights(const gemm::MlpInput& input, const gemm::MlpGradients& gradients,
                        const gemm::GradTarget& w2, const gemm::GradTarget& w1, Arena& arena,
                        Stream stream) const {
    if (has_recipe()) {
      return quantized_mlp_backward_weights(quantized, input, gradients, w2, w1, arena, stream);
    }
    grouped_mlp_backward_weights(plain, input, gradients, w2, w1, stream);
  }
};

}  // namespace moiety::moe
