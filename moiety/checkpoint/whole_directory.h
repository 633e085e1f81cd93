// Directories that get their name when they are complete, and checkpoints of one rank file in them:
// what programs write that are no training.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "moiety/checkpoint/rank_file.h"
#include "moiety/data/tokenizer.h"

namespace moiety::checkpoint {

// Makes the directory `out`, which body(temporary) fills: until it returns there is only
// `<out>.tmp-<hex>`, which is removed if anything fails. An empty directory `out` is replaced; with
// `replace` also one with files, which are removed once the new ones are there. Throws UsageError,
// beginning with `operation`, if `out` is there otherwise, IoError for the disk, and what body
// throws.
void make_whole_directory(const char* operation, const std::string& out, bool replace,
                          FileSystem& files,
                          const std::function<void(const std::string& directory)>& body);

// Writes the one rank file of a checkpoint, by plan_file(view, file_metadata(head, 0), ...), into
// `directory`, reads it back, lays the tokenizer's files beside it, and commits. fill(file, sums)
// writes all pieces, in any order, and sets the sums of each. Returns the manifest.
Manifest write_single_file(const std::string& directory, const Manifest& head, const FilePlan& plan,
                           const StateView& view, const std::vector<data::TokenizerFile>& tokenizer,
                           FileSystem& files,
                           const std::function<void(const File&, std::span<PieceSums>)>& fill);

}  // namespace moiety::checkpoint
