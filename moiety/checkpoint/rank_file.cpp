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
  return nullptr;
}

}  // namespace

FilePlan plan_file(const StateView& view, const Metadata& metadata, int64_t piece_bytes) {
  FilePlan plan;
  for (size_t i = 0; i < view.size(); ++i) {
    const StatePiece& p = view[i];
    const char* fault = fault_of(p);
    MOIETY_CHECK(!fault, "save: {}/{}: {}", p.slot, p.tensor, fault);
    // A box without elements is stored only for a tensor without elements.
    if (volume(p.box) > 0 || volume(whole(p.shape)) == 0) {
      std::vector<Box> parts;
      cut_box(p.box, bits(p.dtype) / 8, piece_bytes, parts);
      for (const Box& part : parts) plan.pieces.push_back({static_cast<int>(i), part});
    }
  }
  // Element sizes fall, so that each element is aligned to its size.
  std::sort(plan.pieces.begin(), plan.pieces.end(),
            [&view](const FilePlan::Piece& a, const FilePlan::Piece& b) {
              const StatePiece &of_a = view[a.of], &of_b = view[b.of];
              const int wide_a = -bits(of_a.dtype), wide_b = -bits(of_b.dtype);
              return std::tie(wide_a, of_a.tensor, of_a.slot, a.box.start) <
                     std::tie(wide_b, of_b.tensor, of_b.slot, b.box.start);
            });
  std::vector<Entry> entries;
  for (FilePlan::Piece& p : plan.pieces) {
    const StatePiece& of = view[p.of];
    p.begin = plan.data_bytes;
    p.end = plan.data_bytes += static_cast<uint64_t>(byte_size(of.dtype, volume(p.box)));
    entries.push_back({piece_key(of.slot, of.tensor, of.shape, p.box),
                       &stored_type(of.dtype),
                       {p.box.size.begin(), p.box.size.begin() + p.box.rank},
                       p.begin,
                       p.end});
  }
  plan.header = encode_header(entries, metadata);
  return plan;
}

PieceSums write_piece(const File& file, const FilePlan& plan, const FilePlan::Piece& piece,
                      const StatePiece& of, const std::byte* data) {
  const std::string_view content(reinterpret_cast<const char*>(data), piece.end - piece.begin);
  const PieceSums sums{crc32c(content), digest(data, of.dtype, piece.box, of.shape)};
  file.write(plan.header.size() + piece.begin, content);
  file.write_back(plan.header.size() + piece.begin, content.size());
  return sums;
}

Manifest manifest_of_file(const std::string& name, const FilePlan& plan, const StateView& view,
                          std::span<const PieceSums> sums) {
  Manifest part;
  uint32_t crc = crc32c(plan.header);
  for (size_t i = 0; i < plan.pieces.size(); ++i) {
    const FilePlan::Piece& p = plan.pieces[i];
    const StatePiece& of = view[p.of];
    SlotEntry& slot = slot_of(part, of.tensor, of.slot, of.shape, of.dtype);
    slot.digest += sums[i].digest;
    slot.pieces.push_back({0, p.box, p.begin, p.end, sums[i].crc32c});
    crc = crc32c_combine(crc, sums[i].crc32c, p.end - p.begin);
  }
  part.files.push_back({name, plan.bytes(), crc});
  return part;
}

RankFile::RankFile(StateView view, const Manifest& head, int rank, int64_t piece_bytes)
    : view_(std::move(view)),
      id_(head.id),
      step_(head.run.step),
      name_(rank_file_name(rank, head.run.layout.ranks)),
      plan_(plan_file(view_, file_metadata(head, rank), piece_bytes)) {
  for (const FilePlan::Piece& p : plan_.pieces) {
    const StatePiece& of = view_[p.of];
    Memory& memory = memory_.emplace_back();
    memory.device = of.device;
    if (p.end == p.begin) continue;
    MOIETY_CHECK(of.data, "save: {}/{}: no memory", of.slot, of.tensor);
    memory.data = static_cast<const std::byte*>(of.data) +
                  byte_size(of.dtype, BoxRuns(of.box, p.box).outer_offset(0));
  }
}

void RankFile::take_copy(std::byte* memory, const Stream& stream) {
  std::vector<size_t> in_host_memory;
  for (size_t i = 0; i < memory_.size(); ++i) {
    const FilePlan::Piece& p = plan_.pieces[i];
    if (p.end == p.begin) continue;
    Memory& from = memory_[i];
    if (from.device.type == DeviceType::kCpu) {
      in_host_memory.push_back(i);
      continue;
    }
    std::byte* const to = memory + p.begin;
    copy(TensorView(to, DType::kUInt8, {p.bytes()}),
         TensorView(const_cast<std::byte*>(from.data), DType::kUInt8, {p.bytes()}, from.device),
         stream);
    from = {to, {}};
  }
  parallel_tasks(std::ssize(in_host_memory), [&](int64_t k) {
    const size_t i = in_host_memory[k];
    const FilePlan::Piece& p = plan_.pieces[i];
    std::byte* const to = memory + p.begin;
    std::memcpy(to, memory_[i].data, p.end - p.begin);
    memory_[i] = {to, {}};
  });
  stream.synchronize();
}

Manifest RankFile::write(const std::string& directory, bool verify, FileSystem& files,
                         const std::atomic<bool>& stop) const {
  const std::string path = directory + "/" + name_;
  File file(files, path, O_WRONLY | O_CREAT | O_EXCL);
  file.allocate(bytes());
  file.write(0, plan_.header);
  std::vector<PieceSums> sums(plan_.pieces.size());
  std::atomic<size_t> next = 0;
  parallel_tasks(thread_budget(), [&](int64_t) {
    Staging staging;
    for (size_t i; (i = next++) < sums.size();) {
      if (stop) fail(ErrorKind::kIo, "write {}: given up, the run has ended", path);
      const FilePlan::Piece& p = plan_.pieces[i];
      const std::byte* data = staging.fetch(memory_[i].data, p.bytes(), memory_[i].device);
      sums[i] = write_piece(file, plan_, p, view_[p.of], data);
    }
  });
  file.sync_data();
  file.close();

  Manifest part = manifest_of_file(name_, plan_, view_, sums);
  part.id = id_;
  part.run.step = step_;
  if (!verify) return part;
  const uint32_t crc = part.files[0].crc32c;
  if (const uint32_t got = checksum(files, path); got != crc) {
    fail(ErrorKind::kIo, "{} reads back with crc32c {:08x}, written was {:08x}", path, got, crc);
  }
  return part;
}

}  // namespace moiety::checkpoint
