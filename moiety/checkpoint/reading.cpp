#include "moiety/checkpoint/reading.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <string_view>

#include "moiety/base/crc32c.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/interrupt.h"
#include "moiety/checkpoint/json.h"

namespace moiety::checkpoint {
namespace {

// The key of the piece that begins at a byte of the data.
const std::string& key_at(const SafetensorsReader& reader, uint64_t begin) {
  const auto entries = reader.entries();
  return std::find_if(
             entries.begin(), entries.end(),
             [begin](const Entry& entry) { return entry.begin == begin && entry.end > begin; })
      ->name;
}

// Reads the pieces of one file and copies the needed parts of them.
void read_pieces(const SafetensorsReader& reader, std::span<const BoxCopy> copies,
                 const StateView& view, Device device) {
  std::vector<std::span<const BoxCopy>> pieces;
  for (size_t i = 0, n; i < copies.size(); i += n) {
    n = 1;
    while (i + n < copies.size() && copies[i + n].piece.begin == copies[i].piece.begin) ++n;
    pieces.push_back(copies.subspan(i, n));
  }
  constexpr int kInFlight = 4;
  const auto announce = [&](size_t i) {
    if (i >= pieces.size()) return;
    const Piece& piece = pieces[i][0].piece;
    reader.read_ahead(piece.begin, piece.end - piece.begin);
  };
  for (size_t i = 0; i < kInFlight; ++i) announce(i);
  std::atomic<size_t> next = 0;
  // At least two threads, also where a rank has one core: one waits for the disk while the other
  // computes.
  const ThreadBudget readers(std::clamp(thread_budget(), 2, kInFlight));
  parallel_tasks(thread_budget(), [&](int64_t) {
    Staging staging;
    for (size_t i; (i = next++) < pieces.size();) {
      check_interrupt();
      announce(i + kInFlight);
      const Piece& piece = pieces[i][0].piece;
      const uint64_t bytes = piece.end - piece.begin;
      std::byte* data = staging.reserve(static_cast<int64_t>(bytes), device);
      reader.read(piece.begin, {data, bytes});
      const uint32_t crc = crc32c(data, bytes);
      if (crc != piece.crc32c) {
        const std::string& key = key_at(reader, piece.begin);
        refuse("{}: {} has crc32c {:08x}, expected {:08x}", reader.path(), json_string(key), crc,
               piece.crc32c);
      }
      for (const BoxCopy& copy : pieces[i]) {
        staging.put(copy.region, copy.from, view[copy.need]);
      }
      staging.finish();
    }
  });
}

}  // namespace

void check_header(const Manifest& m, int file, const SafetensorsReader& reader) {
  if (reader.metadata() != file_metadata(m, file)) {
    refuse("{}: the metadata is not that of checkpoint {}, file {}", reader.path(), m.id, file);
  }
  std::map<std::string_view, const Entry*> entries;
  for (const Entry& entry : reader.entries()) entries[entry.name] = &entry;
  for (const auto& [name, tensor] : m.tensors) {
    for (const auto& [slot, item] : tensor.slots) {
      for (const Piece& p : item.pieces) {
        if (p.file != file) continue;
        const std::string key = piece_key(slot, name, tensor.shape, p.box);
        const auto at = entries.find(key);
        const std::span sizes(p.box.size.data(), static_cast<size_t>(p.box.rank));
        if (at == entries.end() || at->second->type->dtype != item.dtype ||
            !std::ranges::equal(at->second->shape, sizes) || at->second->begin != p.begin ||
            at->second->end != p.end) {
          refuse("{}: {} is not at bytes [{}, {}), where the manifest has it", reader.path(),
                 json_string(key), p.begin, p.end);
        }
        entries.erase(at);
      }
    }
  }
  if (!entries.empty()) {
    refuse("{}: {} is not in the manifest", reader.path(), json_string(entries.begin()->first));
  }
}

void read_plan(const std::string& path, const Manifest& m, std::span<const BoxCopy> plan,
               const StateView& view, Device device, FileSystem& files) {
  for (size_t i = 0, n; i < plan.size(); i += n) {
    n = 1;
    while (i + n < plan.size() && plan[i + n].piece.file == plan[i].piece.file) ++n;
    const std::string& name = m.files[static_cast<size_t>(plan[i].piece.file)].name;
    read_pieces(SafetensorsReader::open(path + "/" + name, files), plan.subspan(i, n), view,
                device);
  }
}

uint64_t part_digest(const KeyMove& move, const StatePiece& piece, Staging& staging) {
  uint64_t sum = 0;
  for (const MovedBox& moved : moved_boxes(move, piece.box)) {
    StatePiece part = piece;
    part.shape = move.source.shape;
    part.box = moved.source;
    if (volume(moved.target) > 0) {
      part.data = static_cast<std::byte*>(piece.data) +
                  byte_size(piece.dtype, BoxRuns(piece.box, moved.target).outer_offset(0));
    }
    sum += digest(part, staging);
  }
  return sum;
}

}  // namespace moiety::checkpoint
