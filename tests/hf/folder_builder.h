// A folder in memory, to be changed and written: what hostile folders are made of.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "moiety/base/printable.h"
#include "moiety/checkpoint/json.h"
#include "moiety/checkpoint/safetensors.h"
#include "tests/hf/hf_testing.h"

namespace moiety::hf {

struct FolderBuilder {
  struct Item {
    std::string type;
    std::vector<int64_t> shape;
    std::string bytes;
  };
  std::map<std::string, Item> items;
  std::string config;

  explicit FolderBuilder(const std::string& name)
      : config(read_all(golden(name) + "/config.json")) {
    const auto reader = checkpoint::SafetensorsReader::open(golden(name) + "/model.safetensors");
    for (const checkpoint::Entry& entry : reader.entries()) {
      Item& item = items[entry.name];
      item = {entry.type->name, entry.shape, std::string(entry.end - entry.begin, '\0')};
      reader.read(entry.begin, std::as_writable_bytes(std::span(item.bytes)));
    }
  }

  // Replaces a field of config.json, or adds it.
  FolderBuilder& set(const std::string& key, const std::string& json) {
    const size_t at = config.find("\"" + key + "\":");
    if (at != config.npos) {
      const size_t end = config.find_first_of(",\n", at);
      config.replace(at, end - at, "\"" + key + "\": " + json);
    } else {
      config.insert(config.find('{') + 1, "\"" + key + "\": " + json + ",");
    }
    return *this;
  }

  // The bytes of a file of these tensors, one after the other.
  std::string file(const std::vector<std::string>& names) const {
    std::vector<checkpoint::Entry> entries;
    std::string data;
    for (const std::string& name : names) {
      const Item& item = items.at(name);
      entries.push_back({name, checkpoint::find_stored_type(item.type), item.shape, data.size(),
                         data.size() + item.bytes.size()});
      data += item.bytes;
    }
    return checkpoint::encode_header(entries, {{"format", "pt"}}) + data;
  }

  // Writes the folder in `shards` files with an index, or with 0 in one without.
  std::string write(const TemporaryDirectory& dir, const std::string& to, int shards = 0) const {
    dir.write(to + "/config.json", config);
    std::vector<std::vector<std::string>> names(static_cast<size_t>(std::max(shards, 1)));
    size_t next = 0;
    for (const auto& [name, item] : items) names[next++ % names.size()].push_back(name);
    if (shards == 0) {
      dir.write(to + "/model.safetensors", file(names[0]));
      return dir / to;
    }
    std::string map;
    for (size_t i = 0; i < names.size(); ++i) {
      const std::string shard = shard_name(i);
      dir.write(to + "/" + shard, file(names[i]));
      for (const std::string& name : names[i]) {
        map += (map.empty() ? "" : ",\n") + checkpoint::json_string(name) + ":\"" + shard + "\"";
      }
    }
    dir.write(to + "/model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
    return dir / to;
  }
  static std::string shard_name(size_t i) { return "part-" + std::to_string(i) + ".safetensors"; }
};

// Imports a folder, and returns the error, which must leave nothing behind; empty if there is none.
inline std::string import_error(const TemporaryDirectory& dir, const std::string& folder,
                                const std::string& out = "out") {
  namespace fs = std::filesystem;
  std::string error;
  try {
    const Folder read = Folder::open(folder);
    import_folder(read, read.description().config, dir / out, {});
  } catch (const CheckpointError& e) {
    error = e.what();
  } catch (const IoError& e) {
    error = e.what();
  }
  if (!error.empty()) {
    for (const auto& entry : fs::directory_iterator(dir / "")) {
      EXPECT_FALSE(entry.path().filename().string().starts_with(out)) << entry.path();
    }
  }
  return error;
}

inline void expect_text(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
}

}  // namespace moiety::hf
