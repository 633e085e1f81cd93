#include "moiety/data/documents.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "moiety/base/error.h"

namespace moiety::data {
namespace {

namespace fs = std::filesystem;

constexpr size_t kReadBytes = 1 << 18;

bool is_jsonl(const std::string& path, const DocumentRules& rules) {
  if (rules.chat) return true;
  if (rules.format != InputFormat::kAuto) return rules.format == InputFormat::kJsonl;
  std::string_view name = path;
  for (const std::string_view packed : {".gz", ".dz", ".zst"}) {
    if (name.ends_with(packed)) name.remove_suffix(packed.size());
  }
  return name.ends_with(".jsonl");
}

// The files below a directory, without hidden ones and token files, sorted by path.
std::vector<std::string> files_below(const std::string& directory) {
  std::vector<std::string> files;
  std::error_code error;
  fs::recursive_directory_iterator it(directory, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    const bool hidden = it->path().filename().string().starts_with('.');
    std::error_code ignored;  // a link to nowhere is no regular file
    if (hidden && it->is_directory(ignored)) it.disable_recursion_pending();
    if (hidden || it->path().extension() == ".tok" || !it->is_regular_file(ignored)) continue;
    files.push_back(it->path().string());
  }
  if (error) throw DataError("{}: cannot list: {}", directory, error.message());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

std::vector<std::string> list_inputs(const std::vector<std::string>& inputs, int64_t& repeated) {
  std::vector<std::string> files;
  std::set<std::string> seen;
  repeated = 0;
  const auto add = [&](const std::string& path) {
    std::error_code none;  // a file that is gone by now is an error when it is read
    const std::string identity = path == "-" ? path : fs::canonical(path, none).string();
    if (seen.insert(identity).second) {
      files.push_back(path);
    } else {
      ++repeated;
    }
  };
  for (const std::string& input : inputs) {
    std::error_code error;
    if (input != "-" && !fs::exists(input, error)) {
      throw DataError("{}: {}", input, error ? error.message() : "no such file or directory");
    }
    if (input != "-" && fs::is_directory(input, error)) {
      for (const std::string& file : files_below(input)) add(file);
    } else {
      add(input);
    }
  }
  return files;
}

BlockReader::BlockReader(const std::string& path, const DocumentRules& rules, size_t block_bytes)
    : path_(path == "-" ? "standard input" : path),
      jsonl_(is_jsonl(path, rules)),
      separator_(jsonl_ ? "\n" : rules.split),
      block_bytes_(block_bytes),
      source_(open_bytes(path)) {}

// Separators are found from left to right, as `encode` finds them, so that blocks never disagree
// with it about separators that overlap themselves.
void BlockReader::find_cut() {
  if (separator_.empty()) return;
  for (size_t at; (at = rest_.find(separator_, searched_)) != std::string::npos;) {
    cut_ = searched_ = at + separator_.size();
  }
  if (rest_.size() >= separator_.size()) {
    searched_ = std::max(searched_, rest_.size() - separator_.size() + 1);
  }
}

std::optional<Block> BlockReader::next() {
  while (!end_ && (cut_ == 0 || rest_.size() < block_bytes_)) {
    const size_t size = rest_.size();
    rest_.resize(size + kReadBytes);
    const size_t n = source_->read(rest_.data() + size, kReadBytes);
    rest_.resize(size + n);
    end_ = n == 0;
    find_cut();
  }
  if (end_) cut_ = rest_.size();
  if (cut_ == 0) return std::nullopt;

  Block block{path_, jsonl_, rest_.substr(0, cut_), offset_, line_};
  rest_.erase(0, cut_);
  searched_ -= std::min(searched_, cut_);
  cut_ = 0;
  offset_ += block.bytes.size();
  line_ += static_cast<uint64_t>(std::count(block.bytes.begin(), block.bytes.end(), '\n'));
  return block;
}

}  // namespace moiety::data
