#include <algorithm>
#include <iterator>
#include <numeric>

#include "apps/moiety/config/options.h"
#include "apps/moiety/exit_code.h"
#include "moiety/base/printable.h"

namespace moiety::app {
namespace {

// What is demanded of a key: of a run that continues, and among the ranks of one.
struct Demand {
  Resume resume;
  AmongRanks among_ranks = AmongRanks::kSame;
};
constexpr Demand kMust{Resume::kMust}, kMay{Resume::kMay}, kFree{Resume::kFree},
    kContent{Resume::kContent};
constexpr Demand by_host(Demand demand) { return {demand.resume, AmongRanks::kByHost}; }

const std::vector<Key>& table() {
#define SECTION(section, help)
#define KEY(section, name, type, value, demand, rule, unit, help) \
  {#section,                                                      \
   #name,                                                         \
   [](Options& o) { return Key::Field(&o.section.name); },        \
   (demand).resume,                                               \
   (demand).among_ranks,                                          \
   rule,                                                          \
   unit,                                                          \
   help},
#define END_SECTION(section)
  static const std::vector<Key> keys{
#include "apps/moiety/config/option_table.inc"
  };
  return keys;
}

// Keys of the design that this version does not have yet.
constexpr std::string_view kPlanned[] = {"parallel.layout"};
// Parallelism that the design leaves out.
constexpr std::string_view kUnsupported[] = {"parallel.pp", "parallel.cp", "parallel.etp"};

bool contains(std::span<const std::string_view> list, std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

// The number of insertions, deletions and replacements that turn a into b.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

// A key that was probably meant, or nothing: a name that shares less than half is no misspelling.
std::string nearest_key(std::string_view name) {
  if (name.size() > 64) return {};
  const std::string_view last = name.substr(name.rfind('.') + 1);
  std::string best;
  size_t best_distance = std::max<size_t>(2, name.size() / 2);
  for (const Key& key : option_keys()) {
    // The right name in the wrong section is nearer than any misspelling.
    const size_t distance = key.name == last ? 0 : edit_distance(name, key.full_name());
    if (distance < best_distance) {
      best_distance = distance;
      best = key.full_name();
    }
  }
  return best;
}

}  // namespace

std::span<const Key> option_keys() { return table(); }

const Key& find_key(std::string_view name, const std::string& where) {
  for (const Key& key : option_keys()) {
    if (key.full_name() == name) return key;
  }
  if (contains(kPlanned, name)) {
    throw UsageError("{}: {} is not available in this version of Moiety", where, name);
  }
  if (contains(kUnsupported, name)) throw UsageError("{}: {} is not supported", where, name);
  const std::string nearest = nearest_key(name);
  throw UsageError(
      "{}: unknown key '{}'{}", printable(where), printable(name),
      nearest.empty() ? "; --help lists the keys" : text("; did you mean '{}'?", nearest));
}

const std::vector<Section>& option_sections() {
#define SECTION(section, help) {#section, help, {}},
#define KEY(...)
#define END_SECTION(section)
  static const std::vector<Section> sections = [] {
    std::vector<Section> list{
#include "apps/moiety/config/option_table.inc"
    };
    const std::span<const Key> keys = option_keys();
    size_t begin = 0;
    for (Section& section : list) {
      size_t end = begin;
      while (end < keys.size() && keys[end].section == section.name) ++end;
      section.keys = keys.subspan(begin, end - begin);
      begin = end;
    }
    return list;
  }();
  return sections;
}

}  // namespace moiety::app
