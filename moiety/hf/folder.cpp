#include "moiety/hf/folder.h"

#include <filesystem>
#include <set>

#include "moiety/base/crc32c.h"
#include "moiety/base/printable.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/json.h"

namespace moiety::hf {
namespace {

using checkpoint::FileSystem, checkpoint::JsonDocument, checkpoint::json_string;
using checkpoint::refuse, checkpoint::SafetensorsReader;

constexpr uint64_t kLongestConfig = uint64_t{16} << 20;
constexpr uint64_t kLongestIndex = uint64_t{1} << 30;
constexpr uint64_t kLongestSideFile = uint64_t{256} << 20;
constexpr int kDeepestIndex = 8;
constexpr const char* kConfig = "config.json";
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

bool is_plain_name(const std::string& name) {
  return !checkpoint::name_fault(name) && name.find('/') == name.npos && name[0] != '.';
}

}  // namespace

void Folder::add(const std::string& file, FileSystem& files) {
  readers_.push_back(SafetensorsReader::open(path_ + "/" + file, files));
  const SafetensorsReader& reader = readers_.back();
  for (const checkpoint::Entry& entry : reader.entries()) {
    const auto [at, added] = tensors_.insert({entry.name, {&reader, &entry}});
    if (!added) {
      refuse("{}: {} is in {} too", reader.path(), json_string(printable(entry.name)),
             at->second.file->path());
    }
  }
}

// The keys of the index and those of its shards have to be the same, file by file.
void Folder::read_index(const std::string& index, FileSystem& files) {
  const std::string text = checkpoint::read_text(files, index, kLongestIndex);
  const JsonDocument json(index, text, kDeepestIndex);
  std::map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  for (const auto& [key, value] : json.object(json.member(json.root(), "weight_map"))) {
    const std::string& file = json.string(value);
    if (!is_plain_name(file)) {
      json.refuse(value, json_string(printable(file)) + " is not a plain file name");
    }
    shard_of[key] = file;
    shards.insert(file);
  }
  for (const std::string& shard : shards) add(shard, files);
  for (const auto& [key, file] : shard_of) {
    const auto at = tensors_.find(key);
    if (at == tensors_.end()) {
      refuse("{}: {} is not in {}, where the index has it", index, json_string(printable(key)),
             file);
    }
    if (at->second.file->path() != path_ + "/" + file) {
      refuse("{}: {} is in {}, the index has it in {}", index, json_string(printable(key)),
             at->second.file->path(), file);
    }
  }
  for (const auto& [key, stored] : tensors_) {
    if (!shard_of.contains(key)) {
      refuse("{}: {} is in {} and not in the index", index, json_string(printable(key)),
             stored.file->path());
    }
  }
}

Folder Folder::open(const std::string& path, FileSystem& files) {
  Folder folder;
  folder.path_ = path;
  while (folder.path_.size() > 1 && folder.path_.back() == '/') folder.path_.pop_back();
  const std::string config = folder.path_ + "/" + kConfig;
  folder.config_text_ = checkpoint::read_text(files, config, kLongestConfig);
  folder.description_ = parse_config(folder.config_text_, config);
  const std::string single = folder.path_ + "/" + kSingle, index = folder.path_ + "/" + kIndex;
  if (checkpoint::size_of(files, single)) {
    folder.add(kSingle, files);
  } else if (checkpoint::size_of(files, index)) {
    folder.read_index(index, files);
  } else {
    refuse("{}: holds neither {} nor {}; other files of weights are not read", folder.path_,
           kSingle, kIndex);
  }
  return folder;
}

std::string Folder::identity() const {
  uint32_t crc = crc32c(config_text_);
  uint64_t bytes = 0;
  for (const SafetensorsReader& reader : readers_) {
    const uint32_t header = reader.header_crc32c();
    crc = crc32c(&header, sizeof header, crc);
    bytes += reader.bytes();
  }
  return text("{:08x}{:08x}", crc, static_cast<uint32_t>(bytes ^ bytes >> 32));
}

bool is_folder(const std::string& path) {
  std::error_code none;
  return std::filesystem::is_regular_file(path + "/" + kConfig, none);
}

const std::vector<std::string>& side_file_names() {
  static const std::vector<std::string> names{
      kConfig,           "generation_config.json",  "tokenizer.json",    "tokenizer_config.json",
      "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
      "merges.txt",      "chat_template.jinja",     "chat_template.json"};
  return names;
}

std::vector<SideFile> read_side_files(const std::string& path, FileSystem& files) {
  std::vector<SideFile> list;
  for (const std::string& name : side_file_names()) {
    const std::string file = path + "/" + name;
    if (!checkpoint::size_of(files, file)) continue;
    list.push_back({name, checkpoint::read_text(files, file, kLongestSideFile)});
  }
  return list;
}

}  // namespace moiety::hf
