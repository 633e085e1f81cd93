// Token files, `.tok` (docs/spec/trainer.md#token-files): a header of 4096 bytes, the token ids in
// 2 or 4 bytes each, a table of document starts, a loss mask if not every token is a target, and
// checksums of pieces of the tokens. Little endian.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moiety/data/sha256.h"
#include "moiety/data/spill.h"

namespace moiety::data {

class Tokenizer;

inline constexpr uint32_t kNoToken = 0xffffffff;  // the eos or bos of a tokenizer that has none
inline constexpr uint32_t kDocumentsEndInEos = 1;
inline constexpr uint32_t kDocumentsStartWithBos = 2;
inline constexpr uint32_t kHasLossMask = 4;
inline constexpr uint32_t kPiecesHaveChecksums = 8;  // in every file that this version writes
inline constexpr uint64_t kPieceBytes = uint64_t{16} << 20;  // of tokens with one checksum

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
  // Bytes of the text that the tokens were made from; with a loss mask, of the targets' text alone.
  uint64_t source_bytes = 0;
  uint32_t mask_crc32c = 0;
};

// A token file, read where it lies, as far as it is asked for: a mapping would end the process where a
// file becomes shorter. Every fault of the file is a DataError with path and values.
class TokenFile {
 public:
  // Opens a file and checks its size, header, tables and loss mask, but not the tokens.
  static std::shared_ptr<const TokenFile> open(const std::string& path);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  const std::string& path() const { return path_; }
  const TokenFileHeader& header() const { return header_; }
  uint64_t bytes() const { return bytes_; }

  // Reads tokens [begin, begin + out.size()), which must lie in the file. An id >= vocab is a
  // DataError with its position and value, and so is a file that has changed its size since it was
  // opened.
  void read(uint64_t begin, std::span<int32_t> out) const;
  // Gives the same tokens' positions in their documents. In a document that has started before
  // `begin` they count from `begin`: 0 where a document (or the range) starts.
  void positions(uint64_t begin, std::span<int32_t> out) const;
  // Tells which of the same tokens are targets: 1, else 0. Without a loss mask all are.
  void targets(uint64_t begin, std::span<uint8_t> out) const;
  bool has_mask() const { return header_.flags & kHasLossMask; }
  // The targets of the whole file, and those among tokens [begin, begin + count).
  uint64_t target_count() const { return target_count_; }
  uint64_t count_targets(uint64_t begin, uint64_t count) const;
  struct Document {
    uint64_t begin = 0, end = 0;  // its tokens are [begin, end)
  };
  // Document d < header().documents.
  Document document(uint64_t d) const;

  // The tokens are checked in pieces of kPieceBytes, of which the last may be shorter.
  uint64_t pieces() const;
  struct PieceCheck {
    uint32_t crc32c = 0;
    std::string fault;  // the sentence about a damaged piece, with path and place; empty: none
  };
  // Reads a piece from the disk, and compares it with its checksum, if the file has one for it, and
  // its ids with vocab. DataError if it cannot be read.
  PieceCheck check_piece(uint64_t piece) const;
  // Compares the checksums of all pieces, in their order, with that of the whole. DataError.
  void check_whole(std::span<const uint32_t> crcs) const;
  // Checks every byte of the file. DataError naming the first damaged piece.
  void verify() const;

 private:
  TokenFile() = default;
  class Starts;
  // `head` are the bytes of the header.
  void check_header(const unsigned char* head);
  void check_header_rest(const unsigned char* head) const;
  void check_table() const;
  void check_mask(const unsigned char* head);
  void check_piece_table(const unsigned char* head);
  std::string id_fault(std::span<const unsigned char> bytes, uint64_t first) const;
  void read_bytes(uint64_t offset, std::span<unsigned char> out) const;
  // Reads these bytes and shows them, in parts.
  void for_bytes(uint64_t offset, uint64_t bytes,
                 const std::function<void(std::span<const unsigned char>)>& use) const;
  void check_size() const;
  uint64_t document_start(uint64_t d) const;

  std::string path_;
  TokenFileHeader header_;
  int fd_ = -1;
  uint64_t bytes_ = 0;
  std::vector<uint32_t> piece_crcs_;
  uint64_t table_offset_ = 0, mask_offset_ = 0, pieces_offset_ = 0;
  uint64_t target_count_ = 0;
};

// Writes a token file under a temporary name beside `path`, which appears (or is replaced) only in
// publish(). Memory does not grow with the file. A failure of the disk is an IoError. A writer that is
// destroyed before publish() removes its temporary file.
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& path, const Tokenizer& tokenizer, uint32_t flags);
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  // Adds one document, its eos and bos included, made from `source_bytes` bytes of text. With
  // kHasLossMask, and only then, `targets` tells of every id whether it is one: 1 or 0.
  void add(std::span<const uint32_t> ids, uint64_t source_bytes,
           std::span<const uint8_t> targets = {});
  // Completes the temporary file and brings it to the disk.
  void finish();
  // Gives the finished file its name.
  void publish();

  const std::string& path() const { return path_; }
  const TokenFileHeader& header() const { return header_; }
  uint64_t target_count() const { return target_count_; }

 private:
  void write(const void* data, size_t bytes);
  void flush_tokens();
  void add_to_pieces(const unsigned char* data, size_t bytes);

  std::string path_, temporary_;
  TokenFileHeader header_;
  int fd_ = -1;
  std::vector<unsigned char> pending_;  // encoded tokens not yet written
  Spill starts_, mask_;
  unsigned char mask_byte_ = 0;  // the last one of the mask, if it is not full
  uint64_t target_count_ = 0;
  std::vector<uint32_t> piece_crcs_;  // the last one may grow
  uint64_t last_piece_bytes_ = kPieceBytes;
};

}  // namespace moiety::data
