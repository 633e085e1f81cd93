// The checksums of a token file's pieces.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unistd.h>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/data/token_file.h"
#include "moiety/data/token_file_layout.h"

namespace moiety::data {
namespace {

constexpr uint64_t kReadTogether = 1 << 20;  // bytes

}  // namespace

void TokenFile::check_piece_table(const unsigned char* head) {
  const uint64_t offset = tok::load<uint64_t>(head + tok::kPiecesOffsetAt);
  if (offset != pieces_offset_) {
    throw DataError("{}: the header contradicts itself: checksums of pieces at {}, expected at {}",
                    path_, offset, pieces_offset_);
  }
  const uint32_t expected = tok::load<uint32_t>(head + tok::kPiecesTableCrcAt);
  std::vector<unsigned char> table(pieces() * 4);
  read_bytes(pieces_offset_, table);
  const uint32_t crc = crc32c(table.data(), table.size());
  if (crc != expected) {
    throw DataError(
        "{}: the checksums of pieces are damaged: crc32c {:08x}, the header says {:08x}", path_,
        crc, expected);
  }
  piece_crcs_.resize(pieces());
  if (!table.empty()) std::memcpy(piece_crcs_.data(), table.data(), table.size());
  check_whole(piece_crcs_);
}

uint64_t TokenFile::pieces() const { return tok::pieces(header_); }

void TokenFile::read_bytes(uint64_t offset, std::span<unsigned char> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      throw DataError("{}: cannot be read at byte {}: {}", path_, offset, std::strerror(errno));
    }
    if (n == 0) {
      check_size();
      throw DataError("{}: cannot be read at byte {}: it became shorter", path_, offset);
    }
    offset += static_cast<uint64_t>(n);
    out = out.subspan(static_cast<size_t>(n));
  }
}

void TokenFile::for_bytes(uint64_t offset, uint64_t bytes,
                          const std::function<void(std::span<const unsigned char>)>& use) const {
  std::vector<unsigned char> part;
  for (const uint64_t end = offset + bytes; offset < end; offset += part.size()) {
    part.resize(std::min(kReadTogether, end - offset));
    read_bytes(offset, part);
    use(part);
  }
}

TokenFile::PieceCheck TokenFile::check_piece(uint64_t piece) const {
  MOIETY_CHECK(piece < pieces(), "{}: piece {} of {}", path_, piece, pieces());
  check_size();
  const uint64_t bytes = header_.tokens * header_.token_bytes;
  const uint64_t begin = piece * kPieceBytes, end = std::min(begin + kPieceBytes, bytes);
  PieceCheck check;
  uint64_t at = begin;
  for_bytes(tok::kHeaderBytes + begin, end - begin, [&](std::span<const unsigned char> part) {
    check.crc32c = crc32c(part.data(), part.size(), check.crc32c);
    if (check.fault.empty()) check.fault = id_fault(part, at / header_.token_bytes);
    at += part.size();
  });
  if (!(header_.flags & kPiecesHaveChecksums)) return check;
  const uint32_t expected = piece_crcs_[piece];
  if (check.crc32c != expected) {
    check.fault =
        text("{}: the tokens are damaged: bytes [{}, {}) have crc32c {:08x}, not {:08x}", path_,
             tok::kHeaderBytes + begin, tok::kHeaderBytes + end, check.crc32c, expected);
  }
  return check;
}

// The sentence about the first id in `bytes` that is not in the vocabulary.
std::string TokenFile::id_fault(std::span<const unsigned char> bytes, uint64_t first) const {
  const auto fault = [&]<class Id>(Id) {
    uint32_t largest = 0;  // most often there is none, which a loop without branches finds out
    for (size_t i = 0; i < bytes.size(); i += sizeof(Id)) {
      largest = std::max<uint32_t>(largest, tok::load<Id>(&bytes[i]));
    }
    if (largest < header_.vocab) return std::string();
    size_t i = 0;
    while (tok::load<Id>(&bytes[i]) < header_.vocab) i += sizeof(Id);
    return text("{}: token {} is {}, the vocabulary has {}", path_, first + i / sizeof(Id),
                tok::load<Id>(&bytes[i]), header_.vocab);
  };
  return header_.token_bytes == 2 ? fault(uint16_t{}) : fault(uint32_t{});
}

void TokenFile::check_whole(std::span<const uint32_t> crcs) const {
  MOIETY_CHECK(crcs.size() == pieces(), "{}: {} checksums of {} pieces", path_, crcs.size(),
               pieces());
  uint32_t crc = 0;
  uint64_t left = header_.tokens * header_.token_bytes;
  for (const uint32_t piece : crcs) {
    const uint64_t bytes = std::min(kPieceBytes, left);
    crc = crc32c_combine(crc, piece, bytes);
    left -= bytes;
  }
  if (crc == header_.crc32c) return;
  throw DataError("{}: the tokens are damaged: crc32c {:08x}, the header says {:08x}", path_, crc,
                  header_.crc32c);
}

void TokenFile::verify() const {
  std::vector<uint32_t> crcs;
  std::string first;
  int64_t more = 0;
  for (uint64_t p = 0; p < pieces(); ++p) {
    const PieceCheck check = check_piece(p);
    crcs.push_back(check.crc32c);
    if (check.fault.empty()) continue;
    if (first.empty()) {
      first = check.fault;
    } else {
      ++more;
    }
  }
  if (more > 0) first += text("; so are {} more of {} pieces", more, pieces());
  if (!first.empty()) throw DataError("{}", first);
  check_whole(crcs);
  const uint64_t begin = tok::kHeaderBytes + header_.tokens * header_.token_bytes;
  std::vector<unsigned char> gap(table_offset_ - begin);
  read_bytes(begin, gap);
  const auto odd = std::find_if(gap.begin(), gap.end(), [](unsigned char b) { return b != 0; });
  if (odd != gap.end()) {
    throw DataError("{}: byte {} between tokens and table is {}, not 0", path_,
                    begin + static_cast<uint64_t>(odd - gap.begin()), *odd);
  }
}

}  // namespace moiety::data
