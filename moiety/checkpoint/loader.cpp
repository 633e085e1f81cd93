#include "moiety/checkpoint/loader.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>

#include "moiety/base/crc32c.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/json.h"
#include "moiety/checkpoint/reshard.h"
#include "moiety/checkpoint/safetensors.h"
#include "moiety/checkpoint/staging.h"
#include "moiety/checkpoint/together.h"

namespace moiety::checkpoint {
namespace {

// A tensor and slot of the checkpoint, with the parts that the ranks ask for.
struct Wanted {
  const std::string* tensor;
  const std::string* slot;
  const TensorEntry* shape;
  const SlotEntry* entry;
  uint64_t asked = 0;     // number of boxes
  uint64_t elements = 0;  // elements in them

  std::string name() const { return *slot + "/" + *tensor; }
  uint64_t volume() const { return static_cast<uint64_t>(checkpoint::volume(whole(shape->shape))); }
};
using WantedList = std::vector<Wanted>;

WantedList list_entries(const Manifest& m) {
  WantedList list;
  for (const auto& [name, tensor] : m.tensors) {
    for (const auto& [slot, entry] : tensor.slots) list.push_back({&name, &slot, &tensor, &entry});
  }
  return list;
}

Wanted* find(WantedList& list, const StatePiece& p) {
  const auto key = std::tie(p.tensor, p.slot);
  const auto at = std::lower_bound(
      list.begin(), list.end(), key,
      [](const Wanted& w, const auto& k) { return std::tie(*w.tensor, *w.slot) < k; });
  return at != list.end() && std::tie(*at->tensor, *at->slot) == key ? &*at : nullptr;
}

// Throws with the lists of what does not fit, each with its count and the first 20 entries.
[[noreturn]] void refuse_differences(const std::string& path, const std::set<std::string>& lines) {
  std::map<std::string, std::vector<std::string>> kinds;
  for (const std::string& line : lines) {
    const size_t space = line.find(' ');
    kinds[line.substr(0, space)].push_back(line.substr(space + 1));
  }
  std::string out;
  for (const auto& [kind, names] : kinds) {
    out += text("{}{} {}: ", out.empty() ? "" : "; ", names.size(), kind);
    for (size_t i = 0; i < names.size() && i < 20; ++i) out += (i ? ", " : "") + names[i];
    if (names.size() > 20) out += ", ...";
  }
  refuse("{} does not fit: {}", path, out);
}

// Counts what all ranks ask for. Throws, the same on all, where that differs from the checkpoint.
void match(const std::string& path, WantedList& list, const StateView& view,
           const LoadOptions& options, comm::Bootstrap& bootstrap) {
  std::string lines;  // each is a kind and an entry of that kind
  for (const StatePiece& p : view) {
    const std::string name = p.slot + "/" + p.tensor;
    Wanted* w = find(list, p);
    if (!w) {
      lines += text("missing {}\n", name);
    } else if (w->shape->shape != p.shape) {
      lines += text("of-another-shape {} {} (needed {})\n", name, shape_text(w->shape->shape),
                    shape_text(p.shape));
    } else if (w->entry->dtype != p.dtype) {
      lines += text("of-another-type {} {} (needed {})\n", name, moiety::name(w->entry->dtype),
                    moiety::name(p.dtype));
    } else {
      ++w->asked;
      w->elements += static_cast<uint64_t>(volume(p.box));
    }
  }
  std::vector<uint64_t> counts;
  for (const Wanted& w : list) counts.insert(counts.end(), {w.asked, w.elements});
  counts = sum_over_ranks(bootstrap, counts);
  for (size_t i = 0; i < list.size(); ++i) {
    Wanted& w = list[i];
    w.asked = counts[2 * i];
    w.elements = counts[2 * i + 1];
    const bool unasked = w.asked == 0 || (w.elements == 0 && w.volume() > 0);
    if (unasked && !(options.weights_only && *w.slot != "weight")) {
      lines += text("unexpected {}\n", w.name());
    } else if (w.volume() > 0 && w.elements % w.volume() != 0) {
      lines +=
          text("not-asked-for-evenly {} ({} of {} elements)\n", w.name(), w.elements, w.volume());
    }
  }
  std::set<std::string> all;
  for (const std::string& theirs : gather(bootstrap, lines)) {
    for (size_t at = 0, end; at < theirs.size(); at = end + 1) {
      end = theirs.find('\n', at);
      all.insert(theirs.substr(at, end - at));
    }
  }
  if (!all.empty()) refuse_differences(path, all);
}

// Checks that the header of a rank file agrees with the manifest.
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
      announce(i + kInFlight);
      const Piece& piece = pieces[i][0].piece;
      const uint64_t bytes = piece.end - piece.begin;
      std::byte* data = staging.reserve(static_cast<int64_t>(bytes), device);
      reader.read(piece.begin, {data, bytes});
      const uint32_t crc = crc32c(data, bytes);
      if (crc != piece.crc32c) {
        const StatePiece& need = view[pieces[i][0].need];
        refuse("{}: {} has crc32c {:08x}, expected {:08x}", reader.path(),
               json_string(piece_key(need.slot, need.tensor, need.shape, piece.box)), crc,
               piece.crc32c);
      }
      for (const BoxCopy& copy : pieces[i]) {
        staging.put(copy.region, piece.box, view[copy.need]);
      }
      staging.finish();
    }
  });
}

// Compares the digests of what arrived, over all ranks, with the manifest.
void check_digests(const std::string& path, WantedList& list, const StateView& view,
                   comm::Bootstrap& bootstrap) {
  std::vector<uint64_t> sums(list.size(), 0);
  Staging staging;
  for (const StatePiece& p : view) sums[find(list, p) - list.data()] += digest(p, staging);
  sums = sum_over_ranks(bootstrap, sums);
  for (size_t i = 0; i < list.size(); ++i) {
    const Wanted& w = list[i];
    const uint64_t times = w.volume() > 0 ? w.elements / w.volume() : 0;
    if (sums[i] != times * w.entry->digest) {
      refuse("{}: {} has digest {:016x}, expected {} x {:016x}", path, w.name(), sums[i], times,
             w.entry->digest);
    }
  }
}

}  // namespace

RunState load(const std::string& rank0_path, const StateView& view, const LoadOptions& options,
              comm::Bootstrap& bootstrap, FileSystem& files) {
  const std::string path = gather(bootstrap, rank0_path)[0];
  Manifest m;
  Device device;
  together(bootstrap, [&] {
    device = gpu_of("load", view);
    for (const StatePiece& p : view) {
      MOIETY_CHECK(p.data || volume(p.box) == 0, "load: {}/{} has no memory", p.slot, p.tensor);
    }
    m = read_manifest(path, files);
  });
  const auto seen = gather(bootstrap, text("{} {:08x}", m.id, crc32c(encode_manifest(m))));
  for (size_t rank = 1; rank < seen.size(); ++rank) {
    if (seen[rank] != seen[0]) {
      refuse("{} is checkpoint {} on rank 0 and {} on rank {}: it must be one file system for all",
             path, seen[0], seen[rank], rank);
    }
  }
  WantedList wanted = list_entries(m);
  match(path, wanted, view, options, bootstrap);

  // Every file's header is checked by each rank that reads from the file, and by one rank in any
  // case.
  std::vector<BoxCopy> plan;
  const auto open = [&](int file) {
    return SafetensorsReader::open(path + "/" + m.files[file].name, files);
  };
  together(bootstrap, [&] {
    plan = plan_reshard(m, view);
    std::set<int> mine;
    for (const BoxCopy& copy : plan) mine.insert(copy.piece.file);
    for (int f = bootstrap.rank(); f < static_cast<int>(m.files.size()); f += bootstrap.size()) {
      mine.insert(f);
    }
    for (const int file : mine) check_header(m, file, open(file));
  });
  together(bootstrap, [&] {
    const std::span<const BoxCopy> all(plan);
    for (size_t i = 0, n; i < all.size(); i += n) {
      n = 1;
      while (i + n < all.size() && all[i + n].piece.file == all[i].piece.file) ++n;
      read_pieces(open(all[i].piece.file), all.subspan(i, n), view, device);
    }
  });
  if (options.digests) check_digests(path, wanted, view, bootstrap);
  return m.run;
}

}  // namespace moiety::checkpoint
