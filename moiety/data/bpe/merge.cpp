#include "moiety/data/bpe/merge.h"

#include <algorithm>
#include <bit>

#include "moiety/base/error.h"
#include "moiety/base/printable.h"
#include "moiety/data/bpe/code_points.h"

namespace moiety::data::bpe {
namespace {

constexpr size_t kShort = 24;  // symbols up to which looking at all pairs beats a heap
constexpr std::string_view kMark = "\xe2\x96\x81";

// Whether a mark stands behind another character.
bool has_inner_mark(std::string_view s) {
  for (size_t at = s.find(kMark); at != s.npos; at = s.find(kMark, at + kMark.size())) {
    if (at > 0 && !s.substr(0, at).ends_with(kMark)) return true;
  }
  return false;
}

}  // namespace

void MergeTable::reserve(size_t merges) {
  slots_.assign(std::bit_ceil(merges * 2 + 1), {});
  mask_ = slots_.size() - 1;
}

void MergeTable::set(uint32_t left, uint32_t right, Merge merge) {
  size_t at = place(left, right);
  while (slots_[at].merge.rank != kNone && (slots_[at].left != left || slots_[at].right != right)) {
    at = (at + 1) & mask_;
  }
  slots_[at] = {left, right, merge};
}

Model::Model(const Spec& spec, const std::string& file)
    : of_bytes_(spec.is_of_bytes()),
      ignore_merges_(spec.ignore_merges),
      byte_fallback_(spec.byte_fallback),
      fuse_unk_(spec.fuse_unk),
      has_unk_(spec.unk_token.has_value()),
      file_(file) {
  texts_.reserve(spec.vocab.size());
  std::vector<uint32_t> numbers;
  for (const auto& [id, spelling] : spec.vocab) {
    if (spec.unk_token == spelling) unk_id_ = id;
    if (!of_bytes_) {
      texts_.push_back(spelling);
    } else if (std::optional<std::string> bytes = unspell_bytes(spelling)) {
      texts_.push_back(std::move(*bytes));
    } else {
      continue;  // no text becomes it
    }
    numbers.push_back(id);
  }
  ids_.reserve(texts_.size());
  for (size_t i = 0; i < texts_.size(); ++i) ids_.emplace(texts_[i], numbers[i]);
  for (int b = 0; b < 256; ++b) {
    if (of_bytes_ || b < 128) starts_[size_t(b)] = start_of(std::string(1, static_cast<char>(b)));
  }
  read_merges(spec, file);
}

void Model::read_merges(const Spec& spec, const std::string& file) {
  std::unordered_map<std::string_view, uint32_t> spelled;
  spelled.reserve(spec.vocab.size());
  for (const auto& [id, spelling] : spec.vocab) spelled.emplace(spelling, id);
  merges_.reserve(spec.merges.size());
  may_cut_at_marks_ = !of_bytes_ && !ignore_merges_ && ids_.contains(kMark);
  for (size_t m = 0; m < spec.merges.size(); ++m) {
    const auto& [left, right] = spec.merges[m];
    const std::string whole = left + right;
    const auto id_of = [&](const std::string& s) {
      const auto it = spelled.find(s);
      if (it != spelled.end()) return it->second;
      throw DataError("{}: model.merges[{}]: {} is not in model.vocab", file, m, printable(s));
    };
    merges_.set(id_of(left), id_of(right), {static_cast<uint32_t>(m), id_of(whole)});
    may_cut_at_marks_ = may_cut_at_marks_ && !has_inner_mark(whole);
  }
}

uint32_t Model::unknown_id() const {
  if (unk_id_ != UINT32_MAX) return unk_id_;
  throw DataError("{}: model.unk_token is not in model.vocab, and a text needs it", file_);
}

Model::Start Model::start_of(std::string_view character) const {
  Start start;
  if (const auto it = ids_.find(character); it != ids_.end()) {
    start.kind = Start::Kind::kKnown;
    start.id = it->second;
    return start;
  }
  if (!byte_fallback_) return start;
  // The bytes are those of the character as vocabularies spell it.
  for (const char c : of_bytes_ ? spell_bytes(character) : std::string(character)) {
    const std::string spelling = text("<0x{:02X}>", static_cast<unsigned char>(c));
    const std::optional<std::string> own = of_bytes_ ? unspell_bytes(spelling) : spelling;
    const auto it = own ? ids_.find(*own) : ids_.end();
    if (it == ids_.end()) return start;
    start.bytes.push_back(it->second);
  }
  start.kind = Start::Kind::kBytes;
  return start;
}

// An unknown character waits for its successor, with which it may fuse; bytes do not end the wait.
void Model::add_start(const Start& start, bool& unknown, std::vector<uint32_t>& ids) const {
  switch (start.kind) {
    case Start::Kind::kKnown:
      if (unknown) ids.push_back(unknown_id());
      unknown = false;
      ids.push_back(start.id);
      break;
    case Start::Kind::kBytes:
      ids.insert(ids.end(), start.bytes.begin(), start.bytes.end());
      break;
    case Start::Kind::kUnknown:
      if (!has_unk_) break;
      if (unknown && !fuse_unk_) ids.push_back(unknown_id());
      unknown = true;
  }
}

void Model::start(std::string_view word, std::vector<uint32_t>& ids) const {
  bool unknown = false;
  ids.clear();
  for (size_t at = 0; at < word.size();) {
    const size_t end = of_bytes_ ? at + 1 : next_character(word, at);
    if (end == at + 1) {
      add_start(starts_[static_cast<unsigned char>(word[at])], unknown, ids);
    } else {
      add_start(start_of(word.substr(at, end - at)), unknown, ids);
    }
    at = end;
  }
  if (unknown) ids.push_back(unknown_id());
}

void Model::merge_short(Scratch& s) const {
  std::vector<uint32_t>& ids = s.ids;
  const auto rank_at = [&](size_t i) { return merges_.find(ids[i], ids[i + 1]).rank; };
  s.ranks.resize(ids.size());
  for (size_t i = 0; i + 1 < ids.size(); ++i) s.ranks[i] = rank_at(i);
  for (size_t n = ids.size(); n > 1; --n) {
    const auto best = std::min_element(s.ranks.begin(), s.ranks.begin() + ptrdiff_t(n) - 1);
    if (*best == MergeTable::kNone) break;
    const auto at = static_cast<size_t>(best - s.ranks.begin());
    ids[at] = merges_.find(ids[at], ids[at + 1]).id;
    ids.erase(ids.begin() + ptrdiff_t(at) + 1);
    s.ranks.erase(s.ranks.begin() + ptrdiff_t(at));
    if (at > 0) s.ranks[at - 1] = rank_at(at - 1);
    if (at + 1 < ids.size()) s.ranks[at] = rank_at(at);
  }
}

// Symbols are a list; merges wait in a heap, and one that has become another since is passed over.
void Model::merge_long(Scratch& s) const {
  const auto n = static_cast<int32_t>(s.ids.size());
  s.symbols.resize(s.ids.size());
  for (int32_t i = 0; i < n; ++i)
    s.symbols[size_t(i)] = {s.ids[size_t(i)], i - 1, i + 1 < n ? i + 1 : -1};
  const auto later = [](const Waiting& a, const Waiting& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  s.waiting.clear();
  const auto merge_at = [&](int32_t at) {
    const Symbol& left = s.symbols[size_t(at)];
    if (left.after < 0) return MergeTable::Merge{MergeTable::kNone, 0};
    return merges_.find(left.id, s.symbols[size_t(left.after)].id);
  };
  const auto add = [&](int32_t at) {
    const MergeTable::Merge merge = merge_at(at);
    if (merge.rank != MergeTable::kNone) s.waiting.push_back({merge.rank, at, merge.id});
    return merge.rank != MergeTable::kNone;
  };
  for (int32_t i = 0; i < n; ++i) add(i);
  std::make_heap(s.waiting.begin(), s.waiting.end(), later);
  constexpr uint32_t kGone = UINT32_MAX;
  while (!s.waiting.empty()) {
    std::pop_heap(s.waiting.begin(), s.waiting.end(), later);
    const Waiting w = s.waiting.back();
    s.waiting.pop_back();
    Symbol& left = s.symbols[size_t(w.at)];
    if (left.id == kGone) continue;
    const MergeTable::Merge merge = merge_at(w.at);
    if (merge.rank == MergeTable::kNone || merge.id != w.id) continue;
    Symbol& right = s.symbols[size_t(left.after)];
    left.id = w.id;
    left.after = right.after;
    right.id = kGone;
    if (left.after >= 0) s.symbols[size_t(left.after)].before = w.at;
    if (add(w.at)) std::push_heap(s.waiting.begin(), s.waiting.end(), later);
    if (left.before >= 0 && add(left.before)) {
      std::push_heap(s.waiting.begin(), s.waiting.end(), later);
    }
  }
  s.ids.clear();
  for (int32_t at = 0; at >= 0; at = s.symbols[size_t(at)].after) {
    s.ids.push_back(s.symbols[size_t(at)].id);
  }
}

void Model::encode(std::string_view word, Scratch& s, std::vector<uint32_t>& ids) const {
  if (word.empty()) return;
  if (ignore_merges_) {
    if (const auto it = ids_.find(word); it != ids_.end()) {
      ids.push_back(it->second);
      return;
    }
  }
  const bool is_cached = word.size() <= WordCache::kLongest;
  const uint64_t hash = is_cached ? WordCache::hash(word) : 0;
  if (is_cached) {
    const std::span<const uint32_t> known = s.cache.find(word, hash);
    if (!known.empty()) {
      ids.insert(ids.end(), known.begin(), known.end());
      return;
    }
  }
  start(word, s.ids);
  s.ids.size() <= kShort ? merge_short(s) : merge_long(s);
  if (is_cached) s.cache.add(word, hash, s.ids);
  ids.insert(ids.end(), s.ids.begin(), s.ids.end());
}

}  // namespace moiety::data::bpe
