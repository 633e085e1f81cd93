#include "moiety/checkpoint/rank_file.h"

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <tuple>
#include <utility>

#include "moiety/base/copy.h"
#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/digest.h"
#include "moiety/checkpoint/json.h"

namespace moiety::checkpoint {
namespace {

// The reason why a piece of a view cannot be stored; null if it can.
const char* fault_of(const StatePiece& p) {
  if (const char* fault = name_fault(p.tensor)) return fault;
  if (const char* fault = name_fault(p.slot)) return fault;
  if (p.slot.find('/') != std::string::npos) return "a slot with a slash";
  if (const char* fault = shape_fault(p.shape)) return fault;
  if (!contains(whole(p.shape), p.box)) return "a box outside of the shape";
  if (bits(p.dtype) < 8) return "elements of less than a byte";
  if (!p.data && volume(p.box) > 0) return "no memory";
  return nullptr;
}

}  // namespace

RankFile::RankFile(StateView view, const Manifest& head, int rank, int64_t piece_bytes)
    : view_(std::move(view)),
      id_(head.id),
      step_(head.run.step),
      name_(rank_file_name(rank, head.run.layout.ranks)) {
  for (size_t i = 0; i < view_.size(); ++i) {
    const StatePiece& p = view_[i];
    const char* fault = fault_of(p);
    MOIETY_CHECK(!fault, "save: {}/{}: {}", p.slot, p.tensor, fault);
    // A box without elements is stored only for a tensor without elements.
    if (volume(p.box) > 0 || volume(whole(p.shape)) == 0) {
      std::vector<Box> parts;
      cut_box(p.box, bits(p.dtype) / 8, piece_bytes, parts);
      for (const Box& part : parts) pieces_.push_back({static_cast<int>(i), part});
    }
  }
  // Element sizes fall, so that each element is aligned to its size.
  std::sort(pieces_.begin(), pieces_.end(), [this](const Piece& a, const Piece& b) {
    const StatePiece &of_a = view_[a.of], &of_b = view_[b.of];
    const int wide_a = -bits(of_a.dtype), wide_b = -bits(of_b.dtype);
    return std::tie(wide_a, of_a.tensor, of_a.slot, a.box.start) <
           std::tie(wide_b, of_b.tensor, of_b.slot, b.box.start);
  });
  std::vector<Entry> entries;
  for (Piece& p : pieces_) {
    const StatePiece& of = view_[p.of];
    p.begin = data_bytes_;
    p.end = data_bytes_ += static_cast<uint64_t>(byte_size(of.dtype, volume(p.box)));
    p.device = of.device;
    if (p.end > p.begin) {
      p.data = static_cast<const std::byte*>(of.data) +
               byte_size(of.dtype, BoxRuns(of.box, p.box).outer_offset(0));
    }
    entries.push_back({piece_key(of.slot, of.tensor, of.shape, p.box),
                       &stored_type(of.dtype),
                       {p.box.size.begin(), p.box.size.begin() + p.box.rank},
                       p.begin,
                       p.end});
  }
  header_ = encode_header(entries, file_metadata(head, rank));
}

void RankFile::take_copy(std::byte* memory, const Stream& stream) {
  parallel_tasks(static_cast<int64_t>(pieces_.size()), [&](int64_t i) {
    Piece& p = pieces_[i];
    if (p.end == p.begin) return;
    std::byte* const to = memory + p.begin;
    if (p.device.type == DeviceType::kCpu) {
      std::memcpy(to, p.data, p.end - p.begin);
    } else {
      copy(TensorView(to, DType::kUInt8, {p.bytes()}),
           TensorView(const_cast<std::byte*>(p.data), DType::kUInt8, {p.bytes()}, p.device),
           stream);
    }
    p.data = to;
    p.device = {};
  });
  stream.synchronize();
}

RankFile::Sums RankFile::write_piece(const File& file, const Piece& piece, Staging& staging,
                                     const std::atomic<bool>& stop) const {
  if (stop) fail(ErrorKind::kIo, "write {}: given up, the run has ended", file.path());
  const StatePiece& of = view_[piece.of];
  const std::byte* data = staging.fetch(piece.data, piece.bytes(), piece.device);
  const std::string_view content(reinterpret_cast<const char*>(data), piece.end - piece.begin);
  const Sums sums{crc32c(content), digest(data, of.dtype, piece.box, of.shape)};
  file.write(header_.size() + piece.begin, content);
  file.write_back(header_.size() + piece.begin, content.size());
  return sums;
}

Manifest RankFile::write(const std::string& directory, bool verify, FileSystem& files,
                         const std::atomic<bool>& stop) const {
  const std::string path = directory + "/" + name_;
  File file(files, path, O_WRONLY | O_CREAT | O_EXCL);
  file.allocate(bytes());
  file.write(0, header_);
  std::vector<Sums> sums(pieces_.size());
  std::atomic<size_t> next = 0;
  parallel_tasks(thread_budget(), [&](int64_t) {
    Staging staging;
    for (size_t i; (i = next++) < pieces_.size();) {
      sums[i] = write_piece(file, pieces_[i], staging, stop);
    }
  });
  file.sync_data();
  file.close();

  Manifest part;
  part.id = id_;
  part.run.step = step_;
  uint32_t crc = crc32c(header_);
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& p = pieces_[i];
    const StatePiece& of = view_[p.of];
    SlotEntry& slot = slot_of(part, of.tensor, of.slot, of.shape, of.dtype);
    slot.digest += sums[i].digest;
    slot.pieces.push_back({0, p.box, p.begin, p.end, sums[i].crc32c});
    crc = crc32c_combine(crc, sums[i].crc32c, p.end - p.begin);
  }
  part.files.push_back({name_, bytes(), crc});
  if (!verify) return part;
  if (const uint32_t got = checksum(files, path); got != crc) {
    fail(ErrorKind::kIo, "{} reads back with crc32c {:08x}, written was {:08x}", path, got, crc);
  }
  return part;
}

}  // namespace moiety::checkpoint
