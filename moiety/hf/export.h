// The export of a checkpoint as a Hugging Face folder that transformers loads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "moiety/checkpoint/manifest.h"
#include "moiety/hf/tensors.h"

namespace moiety::hf {

// The family that a folder of this model belongs to: Qwen3-MoE if heads are normalized, else
// Mixtral. Throws CheckpointError naming the first key whose value neither can say.
Family export_family(const model::Config& config);

// The ids of a tokenizer's special tokens.
struct SpecialIds {
  std::optional<uint32_t> bos, eos, pad;
};

struct ExportOptions {
  Form form = Form::kOneByOne;
  bool replace = false;  // a folder that is there and holds files (checkpoint/whole_directory.h)
  DType dtype = DType::kBFloat16;           // of weights: bfloat16, rounded to even, or float32
  int64_t positions = 1024;                 // max_position_embeddings, if none travelled
  SpecialIds special{};                     // in config.json, if none travelled
  int64_t shard_bytes = 5'000'000'000;      // of data; a larger tensor has a file of its own
  int64_t chunk_bytes = int64_t{64} << 20;  // of float32 values that are in memory at a time
  std::function<void(uint64_t done, uint64_t all)> progress{};  // bytes written and read back
  const std::atomic<bool>* stop = nullptr;                      // true: give up
};

struct ExportResult {
  Family family = Family::kMixtral;
  int64_t keys = 0, files = 0;
  uint64_t bytes = 0;  // of weights
};

// Writes the weights of the checkpoint at `path`, of a model of `config`, to the folder `out`:
// model-00001-of-0000N.safetensors, their index, a config.json that transformers 4 and 5 read, and
// the side files of the checkpoint; if it keeps another tokenizer than they have, that one alone.
// The bytes do not depend on the checkpoint's layout. What is written is read back and compared,
// tensor by tensor. Throws CheckpointError for what the format cannot hold and for a damaged
// checkpoint, UsageError if `out` is there, IoError for the disk and when it is stopped; nothing is
// left then.
ExportResult export_folder(const std::string& path, const model::Config& config,
                           const std::string& out, const ExportOptions& options,
                           checkpoint::FileSystem& files = checkpoint::posix());

// The text of config.json. `travelled` is that of the folder that the model came from, or empty:
// its ids of special tokens and its max_position_embeddings are taken over in place of those given.
std::string config_text(const model::Config& config, Family family, DType dtype, int64_t positions,
                        const std::string& travelled, const SpecialIds& special = {});

}  // namespace moiety::hf
