// Helpers of the tests of the data side: a directory that goes away, files, errors as text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "moiety/data/batch_loader.h"
#include "moiety/data/token_file.h"
#include "moiety/data/tokenizer.h"
#include "tests/support/files.h"

namespace moiety::data {

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
