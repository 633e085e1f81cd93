#include "moiety/data/token_file.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <numeric>
#include <sys/stat.h>
#include <unistd.h>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/data/token_file_layout.h"

namespace moiety::data {
namespace {

constexpr uint32_t kKnownFlags =
    kDocumentsEndInEos | kDocumentsStartWithBos | kHasLossMask | kPiecesHaveChecksums;

constexpr uint64_t kCountedTogether = 1 << 16;  // tokens
constexpr uint64_t kStartsTogether = 512;

uint64_t file_size(int fd, const std::string& path) {
  struct stat info;
  if (::fstat(fd, &info) != 0) throw DataError("{}: {}", path, std::strerror(errno));
  if (!S_ISREG(info.st_mode)) throw DataError("{}: not a file", path);
  return static_cast<uint64_t>(info.st_size);
}

}  // namespace

std::shared_ptr<const TokenFile> TokenFile::open(const std::string& path) {
  const std::shared_ptr<TokenFile> file(new TokenFile);
  file->path_ = path;
  file->fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file->fd_ < 0) throw DataError("{}: cannot open: {}", path, std::strerror(errno));
  file->bytes_ = file_size(file->fd_, path);
  if (file->bytes_ < tok::kHeaderBytes) {
    throw DataError("{}: not a token file: {} bytes, less than its header of {}", path,
                    file->bytes_, tok::kHeaderBytes);
  }
  std::vector<unsigned char> head(tok::kHeaderBytes);
  file->read_bytes(0, head);
  file->check_header(head.data());
  file->check_table();
  file->check_mask(head.data());
  if (file->header_.flags & kPiecesHaveChecksums) file->check_piece_table(head.data());
  return file;
}

TokenFile::~TokenFile() {
  if (fd_ >= 0) ::close(fd_);
}

void TokenFile::check_header(const unsigned char* p) {
  if (std::memcmp(p, tok::kMagic, 8) != 0) {
    throw DataError(
        "{}: not a token file: it does not begin with {} (make one with: moiety "
        "prepare)",
        path_, std::string_view(tok::kMagic, 8));
  }
  const uint32_t header_bytes = tok::load<uint32_t>(p + tok::kHeaderBytesAt);
  if (header_bytes != tok::kHeaderBytes) {
    throw DataError("{}: its header has {} bytes, this version reads {}", path_, header_bytes,
                    tok::kHeaderBytes);
  }
  const uint32_t crc = tok::load<uint32_t>(p + tok::kHeaderCrcAt);
  const uint32_t expected = crc32c(p, tok::kHeaderCrcAt);
  if (crc != expected) {
    throw DataError("{}: the header is damaged: crc32c {:08x}, of its bytes {:08x}", path_, crc,
                    expected);
  }
  header_ = tok::decode_header(p);
  if (header_.flags & ~kKnownFlags) {
    throw DataError("{}: its header has flags {}, of which this version knows {}", path_,
                    header_.flags, kKnownFlags);
  }
  check_header_rest(p);

  const tok::Layout layout = tok::layout(header_);
  table_offset_ = layout.table_offset;
  mask_offset_ = layout.mask_offset;
  pieces_offset_ = layout.pieces_offset;
  const uint64_t token_offset = tok::load<uint64_t>(p + tok::kTokenOffsetAt);
  const uint64_t table_offset = tok::load<uint64_t>(p + tok::kTableOffsetAt);
  if (header_.vocab == 0 || header_.vocab > tok::kMostVocab ||
      header_.token_bytes != tok::token_bytes(header_.vocab) || header_.tokens > tok::kMostTokens ||
      header_.documents > tok::kMostTokens || token_offset != tok::kHeaderBytes ||
      table_offset != layout.table_offset) {
    throw DataError(
        "{}: the header contradicts itself: vocabulary {}, {} bytes a token, {} tokens at {}, "
        "table of {} documents at {}",
        path_, header_.vocab, header_.token_bytes, header_.tokens, token_offset, header_.documents,
        table_offset);
  }
  if (bytes_ != layout.file_bytes) {
    throw DataError("{}: the file has {} bytes, its header says {}: it was {}", path_, bytes_,
                    layout.file_bytes, bytes_ < layout.file_bytes ? "cut off" : "added to");
  }
}

// The bytes behind the first checksum: the places of loss mask and piece checksums, else zeros.
void TokenFile::check_header_rest(const unsigned char* p) const {
  const bool has_pieces = header_.flags & kPiecesHaveChecksums;
  const auto is_free = [&](int64_t at) {
    const bool is_mask = at >= tok::kMaskOffsetAt && at < tok::kMaskFieldsCrcAt + 4;
    const bool is_pieces = at >= tok::kPiecesOffsetAt && at < tok::kPiecesCrcAt + 4;
    return !(has_mask() && is_mask) && !(has_pieces && is_pieces);
  };
  const auto check_crc = [&](int64_t from, int64_t crc_at) {
    const uint32_t crc = tok::load<uint32_t>(p + crc_at);
    const uint32_t expected = crc32c(p + from, static_cast<size_t>(crc_at - from));
    if (crc == expected) return;
    throw DataError("{}: the header is damaged: crc32c {:08x} at byte {}, of its bytes {:08x}",
                    path_, crc, crc_at, expected);
  };
  for (int64_t at = tok::kHeaderCrcAt + 4; at < tok::kHeaderBytes; ++at) {
    if (p[at] == 0 || !is_free(at)) continue;
    throw DataError("{}: the header is damaged: byte {} is {}, not 0", path_, at, p[at]);
  }
  if (has_mask()) check_crc(tok::kMaskAt, tok::kMaskFieldsCrcAt);
  if (has_pieces) check_crc(tok::kPiecesOffsetAt, tok::kPiecesCrcAt);
}

// Starts of documents that are asked for in ascending order.
class TokenFile::Starts {
 public:
  explicit Starts(const TokenFile& file) : file_(file) {}
  uint64_t operator[](uint64_t d) {
    if (d < first_ || d >= first_ + part_.size() / 8) {
      first_ = d;
      part_.resize(8 * std::min(kStartsTogether, file_.header_.documents + 1 - d));
      file_.read_bytes(file_.table_offset_ + d * 8, part_);
    }
    return tok::load<uint64_t>(&part_[8 * (d - first_)]);
  }

 private:
  const TokenFile& file_;
  uint64_t first_ = 0;
  std::vector<unsigned char> part_;
};

void TokenFile::check_table() const {
  const uint64_t entries = header_.documents + 1;
  uint32_t crc = 0;
  for_bytes(table_offset_, entries * 8, [&](std::span<const unsigned char> part) {
    crc = crc32c(part.data(), part.size(), crc);
  });
  if (crc != header_.table_crc32c) {
    throw DataError("{}: the document table is damaged: crc32c {:08x}, the header says {:08x}",
                    path_, crc, header_.table_crc32c);
  }
  uint64_t low = 0;
  Starts starts(*this);
  for (uint64_t d = 0; d < entries; ++d) {
    const uint64_t start = starts[d];
    const bool right = d == 0 ? start == 0 : start >= low;
    if (!right || (d + 1 == entries && start != header_.tokens)) {
      throw DataError("{}: entry {} of the document table is {}, behind {} and with {} tokens",
                      path_, d, start, low, header_.tokens);
    }
    low = start;
  }
}

void TokenFile::check_mask(const unsigned char* head) {
  target_count_ = header_.tokens;
  if (!has_mask()) return;
  const uint64_t offset = tok::load<uint64_t>(head + tok::kMaskOffsetAt);
  if (offset != mask_offset_) {
    throw DataError("{}: the header contradicts itself: loss mask at {}, expected at {}", path_,
                    offset, mask_offset_);
  }
  const uint64_t bytes = tok::mask_bytes(header_);
  uint32_t crc = 0;
  unsigned char last = 0;
  target_count_ = 0;
  for_bytes(mask_offset_, bytes, [&](std::span<const unsigned char> part) {
    crc = crc32c(part.data(), part.size(), crc);
    for (const unsigned char b : part) target_count_ += static_cast<uint64_t>(std::popcount(b));
    last = part.back();
  });
  if (crc != header_.mask_crc32c) {
    throw DataError("{}: the loss mask is damaged: crc32c {:08x}, the header says {:08x}", path_,
                    crc, header_.mask_crc32c);
  }
  if (header_.tokens % 8 != 0 && last >> header_.tokens % 8 != 0) {
    throw DataError("{}: the loss mask has bits behind its {} tokens", path_, header_.tokens);
  }
}

void TokenFile::check_size() const {
  const uint64_t now = file_size(fd_, path_);
  if (now != bytes_) {
    throw DataError("{}: the file had {} bytes when it was opened and has {} now", path_, bytes_,
                    now);
  }
}

TokenFile::Document TokenFile::document(uint64_t d) const {
  MOIETY_CHECK(d < header_.documents, "{}: document {} of {}", path_, d, header_.documents);
  check_size();
  unsigned char ends[16];
  read_bytes(table_offset_ + d * 8, ends);
  return {tok::load<uint64_t>(ends), tok::load<uint64_t>(ends + 8)};
}

uint64_t TokenFile::document_start(uint64_t d) const {
  unsigned char start[8];
  read_bytes(table_offset_ + d * 8, start);
  return tok::load<uint64_t>(start);
}

void TokenFile::read(uint64_t begin, std::span<int32_t> out) const {
  MOIETY_CHECK(begin <= header_.tokens && out.size() <= header_.tokens - begin,
               "{}: tokens [{}, {} + {}) of {}", path_, begin, begin, out.size(), header_.tokens);
  check_size();
  std::vector<unsigned char> bytes(out.size() * header_.token_bytes);
  read_bytes(tok::kHeaderBytes + begin * header_.token_bytes, bytes);
  for (size_t i = 0; i < out.size(); ++i) {
    const unsigned char* p = &bytes[i * header_.token_bytes];
    const uint32_t id = header_.token_bytes == 2 ? tok::load<uint16_t>(p) : tok::load<uint32_t>(p);
    if (id >= header_.vocab) [[unlikely]] {
      throw DataError("{}: token {} is {}, the vocabulary has {}", path_, begin + i, id,
                      header_.vocab);
    }
    out[i] = static_cast<int32_t>(id);
  }
}

void TokenFile::targets(uint64_t begin, std::span<uint8_t> out) const {
  MOIETY_CHECK(begin <= header_.tokens && out.size() <= header_.tokens - begin,
               "{}: targets [{}, {} + {}) of {}", path_, begin, begin, out.size(), header_.tokens);
  check_size();
  if (!has_mask()) {
    std::fill(out.begin(), out.end(), uint8_t{1});
    return;
  }
  if (out.empty()) return;
  const uint64_t first = begin / 8;
  std::vector<unsigned char> mask((begin + out.size() - 1) / 8 + 1 - first);
  read_bytes(mask_offset_ + first, mask);
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t t = begin + i;
    out[i] = mask[t / 8 - first] >> t % 8 & 1;
  }
}

uint64_t TokenFile::count_targets(uint64_t begin, uint64_t count) const {
  std::vector<uint8_t> part;
  uint64_t targets = 0;
  for (const uint64_t end = begin + count; begin < end; begin += part.size()) {
    part.resize(std::min(kCountedTogether, end - begin));
    this->targets(begin, part);
    targets += std::accumulate(part.begin(), part.end(), uint64_t{0});
  }
  return targets;
}

void TokenFile::positions(uint64_t begin, std::span<int32_t> out) const {
  check_size();
  // The first document that starts behind `begin`.
  uint64_t low = 0, high = header_.documents;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (document_start(middle) > begin) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  uint64_t start = begin;
  Starts starts(*this);
  for (size_t i = 0; i < out.size(); ++i) {
    for (; low < header_.documents && starts[low] <= begin + i; ++low) start = starts[low];
    out[i] = static_cast<int32_t>(begin + i - start);
  }
}

}  // namespace moiety::data
