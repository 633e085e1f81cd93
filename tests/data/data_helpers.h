// Helpers of the tests of the data side: a directory that goes away, files, errors as text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/data/batch_loader.h"
#include "moiety/data/token_file.h"
#include "moiety/data/token_file_layout.h"
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

// The same with a loss mask: of every document the ids, and which of them are targets.
inline std::string write_masked(
    const std::string& path,
    const std::vector<std::pair<std::vector<uint32_t>, std::vector<uint8_t>>>& documents) {
  TokenFileWriter writer(path, Tokenizer::load("bytes"), kDocumentsEndInEos | kHasLossMask);
  for (const auto& [ids, targets] : documents) writer.add(ids, ids.size() - 1, targets);
  writer.finish();
  writer.publish();
  return path;
}

// A sample as it is read.
struct ReadSample {
  explicit ReadSample(int64_t seq_len) : token(seq_len), target(seq_len), position(seq_len) {}
  void read(const SampleSource& source, SampleRef sample, bool with_positions = false) {
    source.read(sample,
                {token, target, with_positions ? std::span(position) : std::span<int32_t>()});
  }
  std::vector<int32_t> token, target, position;
};

// One document of `n` tokens: i * factor mod 251.
inline std::vector<uint32_t> ramp(int64_t n, uint32_t factor = 1) {
  std::vector<uint32_t> ids(n);
  for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<uint32_t>(i * factor % 251);
  return ids;
}

// Changes the lowest bit of a byte of a file.
inline void flip_bit(const std::string& path, uint64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

// A token file of `tokens` zeros of 2 bytes, a hole on the disk, with or without checksums of
// pieces. So a file of any size costs no time.
inline std::string write_hole(const std::string& path, uint64_t tokens, bool with_pieces = true) {
  const std::string small = path + ".small";
  write_tokens(small, {{0}});
  std::string head = read_all(small).substr(0, tok::kHeaderBytes);
  std::filesystem::remove(small);
  auto* h = reinterpret_cast<unsigned char*>(head.data());
  TokenFileHeader header = tok::decode_header(h);
  header.tokens = tokens;
  header.flags = kDocumentsEndInEos | (with_pieces ? kPiecesHaveChecksums : 0);
  const tok::Layout layout = tok::layout(header);
  const std::string zeros(kPieceBytes, '\0');
  std::vector<uint32_t> crcs;
  uint32_t crc = 0;
  for (uint64_t left = tokens * 2; left > 0; left -= std::min(left, kPieceBytes)) {
    const uint64_t bytes = std::min(left, kPieceBytes);
    crcs.push_back(bytes == kPieceBytes && !crcs.empty() ? crcs[0] : crc32c(zeros.data(), bytes));
    crc = crc32c_combine(crc, crcs.back(), bytes);
  }
  const uint64_t starts[] = {0, tokens};
  tok::store(h + tok::kTokensAt, tokens);
  tok::store(h + tok::kTableOffsetAt, layout.table_offset);
  tok::store(h + tok::kFlagsAt, header.flags);
  tok::store(h + tok::kTokenCrcAt, crc);
  tok::store(h + tok::kTableCrcAt, crc32c(starts, sizeof(starts)));
  tok::store(h + tok::kHeaderCrcAt, crc32c(h, tok::kHeaderCrcAt));
  tok::store(h + tok::kPiecesOffsetAt, with_pieces ? layout.pieces_offset : 0);
  tok::store(h + tok::kPiecesTableCrcAt, with_pieces ? crc32c(crcs.data(), crcs.size() * 4) : 0u);
  tok::store(h + tok::kPiecesCrcAt, with_pieces ? crc32c(h + tok::kPiecesOffsetAt, 12) : 0u);
  std::ofstream(path, std::ios::binary) << head;
  std::filesystem::resize_file(path, layout.file_bytes);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(layout.table_offset));
  file.write(reinterpret_cast<const char*>(starts), sizeof(starts));
  if (with_pieces) {
    file.write(reinterpret_cast<const char*>(crcs.data()),
               static_cast<std::streamsize>(crcs.size() * 4));
  }
  return path;
}

}  // namespace moiety::data
