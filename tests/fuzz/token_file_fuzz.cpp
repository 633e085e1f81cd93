#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "apps/moiety/exit_code.h"
#include "moiety/base/crc32c.h"
#include "moiety/data/token_file.h"
#include "moiety/data/token_file_layout.h"
#include "tests/fuzz/targets.h"

namespace moiety::fuzz {
namespace {

using namespace data;

void read_all(const TokenFile& file) {
  const TokenFileHeader& header = file.header();
  std::vector<int32_t> tokens(header.tokens), positions(header.tokens);
  file.read(0, tokens);
  file.positions(0, positions);
  for (size_t i = 0; i < tokens.size(); ++i) {
    require(tokens[i] >= 0 && static_cast<uint32_t>(tokens[i]) < header.vocab,
            "ids are below the vocabulary");
    require(positions[i] == 0 || positions[i] == positions[i - 1] + 1, "positions count");
  }
  std::vector<uint8_t> targets(header.tokens);
  file.targets(0, targets);
  require(file.count_targets(0, header.tokens) == file.target_count(), "targets are counted");
  file.verify();
}

void try_open(std::string_view bytes) {
  const MemoryFile memory(bytes);
  try {
    read_all(*TokenFile::open(memory.path()));
  } catch (const DataError&) {
  }
}

void seal_pieces(unsigned char* p, const TokenFileHeader& header) {
  const tok::Layout layout = tok::layout(header);
  const uint64_t bytes = header.tokens * header.token_bytes, pieces = tok::pieces(header);
  for (uint64_t i = 0; i < pieces; ++i) {
    const uint64_t begin = i * kPieceBytes;
    tok::store(p + layout.pieces_offset + i * 4,
               crc32c(p + tok::kHeaderBytes + begin, std::min(kPieceBytes, bytes - begin)));
  }
  tok::store(p + tok::kPiecesTableCrcAt, crc32c(p + layout.pieces_offset, pieces * 4));
  tok::store(p + tok::kPiecesCrcAt,
             crc32c(p + tok::kPiecesOffsetAt, tok::kPiecesCrcAt - tok::kPiecesOffsetAt));
}

// The same with checksums that are right, so that the checks behind them are reached.
std::string with_checksums(std::string_view bytes) {
  std::string out(bytes);
  out.resize(std::max<size_t>(out.size(), tok::kHeaderBytes));
  auto* p = reinterpret_cast<unsigned char*>(out.data());
  const TokenFileHeader header = tok::decode_header(p);
  if (header.tokens <= tok::kMostTokens && header.documents <= tok::kMostTokens &&
      header.token_bytes <= 4) {
    const tok::Layout layout = tok::layout(header);
    if (layout.file_bytes <= out.size() + 64) {
      out.resize(layout.file_bytes);
      p = reinterpret_cast<unsigned char*>(out.data());
      tok::store(p + tok::kTokenCrcAt,
                 crc32c(p + tok::kHeaderBytes, header.tokens * header.token_bytes));
      tok::store(p + tok::kTableCrcAt, crc32c(p + layout.table_offset, (header.documents + 1) * 8));
      if (header.flags & kHasLossMask) {
        tok::store(p + tok::kMaskCrcAt, crc32c(p + layout.mask_offset, tok::mask_bytes(header)));
        tok::store(p + tok::kMaskFieldsCrcAt,
                   crc32c(p + tok::kMaskAt, tok::kMaskFieldsCrcAt - tok::kMaskAt));
      }
      if (header.flags & kPiecesHaveChecksums) seal_pieces(p, header);
    }
  }
  tok::store(p + tok::kHeaderCrcAt, crc32c(p, tok::kHeaderCrcAt));
  return out;
}

}  // namespace

void token_file(std::string_view file) {
  try_open(file);
  try_open(with_checksums(file));
}

}  // namespace moiety::fuzz
