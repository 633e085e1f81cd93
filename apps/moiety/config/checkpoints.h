// The configuration that a checkpoint keeps in words: a JSON object around the TOML of
// --print-config.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/moiety/config/options.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/config.h"

namespace moiety::app {

// The SHA-256 of the tokenizer's files, which lie beside the manifest, stand there too.
std::string config_to_json(const Config& config,
                           std::span<const data::TokenizerFile> tokenizer = {});
// Parses the object. Throws CheckpointError.
Options parse_config_json(std::string_view json, const std::string& checkpoint);

// Compares the tokenizer's files beside a checkpoint's manifest with what its config says of them.
// Returns how many there are; nothing if it says nothing, as older ones. Throws CheckpointError.
std::optional<int64_t> check_tokenizer_files(const std::string& path, std::string_view config);

// The facts about a checkpoint, without its tensors. Where it keeps a tokenizer data.tokenizer is its
// path: the one that the run was given may be gone, or another by now.
struct CheckpointInfo {
  std::string path;
  int64_t step = 0;
  Options options;
};
// `path` is a result of find_checkpoint. Throws CheckpointError.
CheckpointInfo read_checkpoint_info(const std::string& path);
// data.tokenizer of a checkpoint with these options: `path` if a tokenizer is kept there.
std::string kept_tokenizer(const Options& options, const std::string& path);
// Its configuration as values. Throws CheckpointError if it is none that a training could have.
train::TrainConfig train_config(const CheckpointInfo& checkpoint);
train::TrainConfig train_config(const CheckpointInfo& checkpoint, const data::Tokenizer& tokenizer);

// Its model alone, which may have been imported with a smaller vocabulary than data.tokenizer has.
// Throws as train_config does.
model::Config model_config(const CheckpointInfo& checkpoint);

// The threads of evaluation and generation from a checkpoint: as many as were `given`, or as a rank
// of its run had, but no more than there are cores here; 0: all that the environment allows.
int64_t inference_threads(const CheckpointInfo& checkpoint, std::optional<int64_t> given);

// Compares a checkpoint's configuration with that of a run that continues, by the table's resume
// classes. Throws CheckpointError with every kMust key that differs, the checkpoint's value and the
// value now. Returns a sentence for every kMay key that differs.
std::vector<std::string> compare_for_resume(const Options& saved, const Options& now,
                                            const std::string& checkpoint);

}  // namespace moiety::app
