// The import of a Hugging Face folder: a checkpoint of its weights, at step 0 and without moments.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "moiety/checkpoint/manifest.h"
#include "moiety/data/tokenizer.h"
#include "moiety/hf/weight_source.h"

namespace moiety::hf {

// Makes layers of a dense model MoE: each feed-forward part is copied to all experts (Komatsuzaki
// et al., "Sparse upcycling", 2023), and routers are drawn. Weights of the chosen experts sum to 1,
// so that without noise the model computes what the dense one does.
struct Upcycling {
  int64_t experts = 8, top_k = 2;
  float noise = 0;  // normal numbers, in units of init.std, on every expert's weights
  std::vector<int64_t> layers = {};  // ascending; empty: all
};
// The description's configuration after upcycling. Throws UsageError for a model that has experts,
// layers that it has not, and numbers out of range.
model::Config upcycled(const Description& description, const Upcycling& upcycling);

struct ImportOptions {
  uint64_t seed = 1234;                          // of routers and noise
  float noise = 0;                               // as in Upcycling
  std::string config = "{}";                     // kept in the checkpoint (RunState::config)
  std::vector<data::TokenizerFile> tokenizer{};  // files beside the manifest
  int64_t piece_bytes = int64_t{64} << 20;       // limit of a piece
  std::function<void(uint64_t done, uint64_t all)> progress{};  // bytes of tensors
  const std::atomic<bool>* stop = nullptr;                      // true: give up
};

// Writes the weights of `folder` as those of a model of `config`, with the folder's side files, to
// the directory `out` (checkpoint/whole_directory.h); a piece a thread is in memory at a time. What
// is written is read back. Returns the manifest. Throws CheckpointError for a folder that does not
// fit or holds values that are not finite, UsageError if `out` is there, IoError for the disk and
// when it is stopped; nothing is left then.
checkpoint::Manifest import_folder(const Folder& folder, const model::Config& config,
                                   const std::string& out, const ImportOptions& options,
                                   checkpoint::FileSystem& files = checkpoint::posix());

}  // namespace moiety::hf
