// A checkpoint once more, with its experts in another form (key_remap.h). Elements are moved, never
// changed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "moiety/checkpoint/manifest.h"
#include "moiety/data/tokenizer.h"

namespace moiety::checkpoint {

struct ConvertOptions {
  ExpertForm form = ExpertForm::kPacked;
  int64_t interleave = 0;
  std::vector<ExpertModule> modules;        // of a plain checkpoint, which does not list them
  int64_t piece_bytes = int64_t{64} << 20;  // limit of a piece
  std::function<void(uint64_t done, uint64_t all)> progress{};  // bytes of tensors
  const std::atomic<bool>* stop = nullptr;                      // true: give up
  std::vector<data::TokenizerFile> tokenizer{};                 // files beside the manifest
};

// Writes the checkpoint at `path` to the directory `out`, as one rank file, with the id, the state
// and the configuration that it has. Tensors go through memory one by one, with all their checks,
// and what is written is read back. `out` gets its name when it is complete; until then there is
// only `<out>.tmp-<hex>`, which is removed if anything fails. Returns the new manifest.
//
// Throws UsageError if `out` is there or the interleave fits no gated module, CheckpointError for
// what is damaged or ambiguous, IoError for the disk, and when it is stopped.
Manifest convert(const std::string& path, const std::string& out, const ConvertOptions& options,
                 FileSystem& files = posix());

}  // namespace moiety::checkpoint
