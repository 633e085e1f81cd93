// A Hugging Face folder: config.json, model.safetensors or the shards that
// model.safetensors.index.json lists, and the files that go with a model. Headers are read, no
// weights.
//
// The folder is not trusted: a CheckpointError names file and key for an index that lists a missing
// shard, a key in another file than listed, in two files or in none, names that are no plain file
// names, and all that safetensors.h refuses.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "moiety/checkpoint/safetensors.h"
#include "moiety/hf/config.h"

namespace moiety::hf {

class Folder {
 public:
  // Reads configuration and headers of the folder at `path`; the configuration first, so that a
  // model that is not built is refused before anything else.
  static Folder open(const std::string& path, checkpoint::FileSystem& files = checkpoint::posix());

  struct Stored {
    const checkpoint::SafetensorsReader* file = nullptr;
    const checkpoint::Entry* entry = nullptr;
  };

  const std::string& path() const { return path_; }
  const Description& description() const { return description_; }
  const std::string& config_text() const { return config_text_; }
  const std::map<std::string, Stored>& tensors() const { return tensors_; }
  // 16 hex digits that differ where configuration, headers or sizes do, for comparison among ranks.
  std::string identity() const;

 private:
  Folder() = default;
  void add(const std::string& file, checkpoint::FileSystem& files);
  void read_index(const std::string& index, checkpoint::FileSystem& files);

  std::string path_, config_text_;
  Description description_;
  std::deque<checkpoint::SafetensorsReader> readers_;  // addresses hold
  std::map<std::string, Stored> tensors_;
};

// Whether there is a Hugging Face folder at this path, going by config.json.
bool is_folder(const std::string& path);

// A file that goes with a model without being understood: tokenizer, chat template, settings.
struct SideFile {
  std::string name;
  std::string bytes;
  bool operator==(const SideFile&) const = default;
};
// The names of such files; config.json is one of them.
const std::vector<std::string>& side_file_names();
// Those of the names that the folder has. Throws CheckpointError for one over 256 MiB.
std::vector<SideFile> read_side_files(const std::string& path,
                                      checkpoint::FileSystem& files = checkpoint::posix());

}  // namespace moiety::hf
