#include "moiety/hf/shards.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "moiety/base/error.h"
#include "moiety/checkpoint/json.h"

namespace moiety::hf {
namespace {

using checkpoint::Entry, checkpoint::json_string;

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

// The digits at `at`, without leading zeros, and the place behind them.
std::string_view digits_at(const std::string& s, size_t& at) {
  while (at < s.size() && s[at] == '0') ++at;
  const size_t begin = at;
  while (at < s.size() && is_digit(s[at])) ++at;
  return std::string_view(s).substr(begin, at - begin);
}

}  // namespace

bool natural_less(const std::string& a, const std::string& b) {
  size_t i = 0, k = 0;
  while (i < a.size() && k < b.size()) {
    if (is_digit(a[i]) && is_digit(b[k])) {
      const std::string_view x = digits_at(a, i), y = digits_at(b, k);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else {
      if (a[i] != b[k]) return a[i] < b[k];
      ++i, ++k;
    }
  }
  return a.size() - i < b.size() - k;
}

Shards::Shards(std::vector<FolderTensor> tensors, DType dtype, int64_t shard_bytes)
    : dtype_(dtype) {
  std::ranges::sort(tensors, natural_less, &FolderTensor::name);
  keys_ = std::ssize(tensors);
  std::vector<std::vector<Entry>> entries;
  for (FolderTensor& tensor : tensors) {
    const auto bytes = static_cast<uint64_t>(
        byte_size(dtype, checkpoint::volume(checkpoint::whole(tensor.shape))));
    if (shards_.empty() ||
        (shards_.back().data_bytes > 0 &&
         shards_.back().data_bytes + bytes > static_cast<uint64_t>(shard_bytes))) {
      shards_.emplace_back();
      entries.emplace_back();
    }
    Shard& shard = shards_.back();
    entries.back().push_back({tensor.name, &checkpoint::stored_type(dtype), tensor.shape,
                              shard.data_bytes, shard.data_bytes + bytes});
    placed_[tensor.model_tensor].push_back({tensor, shards_.size() - 1, shard.data_bytes});
    shard.data_bytes += bytes;
    bytes_ += bytes;
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    shards_[i].name = text("model-{:05}-of-{:05}.safetensors", i + 1, shards_.size());
    shards_[i].header = checkpoint::encode_header(entries[i], {{"format", "pt"}});
    for (const Entry& entry : entries[i]) {
      index_ += text("{}    {}: \"{}\"", index_.empty() ? "" : ",\n", json_string(entry.name),
                     shards_[i].name);
    }
  }
  index_ = text(
      "{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{\n{}\n"
      "  }}\n}}\n",
      bytes_, index_);
  for (auto& [tensor, list] : placed_) {
    for (Placed& p : list) p.begin += shards_[p.shard].header.size();
  }
}

}  // namespace moiety::hf
