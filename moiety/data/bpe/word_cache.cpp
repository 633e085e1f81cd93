#include "moiety/data/bpe/word_cache.h"

#include <cstring>

namespace moiety::data::bpe {

uint64_t WordCache::hash(std::string_view word) {
  uint64_t h = 0x9e3779b97f4a7c15u * (word.size() + 1);
  while (!word.empty()) {
    uint64_t part = 0;
    const size_t bytes = word.size() < 8 ? word.size() : 8;
    std::memcpy(&part, word.data(), bytes);
    h = (h ^ part) * 0xff51afd7ed558ccdu;
    h ^= h >> 32;
    word.remove_prefix(bytes);
  }
  return h;
}

size_t WordCache::slot_of(std::string_view word, uint64_t hash) const {
  for (size_t at = hash % kSlots;; at = (at + 1) % kSlots) {
    const Slot& s = slots_[at];
    if (s.ids == 0) return at;
    if (s.hash == hash && std::string_view(texts_).substr(s.text, s.bytes) == word) return at;
  }
}

std::span<const uint32_t> WordCache::find(std::string_view word, uint64_t hash) const {
  const Slot& s = slots_[slot_of(word, hash)];
  return {ids_.data() + s.first_id, s.ids};
}

void WordCache::add(std::string_view word, uint64_t hash, std::span<const uint32_t> ids) {
  if (ids.empty() || ids.size() > UINT16_MAX) return;
  if (words_ == kMostWords) {
    slots_.assign(kSlots, {});
    texts_.clear();
    ids_.clear();
    words_ = 0;
  }
  slots_[slot_of(word, hash)] = {
      hash, static_cast<uint32_t>(texts_.size()), static_cast<uint32_t>(ids_.size()),
      static_cast<uint16_t>(word.size()), static_cast<uint16_t>(ids.size())};
  texts_ += word;
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  ++words_;
}

}  // namespace moiety::data::bpe
