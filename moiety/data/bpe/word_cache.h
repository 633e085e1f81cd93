// The ids of words that were met before. A word's ids depend on its bytes alone, so what is
// remembered changes no result.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moiety::data::bpe {

class WordCache {
 public:
  static constexpr size_t kLongest = 64;  // bytes of a word

  // The ids of a word, or nothing if it is not there; good until the next add().
  std::span<const uint32_t> find(std::string_view word, uint64_t hash) const;
  // Adds a word that is not there. Everything else is forgotten when there is too much.
  void add(std::string_view word, uint64_t hash, std::span<const uint32_t> ids);

  static uint64_t hash(std::string_view word);

 private:
  static constexpr size_t kSlots = 1 << 16, kMostWords = kSlots / 2;
  struct Slot {
    uint64_t hash = 0;
    uint32_t text = 0, first_id = 0;  // places
    uint16_t bytes = 0, ids = 0;      // no ids: a free slot
  };
  size_t slot_of(std::string_view word, uint64_t hash) const;

  std::vector<Slot> slots_ = std::vector<Slot>(kSlots);
  std::string texts_;
  std::vector<uint32_t> ids_;
  size_t words_ = 0;
};

}  // namespace moiety::data::bpe
