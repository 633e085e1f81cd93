#include "moiety/base/crc32c.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/reshard.h"
#include "tests/fuzz/memory_files.h"
#include "tests/fuzz/targets.h"

namespace moiety::fuzz {
namespace {

using namespace checkpoint;

// The first row, or rows of the first expert, of every tensor, as another layout might need it.
StateView first_rows(const PackedState& state) {
  constexpr int64_t kRows = 64;
  StateView needs;
  for (const auto& [key, slot] : state.slots()) {
    Box box = whole(slot.shape);
    if (box.rank > 0 && box.size[0] > 1) box.size[0] = 1;
    if (box.rank > 1 && box.size[1] > kRows) box.size[1] = kRows;
    needs.push_back({key.first, key.second, slot.dtype, slot.shape, box, nullptr});
  }
  return needs;
}

// A manifest that its reader took.
void use(const Manifest& m) {
  const std::string json = encode_manifest(m);
  require(parse_manifest(json) == m, "a manifest survives being written");
  check_tiling(m);
  uint64_t elements = 0, planned = 0;
  const PackedState state(m);
  const StateView needs = first_rows(state);
  for (const StatePiece& need : needs) elements += static_cast<uint64_t>(volume(need.box));
  for (const BoxCopy& copy : plan_reshard(state, needs)) {
    require(contains(copy.from, copy.region), "a region lies in its piece");
    require(contains(needs[copy.need].box, copy.region), "a region lies in what needs it");
    planned += static_cast<uint64_t>(volume(copy.region));
  }
  require(planned == elements, "everything is planned once");
}

}  // namespace

void manifest(std::string_view json) {
  try {
    use(parse_manifest(json));
  } catch (const CheckpointError&) {
  }
}

void commit(std::string_view input) {
  const size_t line = std::min(input.find('\n'), input.size() - (input.empty() ? 0 : 1));
  const std::string_view word = input.substr(0, line + 1), json = input.substr(word.size());
  // The text runs as it is, and with the end that it should have.
  std::string fitting(word.substr(0, word.find(' ', 22)));
  fitting += text(" {} {:08x}\n", json.size(), crc32c(json));
  for (const std::string_view commit : {word, std::string_view(fitting)}) {
    MemoryFiles files({{"c/COMMIT", commit}, {"c/manifest.json", json}});
    try {
      use(read_manifest("c", files));
    } catch (const CheckpointError&) {
    }
  }
}

}  // namespace moiety::fuzz
