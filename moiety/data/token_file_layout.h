// The byte positions in a token file (docs/spec/trainer.md#token-files), shared by its reader and
// its writer.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "moiety/data/token_file.h"

namespace moiety::data::tok {

static_assert(std::endian::native == std::endian::little, "token files are read as they are");

inline constexpr char kMagic[] = "MOIETOK1";
inline constexpr uint32_t kHeaderBytes = 4096;
inline constexpr int kHeaderBytesAt = 8;
inline constexpr int kTokenBytesAt = 12;
inline constexpr int kTokensAt = 16;
inline constexpr int kDocumentsAt = 24;
inline constexpr int kTokenOffsetAt = 32;
inline constexpr int kTableOffsetAt = 40;
inline constexpr int kVocabAt = 48;
inline constexpr int kEosAt = 52;
inline constexpr int kBosAt = 56;
inline constexpr int kFlagsAt = 60;
inline constexpr int kTokenizerAt = 64;
inline constexpr int kTokenCrcAt = 96;
inline constexpr int kTableCrcAt = 100;
inline constexpr int kSourceBytesAt = 104;
inline constexpr int kHeaderCrcAt = 112;
inline constexpr int kMaskAt = 116;  // four bytes of zeros, then the fields of the loss mask
inline constexpr int kMaskOffsetAt = 120;
inline constexpr int kMaskCrcAt = 128;
inline constexpr int kMaskFieldsCrcAt = 132;  // of the bytes from kMaskAt on
inline constexpr int kPiecesOffsetAt = 136;
inline constexpr int kPiecesTableCrcAt = 144;
inline constexpr int kPiecesCrcAt = 148;  // of the two fields before it

template <class T>
T load(const unsigned char* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

template <class T>
void store(unsigned char* p, T value) {
  std::memcpy(p, &value, sizeof(T));
}

inline constexpr uint32_t kMostVocab = 1u << 24;  // the limit of model.vocab too: ids fit int32
// and the limit of documents: no sum overflows
inline constexpr uint64_t kMostTokens = uint64_t{1} << 48;

constexpr uint32_t token_bytes(uint32_t vocab) { return vocab <= 65536 ? 2 : 4; }

constexpr uint64_t pieces(const TokenFileHeader& h) {
  return (h.tokens * h.token_bytes + kPieceBytes - 1) / kPieceBytes;
}

constexpr uint64_t mask_bytes(const TokenFileHeader& h) {
  return h.flags & kHasLossMask ? (h.tokens + 7) / 8 : 0;
}

struct Layout {
  uint64_t table_offset = 0;   // of the documents
  uint64_t mask_offset = 0;    // of the loss mask, which may be empty
  uint64_t pieces_offset = 0;  // of the checksums of pieces: behind all else
  uint64_t file_bytes = 0;
};
// The layout of a file with this header, whose counts are at most kMostTokens.
constexpr Layout layout(const TokenFileHeader& h) {
  const uint64_t table = (kHeaderBytes + h.tokens * h.token_bytes + 63) / 64 * 64;
  const uint64_t mask = table + (h.documents + 1) * 8;
  const uint64_t pieces_offset = mask + mask_bytes(h);
  const uint64_t pieces_bytes = h.flags & kPiecesHaveChecksums ? pieces(h) * 4 : 0;
  return {table, mask, pieces_offset, pieces_offset + pieces_bytes};
}

inline TokenFileHeader decode_header(const unsigned char* p) {
  TokenFileHeader h;
  h.token_bytes = load<uint32_t>(p + kTokenBytesAt);
  h.tokens = load<uint64_t>(p + kTokensAt);
  h.documents = load<uint64_t>(p + kDocumentsAt);
  h.vocab = load<uint32_t>(p + kVocabAt);
  h.eos = load<uint32_t>(p + kEosAt);
  h.bos = load<uint32_t>(p + kBosAt);
  h.flags = load<uint32_t>(p + kFlagsAt);
  std::memcpy(h.tokenizer.data(), p + kTokenizerAt, h.tokenizer.size());
  h.crc32c = load<uint32_t>(p + kTokenCrcAt);
  h.table_crc32c = load<uint32_t>(p + kTableCrcAt);
  h.source_bytes = load<uint64_t>(p + kSourceBytesAt);
  h.mask_crc32c = load<uint32_t>(p + kMaskCrcAt);
  return h;
}

}  // namespace moiety::data::tok
