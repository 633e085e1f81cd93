#include "moiety/checkpoint/loader.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "moiety/base/crc32c.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/reading.h"
#include "moiety/checkpoint/together.h"

namespace moiety::checkpoint {
namespace {

// A tensor and slot of the checkpoint, with the parts that the ranks ask for.
struct Wanted {
  const std::string* tensor;
  const std::string* slot;
  const PackedSlot* is;
  uint64_t asked = 0;     // number of boxes
  uint64_t elements = 0;  // elements in them

  std::string name() const { return *slot + "/" + *tensor; }
  uint64_t volume() const { return static_cast<uint64_t>(checkpoint::volume(whole(is->shape))); }
};
using WantedList = std::vector<Wanted>;

WantedList list_entries(const PackedState& state) {
  WantedList list;
  for (const auto& [key, slot] : state.slots()) list.push_back({&key.first, &key.second, &slot});
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
    } else if (w->is->shape != p.shape) {
      lines += text("of-another-shape {} {} (needed {})\n", name, shape_text(w->is->shape),
                    shape_text(p.shape));
    } else if (w->is->dtype != p.dtype) {
      lines += text("of-another-type {} {} (needed {})\n", name, moiety::name(w->is->dtype),
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
    if (unasked && !(options.may_leave && options.may_leave(*w.slot))) {
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

// Compares the digests of what arrived, over all ranks, with the manifest.
void check_digests(const std::string& path, WantedList& list, const StateView& view,
                   comm::Bootstrap& bootstrap) {
  std::vector<size_t> first;  // by entry of the list, the sum of its first part
  size_t parts = 0;
  for (const Wanted& w : list) first.push_back(std::exchange(parts, parts + w.is->parts.size()));
  std::vector<uint64_t> sums(parts, 0);
  Staging staging;
  for (const StatePiece& p : view) {
    const Wanted* w = find(list, p);
    uint64_t* sum = &sums[first[w - list.data()]];
    for (const PackedSlot::Part& part : w->is->parts) {
      *sum++ += part_digest(part.move, p, staging);
    }
  }
  sums = sum_over_ranks(bootstrap, sums);
  for (size_t i = 0; i < list.size(); ++i) {
    const Wanted& w = list[i];
    const uint64_t times = w.volume() > 0 ? w.elements / w.volume() : 0;
    for (size_t k = 0; k < w.is->parts.size(); ++k) {
      const PackedSlot::Part& part = w.is->parts[k];
      const uint64_t sum = sums[first[i] + k];
      if (sum == times * part.source->digest) continue;
      refuse("{}: {}/{} has digest {:016x}, expected {} x {:016x}", path, *w.slot,
             part.move.source.name, sum, times, part.source->digest);
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
  std::optional<PackedState> state;
  together(bootstrap, [&] { state.emplace(m); });
  WantedList wanted = list_entries(*state);
  match(path, wanted, view, options, bootstrap);

  // Every file's header is checked by each rank that reads from the file, and by one rank in any
  // case.
  std::vector<BoxCopy> plan;
  const auto open = [&](int file) {
    return SafetensorsReader::open(path + "/" + m.files[file].name, files);
  };
  together(bootstrap, [&] {
    plan = plan_reshard(*state, view);
    std::set<int> mine;
    for (const BoxCopy& copy : plan) mine.insert(copy.piece.file);
    for (int f = bootstrap.rank(); f < static_cast<int>(m.files.size()); f += bootstrap.size()) {
      mine.insert(f);
    }
    for (const int file : mine) check_header(m, file, open(file));
  });
  together(bootstrap, [&] { read_plan(path, m, plan, view, device, files); });
  if (options.digests) check_digests(path, wanted, view, bootstrap);
  return m.run;
}

}  // namespace moiety::checkpoint
