#include "apps/moiety/config/checkpoints.h"

#include <algorithm>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "apps/moiety/config/model_options.h"
#include "apps/moiety/config/train_options.h"
#include "moiety/base/error.h"
#include "moiety/base/json_line.h"
#include "moiety/base/parallel.h"
#include "moiety/base/printable.h"
#include "moiety/checkpoint/file_system.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/data/sha256.h"
#include "moiety/data/tokenizer.h"

namespace moiety::app {
namespace {

constexpr uint64_t kLongestTokenizer = uint64_t{512} << 20;

}  // namespace

std::string config_to_json(const Config& config, std::span<const data::TokenizerFile> tokenizer) {
  JsonLine json;
  json.add("toml", print_config(config));
  if (tokenizer.empty()) return json.text();
  JsonLine sums;
  for (const data::TokenizerFile& file : tokenizer) {
    sums.add(file.name, data::hex(data::sha256(file.bytes)));
  }
  return json.raw("tokenizer", sums.text()).text();
}

std::optional<int64_t> check_tokenizer_files(const std::string& path, std::string_view config) {
  const nlohmann::json object = nlohmann::json::parse(config, nullptr, false);
  const auto sums = object.is_object() ? object.find("tokenizer") : object.end();
  if (sums == object.end() || !sums->is_object()) return std::nullopt;
  for (const auto& [name, expected] : sums->items()) {
    const std::string file = path + "/" + name;
    const std::string bytes = checkpoint::read_text(checkpoint::posix(), file, kLongestTokenizer);
    const std::string sum = data::hex(data::sha256(bytes));
    if (expected != sum) {
      throw CheckpointError("{}: its SHA-256 is {}, expected {}", file, sum,
                            printable(expected.dump()));
    }
  }
  return int64_t(sums->size());
}

Options parse_config_json(std::string_view json, const std::string& checkpoint) {
  try {
    const nlohmann::json object = nlohmann::json::parse(json, nullptr, false);
    const auto toml = object.is_object() ? object.find("toml") : object.end();
    if (toml == object.end() || !toml->is_string()) {
      throw CheckpointError("{}: its config is no object with a text \"toml\"", checkpoint);
    }
    return parse_config(toml->get<std::string>(), checkpoint + " config").options;
  } catch (const UsageError& e) {
    throw CheckpointError("{}", e.what());  // written by another version
  }
}

CheckpointInfo read_checkpoint_info(const std::string& path) {
  const checkpoint::Manifest manifest = checkpoint::read_manifest(path);
  CheckpointInfo info{path, manifest.run.step, parse_config_json(manifest.run.config, path)};
  info.options.data.tokenizer = kept_tokenizer(info.options, path);
  return info;
}

std::string kept_tokenizer(const Options& options, const std::string& path) {
  std::error_code error;
  const bool is_kept = std::filesystem::exists(path + "/tokenizer.json", error);
  return is_kept ? path : options.data.tokenizer;
}

train::TrainConfig train_config(const CheckpointInfo& checkpoint) {
  return train_config(checkpoint, data::Tokenizer::load(checkpoint.options.data.tokenizer));
}

train::TrainConfig train_config(const CheckpointInfo& checkpoint,
                                const data::Tokenizer& tokenizer) {
  try {
    return train_config(checkpoint.options, tokenizer);
  } catch (const UsageError& e) {
    throw CheckpointError("{} config: {}", checkpoint.path, e.what());
  }
}

model::Config model_config(const CheckpointInfo& checkpoint) {
  const Options& o = checkpoint.options;
  try {
    return model_config(
        o, o.model.vocab > 0 ? o.model.vocab : data::Tokenizer::load(o.data.tokenizer).vocab());
  } catch (const UsageError& e) {
    throw CheckpointError("{} config: {}", checkpoint.path, e.what());
  }
}

int64_t inference_threads(const CheckpointInfo& checkpoint, std::optional<int64_t> given) {
  return given.value_or(std::min<int64_t>(checkpoint.options.run.threads, core_count()));
}

std::vector<std::string> compare_for_resume(const Options& saved, const Options& now,
                                            const std::string& checkpoint) {
  std::vector<std::string> changes;
  std::string different;
  for (const Key& key : option_keys()) {
    const std::string before = value_text(key, saved), after = value_text(key, now);
    if (before == after) continue;
    if (key.resume == Resume::kMust) {
      different += text("{}{} was {}, is now {}", different.empty() ? "" : "; ", key.full_name(),
                        printable(before), printable(after));
    } else if (key.resume == Resume::kMay) {
      changes.push_back(text("resume: {} was {}, is now {}", key.full_name(), before, after));
    }
  }
  if (different.empty()) return changes;
  throw CheckpointError("{}: made with other values of keys that a resume must not change: {}",
                        checkpoint, different);
}

}  // namespace moiety::app
