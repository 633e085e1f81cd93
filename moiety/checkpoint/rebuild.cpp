// The keys of pieces, and the manifest that can be made from them.
#include <algorithm>
#include <charconv>

#include "moiety/base/buffer.h"
#include "moiety/base/crc32c.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/digest.h"
#include "moiety/checkpoint/json.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/safetensors.h"

namespace moiety::checkpoint {
namespace {

// Takes a decimal number, in its shortest form, and the character behind it from the front of `s`.
bool take_number(std::string_view& s, char behind, int64_t& out) {
  const char* last = s.data() + s.size();
  uint64_t n = 0;
  const auto [at, error] = std::from_chars(s.data(), last, n);
  if (error != std::errc() || at == last || *at != behind || n > INT64_MAX) return false;
  if (at - s.data() > 1 && s[0] == '0') return false;
  out = static_cast<int64_t>(n);
  s.remove_prefix(static_cast<size_t>(at - s.data()) + 1);
  return true;
}

// Parses "0:16/128,4:8/8]" into the box of `name`.
bool parse_ranges(std::string_view s, PieceName& name) {
  if (s == "]") return true;
  for (bool last = false; !last; ++name.box.rank) {
    const int d = name.box.rank;
    int64_t end = 0, extent = 0;
    if (d == kMaxBoxRank || !take_number(s, ':', name.box.start[d]) || !take_number(s, '/', end)) {
      return false;
    }
    last = s.find(',') == s.npos;
    if (!take_number(s, last ? ']' : ',', extent)) return false;
    if (name.box.start[d] > end || end > extent) return false;
    name.box.size[d] = end - name.box.start[d];
    name.shape.push_back(extent);
  }
  return s.empty();
}

const std::string& metadata_field(const SafetensorsReader& reader, const char* field) {
  const auto at = reader.metadata().find(field);
  if (at == reader.metadata().end()) {
    refuse("{}: metadata has no field \"{}\"", reader.path(), field);
  }
  return at->second;
}

// The manifest of one rank's file, made by reading all of its data once.
Manifest manifest_of(const SafetensorsReader& reader, const std::string& name) {
  Manifest part;
  uint32_t file_crc = reader.header_crc32c();  // goes on in the order of the data
  for (const Entry& entry : reader.entries()) {
    const PieceName key = parse_piece_key(reader.path(), entry.name);
    const std::span sizes(key.box.size.data(), static_cast<size_t>(key.box.rank));
    if (!std::ranges::equal(entry.shape, sizes) || !entry.type->dtype || entry.type->bits < 8) {
      refuse("{}: {} has another shape than its name says, or dtype {}", reader.path(),
             json_string(entry.name), entry.type->name);
    }
    const Buffer data(static_cast<int64_t>(entry.end - entry.begin), "piece of a checkpoint");
    const std::span<std::byte> bytes(data.data(), entry.end - entry.begin);
    reader.read(entry.begin, bytes);
    SlotEntry& slot =
        slot_of(part, key.tensor, key.slot, key.shape, *entry.type->dtype, reader.path());
    slot.digest += digest(data.data(), slot.dtype, key.box, key.shape);
    const uint32_t crc = crc32c(data.data(), bytes.size());
    slot.pieces.push_back({0, key.box, entry.begin, entry.end, crc});
    file_crc = crc32c_combine(file_crc, crc, bytes.size());
  }
  part.files.push_back({name, reader.bytes(), file_crc});
  return part;
}

}  // namespace

std::string rank_file_name(int rank, int ranks) {
  return text("rank-{:05}-of-{:05}.safetensors", rank, ranks);
}

std::string piece_key(const std::string& slot, const std::string& tensor,
                      std::span<const int64_t> shape, const Box& box) {
  std::string out = slot + "/" + tensor + "[";
  for (int d = 0; d < box.rank; ++d) {
    out += text("{}{}:{}/{}", d ? "," : "", box.start[d], box.start[d] + box.size[d], shape[d]);
  }
  return out + "]";
}

PieceName parse_piece_key(const std::string& file, std::string_view key) {
  const size_t slash = key.find('/'), bracket = key.rfind('[');
  PieceName name;
  bool good = slash != key.npos && bracket != key.npos && 0 < slash && slash + 1 < bracket;
  if (good) {
    name.slot = key.substr(0, slash);
    name.tensor = key.substr(slash + 1, bracket - slash - 1);
    good = parse_ranges(key.substr(bracket + 1), name);
  }
  if (!good) refuse("{}: {} is no key of a piece", file, json_string(key));
  if (const char* fault = shape_fault(name.shape))
    refuse("{}: {}: {}", file, json_string(key), fault);
  return name;
}

Manifest rebuild_manifest(const std::string& path, FileSystem& files) {
  Manifest m;
  const std::string first_name = "rank-00000-of-";
  for (const std::string& name : list(files, path)) {
    if (!name.starts_with(first_name)) continue;
    const auto first = SafetensorsReader::open(path + "/" + name, files);
    m.id = metadata_field(first, "id");
    m.run = parse_run(metadata_field(first, "run"), first.path());
    break;
  }
  if (m.id.empty()) refuse("{}: there is no file {}*", path, first_name);
  for (int rank = 0; rank < m.run.layout.ranks; ++rank) {
    const std::string name = rank_file_name(rank, m.run.layout.ranks);
    const auto reader = SafetensorsReader::open(path + "/" + name, files);
    if (reader.metadata() != file_metadata(m, rank)) {
      refuse("{}: the metadata is not that of checkpoint {}, step {}, rank {} of {}", reader.path(),
             m.id, m.run.step, rank, m.run.layout.ranks);
    }
    merge(m, manifest_of(reader, name), reader.path());
  }
  check_tiling(m, path);
  return m;
}

}  // namespace moiety::checkpoint
