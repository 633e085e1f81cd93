// The file config.json of a Hugging Face folder, read as a description of a model: those of
// transformers 4 and 5, for the families below. What is absent has the default of transformers'
// class, never that of Moiety. The file is not trusted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "moiety/base/dtype.h"
#include "moiety/model/config.h"

namespace moiety::hf {

enum class Family { kQwen3Moe, kMixtral, kLlama, kMistral, kQwen3 };
// The family's `model_type`: "qwen3_moe", "mixtral", "llama", "mistral" or "qwen3".
std::string_view name(Family family);
constexpr bool has_experts(Family family) {
  return family == Family::kQwen3Moe || family == Family::kMixtral;
}

struct Description {
  Family family = Family::kQwen3Moe;
  model::Config config;        // of a family without experts all layers are dense
  std::optional<DType> dtype;  // as the file states it: bfloat16, float16 or float32
  int64_t max_positions = 0;   // max_position_embeddings
  int64_t window = 0;          // tokens that attention sees; 0: all
};

// The model that `json` describes; `path` names the file in errors. Throws CheckpointError with
// field and value for a text that is no such description, for a model_type not among the families,
// and for what Moiety does not compute: biases, scaled positions, other activations, router jitter,
// dropout, shared experts, latent attention, layers for several tokens, quantized weights.
Description parse_config(std::string_view json, const std::string& path);

// Throws CheckpointError naming sliding_window if attention sees fewer than `seq_len` tokens.
void check_window(const Description& description, int64_t seq_len, const std::string& path);

}  // namespace moiety::hf
