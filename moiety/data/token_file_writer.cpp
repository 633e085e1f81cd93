#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>
#include <utility>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/data/token_file.h"
#include "moiety/data/token_file_layout.h"
#include "moiety/data/tokenizer.h"

namespace moiety::data {
namespace {

constexpr size_t kFlushBytes = 1 << 20;

using HeaderBytes = std::array<unsigned char, tok::kPiecesCrcAt + 4>;

HeaderBytes encode(const TokenFileHeader& header, uint32_t pieces_crc32c) {
  HeaderBytes h{};
  std::memcpy(h.data(), tok::kMagic, 8);
  tok::store(&h[tok::kHeaderBytesAt], tok::kHeaderBytes);
  tok::store(&h[tok::kTokenBytesAt], header.token_bytes);
  tok::store(&h[tok::kTokensAt], header.tokens);
  tok::store(&h[tok::kDocumentsAt], header.documents);
  tok::store(&h[tok::kTokenOffsetAt], uint64_t{tok::kHeaderBytes});
  tok::store(&h[tok::kTableOffsetAt], tok::layout(header).table_offset);
  tok::store(&h[tok::kVocabAt], header.vocab);
  tok::store(&h[tok::kEosAt], header.eos);
  tok::store(&h[tok::kBosAt], header.bos);
  tok::store(&h[tok::kFlagsAt], header.flags);
  std::memcpy(&h[tok::kTokenizerAt], header.tokenizer.data(), header.tokenizer.size());
  tok::store(&h[tok::kTokenCrcAt], header.crc32c);
  tok::store(&h[tok::kTableCrcAt], header.table_crc32c);
  tok::store(&h[tok::kSourceBytesAt], header.source_bytes);
  tok::store(&h[tok::kHeaderCrcAt], crc32c(h.data(), tok::kHeaderCrcAt));
  if (header.flags & kHasLossMask) {
    tok::store(&h[tok::kMaskOffsetAt], tok::layout(header).mask_offset);
    tok::store(&h[tok::kMaskCrcAt], header.mask_crc32c);
    tok::store(&h[tok::kMaskFieldsCrcAt],
               crc32c(&h[tok::kMaskAt], tok::kMaskFieldsCrcAt - tok::kMaskAt));
  }
  tok::store(&h[tok::kPiecesOffsetAt], tok::layout(header).pieces_offset);
  tok::store(&h[tok::kPiecesTableCrcAt], pieces_crc32c);
  tok::store(&h[tok::kPiecesCrcAt],
             crc32c(&h[tok::kPiecesOffsetAt], tok::kPiecesCrcAt - tok::kPiecesOffsetAt));
  return h;
}

}  // namespace

TokenFileWriter::TokenFileWriter(const std::string& path, const Tokenizer& tokenizer,
                                 uint32_t flags)
    : path_(path),
      temporary_(text("{}.tmp.{}", path, ::getpid())),
      starts_(temporary_ + ".starts"),
      mask_(temporary_ + ".mask") {
  header_.token_bytes = tok::token_bytes(tokenizer.vocab());
  header_.vocab = tokenizer.vocab();
  header_.eos = tokenizer.eos();
  header_.bos = tokenizer.bos();
  header_.flags = flags | kPiecesHaveChecksums;
  header_.tokenizer = tokenizer.identity();
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) throw IoError("{}: cannot create: {}", temporary_, std::strerror(errno));
  // The header is known last; until then zeros stand in its place, which nobody takes for a header.
  pending_.resize(tok::kHeaderBytes);
  write(pending_.data(), pending_.size());
  pending_.clear();
}

TokenFileWriter::~TokenFileWriter() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void TokenFileWriter::add(std::span<const uint32_t> ids, uint64_t source_bytes,
                          std::span<const uint8_t> targets) {
  const bool has_mask = header_.flags & kHasLossMask;
  MOIETY_CHECK(targets.size() == (has_mask ? ids.size() : 0), "{}: {} targets of {} ids", path_,
               targets.size(), ids.size());
  starts_.append(&header_.tokens, 8);
  for (uint64_t t = header_.tokens; const uint8_t is_target : targets) {
    mask_byte_ |= static_cast<unsigned char>((is_target != 0) << t % 8);
    target_count_ += is_target != 0;
    if (++t % 8 == 0) {
      mask_.append(&mask_byte_, 1);
      mask_byte_ = 0;
    }
  }
  if (!has_mask) target_count_ += ids.size();
  header_.tokens += ids.size();
  header_.documents += 1;
  header_.source_bytes += source_bytes;
  const size_t begin = pending_.size();
  pending_.resize(begin + ids.size() * header_.token_bytes);
  unsigned char* p = pending_.data() + begin;
  for (const uint32_t id : ids) {
    MOIETY_CHECK(id < header_.vocab, "{}: id {}, the vocabulary has {}", path_, id, header_.vocab);
    if (header_.token_bytes == 2) {
      tok::store(p, static_cast<uint16_t>(id));
    } else {
      tok::store(p, id);
    }
    p += header_.token_bytes;
  }
  if (pending_.size() >= kFlushBytes) flush_tokens();
}

void TokenFileWriter::flush_tokens() {
  add_to_pieces(pending_.data(), pending_.size());
  write(pending_.data(), pending_.size());
  pending_.clear();
}

void TokenFileWriter::add_to_pieces(const unsigned char* data, size_t bytes) {
  header_.crc32c = crc32c(data, bytes, header_.crc32c);
  while (bytes > 0) {
    if (last_piece_bytes_ == kPieceBytes) {
      piece_crcs_.push_back(0);
      last_piece_bytes_ = 0;
    }
    const size_t n = std::min<size_t>(bytes, kPieceBytes - last_piece_bytes_);
    piece_crcs_.back() = crc32c(data, n, piece_crcs_.back());
    last_piece_bytes_ += n;
    data += n;
    bytes -= n;
  }
}

void TokenFileWriter::finish() {
  flush_tokens();
  const tok::Layout layout = tok::layout(header_);
  const std::array<unsigned char, 64> zeros{};
  write(zeros.data(),
        layout.table_offset - tok::kHeaderBytes - header_.tokens * header_.token_bytes);
  const auto take = [this](const void* data, size_t bytes) { write(data, bytes); };
  starts_.append(&header_.tokens, 8);
  starts_.read(take);
  header_.table_crc32c = starts_.crc32c();
  if ((header_.flags & kHasLossMask) && header_.tokens % 8 != 0) mask_.append(&mask_byte_, 1);
  mask_.read(take);
  header_.mask_crc32c = mask_.crc32c();

  const size_t pieces_bytes = piece_crcs_.size() * 4;
  write(piece_crcs_.data(), pieces_bytes);

  const HeaderBytes h = encode(header_, crc32c(piece_crcs_.data(), pieces_bytes));
  if (::lseek(fd_, 0, SEEK_SET) != 0) {
    throw IoError("{}: cannot seek: {}", temporary_, std::strerror(errno));
  }
  write(h.data(), h.size());

  if (::fsync(fd_) != 0) {
    throw IoError("{}: cannot bring to disk: {}", temporary_, std::strerror(errno));
  }
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) throw IoError("{}: cannot close: {}", temporary_, std::strerror(errno));
}

void TokenFileWriter::publish() {
  MOIETY_CHECK(fd_ < 0, "{}: published before it was finished", path_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    throw IoError("{}: cannot rename {}: {}", path_, temporary_, std::strerror(errno));
  }
  temporary_.clear();
  // The new name is on the disk once the directory is.
  const std::string directory = std::filesystem::path(path_).parent_path().string();
  const int fd = ::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_CLOEXEC);
  const bool synced = fd >= 0 && ::fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!synced) throw IoError("{}: cannot sync its directory: {}", path_, std::strerror(error));
}

void TokenFileWriter::write(const void* data, size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, p, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw IoError("{}: cannot write: {}", temporary_, std::strerror(errno));
    p += n;
    bytes -= static_cast<size_t>(n);
  }
}

}  // namespace moiety::data
