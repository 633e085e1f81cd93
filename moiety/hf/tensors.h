// The tensors of a model by their names in Moiety and in a Hugging Face folder: one table, from
// which folders are read, checked and written.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moiety/checkpoint/box.h"
#include "moiety/hf/config.h"

namespace moiety::hf {

using checkpoint::Box;

// A tensor as a checkpoint of Moiety has it (docs/spec/trainer.md#parameters).
struct ModelTensor {
  std::string name;
  std::vector<int64_t> shape;
  bool drawn = false;  // the routers of an upcycled model, which no folder holds
  bool noisy = false;  // the experts of an upcycled model
};
// All tensors of a model that a folder can hold: weights, and the biases of routers.
std::vector<ModelTensor> model_tensors(const model::Config& config, Family family);

// Experts in a folder: a tensor of each matrix of each expert, or gate and up of all experts in one
// tensor [E, 2F, D], and down [E, D, F].
enum class Form { kOneByOne, kStacked };

// A tensor of a folder, and the box of a tensor of Moiety whose elements it holds, row-major.
struct FolderTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::string model_tensor;
  Box box;
};
// The tensors of a folder. A layer that has experts in `config` but not in `family` is upcycled:
// each of its tensors is listed once for every expert that it becomes. The router's bias is in no
// folder; the head of a tied model is not listed.
std::vector<FolderTensor> folder_tensors(const model::Config& config, Family family, Form form);

inline constexpr const char* kHeadName = "lm_head.weight";

}  // namespace moiety::hf
