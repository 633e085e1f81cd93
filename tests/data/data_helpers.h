// Helpers of the tests of the data side: a directory that goes away, files, errors as text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "moiety/data/batch_loader.h"
#include "moiety/data/token_file.h"
#include "moiety/data/tokenizer.h"

namespace moiety::data {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = testing::TempDir() + "moiety-data-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp " + name);
    path_ = name;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  // Writes a file (and the directories above it) and gives its path.
  std::string write(const std::string& name, const std::string& bytes) const {
    const std::string path = path_ + "/" + name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

 private:
  std::string path_;
};

inline std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// "<kind>: <text>" of the error that f throws.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return std::string(name(e.kind())) + ": " + e.what();
  }
  return "no error";
}

// A token file of the byte tokenizer with these documents.
inline std::string write_tokens(const std::string& path,
                                const std::vector<std::vector<uint32_t>>& documents) {
  TokenFileWriter writer(path, Tokenizer::load("bytes"), kDocumentsEndInEos);
  for (const auto& d : documents) writer.add(d, d.size() - 1);
  writer.finish();
  writer.publish();
  return path;
}

// One document of `n` tokens: i * factor mod 251.
inline std::vector<uint32_t> ramp(int64_t n, uint32_t factor = 1) {
  std::vector<uint32_t> ids(n);
  for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<uint32_t>(i * factor % 251);
  return ids;
}

}  // namespace moiety::data
