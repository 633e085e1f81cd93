// The model of byte-pair encoding: a word becomes ids by merging neighbours, the lowest rank first,
// the leftmost of equal ranks first.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "moiety/data/bpe/spec.h"
#include "moiety/data/bpe/word_cache.h"

namespace moiety::data::bpe {

// Ids of pairs, and the rank of the merge: an open hash table.
class MergeTable {
 public:
  struct Merge {
    uint32_t rank, id;
  };
  static constexpr uint32_t kNone = UINT32_MAX;  // as a rank

  void reserve(size_t merges);
  // A later merge of the same pair replaces the earlier one.
  void set(uint32_t left, uint32_t right, Merge merge);
  Merge find(uint32_t left, uint32_t right) const {
    for (size_t at = place(left, right);; at = (at + 1) & mask_) {
      const Slot& slot = slots_[at];
      if (slot.left == left && slot.right == right) return slot.merge;
      if (slot.merge.rank == kNone) return slot.merge;
    }
  }

 private:
  struct Slot {
    uint32_t left = 0, right = 0;
    Merge merge{kNone, 0};
  };
  size_t place(uint32_t left, uint32_t right) const {
    return ((uint64_t{left} << 32 | right) * 0x9e3779b97f4a7c15u) >> 20 & mask_;
  }
  std::vector<Slot> slots_ = std::vector<Slot>(1);
  size_t mask_ = 0;
};

// For several threads; each has a Scratch of its own.
class Model {
 public:
  // Throws DataError for merges and unknown tokens that are not in the vocabulary.
  Model(const Spec& spec, const std::string& file);

  struct Symbol {
    uint32_t id;
    int32_t before, after;  // of the symbols that are left, -1 at an end
  };
  struct Waiting {
    uint32_t rank;
    int32_t at;
    uint32_t id;
  };
  struct Scratch {
    WordCache cache;
    std::vector<uint32_t> ids;
    std::vector<uint32_t> ranks;  // of short words
    std::vector<Symbol> symbols;  // of long ones
    std::vector<Waiting> waiting;
  };

  // Appends the ids of a word: of its bytes if the spec is of bytes, else of its characters.
  void encode(std::string_view word, Scratch& scratch, std::vector<uint32_t>& ids) const;
  // Whether words may be cut before every U+2581 that stands behind another character: no merge
  // reaches across.
  bool may_cut_at_marks() const { return may_cut_at_marks_; }

 private:
  // What a character is before merging: its id, those of its bytes, or unknown.
  struct Start {
    enum class Kind { kKnown, kBytes, kUnknown } kind = Kind::kUnknown;
    uint32_t id = 0;
    std::vector<uint32_t> bytes;
  };
  Start start_of(std::string_view character) const;
  void add_start(const Start& start, bool& unknown, std::vector<uint32_t>& ids) const;
  void start(std::string_view word, std::vector<uint32_t>& ids) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;
  void read_merges(const Spec& spec, const std::string& file);
  uint32_t unknown_id() const;

  bool of_bytes_, ignore_merges_, byte_fallback_, fuse_unk_, has_unk_;
  bool may_cut_at_marks_ = false;
  uint32_t unk_id_ = UINT32_MAX;
  std::string file_;
  std::vector<std::string> texts_;  // of the vocabulary: bytes, or as it is spelled
  std::unordered_map<std::string_view, uint32_t> ids_;
  std::array<Start, 256> starts_;  // of bytes, or of ASCII
  MergeTable merges_;
};

}  // namespace moiety::data::bpe
