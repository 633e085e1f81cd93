// Readers of files that are not trusted, each called with any bytes. A target returns whatever the
// bytes are; a crash, a sanitizer's finding, an exception that the reader's contract does not name,
// or a broken promise (see require) is a finding. libFuzzer drives them (tools/dev fuzz), and a
// seeded loop in the tests.
#pragma once

#include <span>
#include <string_view>

namespace moiety::fuzz {

struct Target {
  const char* name;  // also of its folder of corpus/
  void (*run)(std::string_view input);
};

// safetensors_fuzz.cpp: a file, opened, all of it read, and as the only file of a checkpoint.
void safetensors(std::string_view file);
// manifest_fuzz.cpp: manifest.json with a fitting COMMIT; and COMMIT, a line, with a manifest
// behind it.
void manifest(std::string_view json);
void commit(std::string_view commit_and_manifest);
// toml_config_fuzz.cpp: a configuration; and config and state as a checkpoint keeps them.
void toml_config(std::string_view toml);
void checkpoint_state(std::string_view json);
// token_file_fuzz.cpp: a .tok file, as it is and with its checksums put right.
void token_file(std::string_view file);
// jsonl_fuzz.cpp: documents for `moiety prepare`, plain or gzip.
void jsonl(std::string_view file);
// tokenizer_json_fuzz.cpp: a tokenizer.json, and texts encoded and decoded with it.
void tokenizer_json(std::string_view json);
// hf_config_fuzz.cpp: config.json of a Hugging Face folder.
void hf_config(std::string_view json);
// npy_fuzz.cpp: an array of NumPy, and the description of a quantized tensor.
void npy(std::string_view file);
void quantized_json(std::string_view json);

inline constexpr Target kTargets[] = {
    {"safetensors", safetensors},
    {"manifest", manifest},
    {"commit", commit},
    {"toml_config", toml_config},
    {"token_file", token_file},
    {"jsonl", jsonl},
    {"checkpoint_state", checkpoint_state},
    {"tokenizer_json", tokenizer_json},
    {"hf_config", hf_config},
    {"npy", npy},
    {"quantized_json", quantized_json},
};

// A promise of the reader. Throws std::logic_error, which no target catches, if it does not hold.
void require(bool holds, const char* promise);

// The bytes as a file in memory, by a path that can be opened.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  const char* path() const { return path_; }

 private:
  int fd_;
  char path_[64];
};

}  // namespace moiety::fuzz
