// Token files, `.tok` (docs/spec/trainer.md#token-files): a header of 4096 bytes, the token ids in
// 2 or 4 bytes each, and a table of document starts. Little endian.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moiety/data/sha256.h"

namespace moiety::data {

class Tokenizer;

inline constexpr uint32_t kNoToken = 0xffffffff;  // the eos or bos of a tokenizer that has none
inline constexpr uint32_t kDocumentsEndInEos = 1;
inline constexpr uint32_t kDocumentsStartWithBos = 2;

struct TokenFileHeader {
  uint32_t token_bytes = 2;  // 2 if vocab <= 65536, else 4
  uint64_t tokens = 0;
  uint64_t documents = 0;
  uint32_t vocab = 0;
  uint32_t eos = kNoToken;
  uint32_t bos = kNoToken;
  uint32_t flags = 0;
  Sha256 tokenizer{};
  uint32_t crc32c = 0;  // checksum of the tokens
  uint32_t table_crc32c = 0;
  uint64_t source_bytes = 0;  // bytes of the text that the tokens were made from
};

// A token file, mapped read-only. Every fault of the file is a DataError with path and values.
class TokenFile {
 public:
  // Opens a file and checks its size, header and table, and, if it has at most 256 MiB, the tokens
  // too (as verify() does).
  static std::shared_ptr<const TokenFile> open(const std::string& path);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  const std::string& path() const { return path_; }
  const TokenFileHeader& header() const { return header_; }

  // Reads tokens [begin, begin + out.size()), which must lie in the file. An id >= vocab is a
  // DataError with its position and value, and so is a file that has changed its size since it was
  // opened.
  void read(uint64_t begin, std::span<int32_t> out) const;
  // Gives the same tokens' positions in their documents. In a document that has started before
  // `begin` they count from `begin`: 0 where a document (or the range) starts.
  void positions(uint64_t begin, std::span<int32_t> out) const;
  // Checks the checksum of all tokens and that every id is below vocab.
  void verify() const;

 private:
  TokenFile() = default;
  void check_header();
  void check_table() const;
  void check_size() const;
  uint32_t token(uint64_t i) const;
  uint64_t document_start(uint64_t d) const;

  std::string path_;
  TokenFileHeader header_;
  int fd_ = -1;
  const unsigned char* data_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t table_offset_ = 0;
};

// Writes a token file under a temporary name beside `path`, which appears (or is replaced) only in
// publish(). A failure of the disk is an IoError. A writer that is destroyed before publish()
// removes its temporary file.
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& path, const Tokenizer& tokenizer, uint32_t flags);
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  // Adds one document, its eos and bos included, made from `source_bytes` bytes of text.
  void add(std::span<const uint32_t> ids, uint64_t source_bytes);
  // Completes the temporary file and brings it to the disk.
  void finish();
  // Gives the finished file its name.
  void publish();

  const std::string& path() const { return path_; }
  const TokenFileHeader& header() const { return header_; }

 private:
  void write(const void* data, size_t bytes);
  void flush_tokens();

  std::string path_, temporary_;
  TokenFileHeader header_;
  int fd_ = -1;
  std::vector<unsigned char> pending_;  // encoded tokens not yet written
  std::vector<uint64_t> starts_;
};

}  // namespace moiety::data
