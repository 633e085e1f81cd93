#include "moiety/checkpoint/key_remap.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>

#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/json.h"

namespace moiety::checkpoint {
namespace {

// A kind of tensor that every module may have, and its dimensions when it is packed.
struct Leaf {
  const char* name;
  size_t dims;
};
constexpr Leaf kLeaves[] = {{"weight", 3}, {"bias", 2}};

// The keys of one module and leaf, by what stands behind the leaf's name.
struct Family {
  std::string base;  // "layers.3.moe.experts.fc1.weight"
  size_t dims = 0;
  const KeyShape* packed = nullptr;
  std::map<int64_t, const KeyShape*> indexed;
};

using Keys = std::map<std::string_view, const KeyShape*>;

// The index behind a base name; none if it is another kind of name.
std::optional<int64_t> index_of(const std::string& where, std::string_view key, size_t base,
                                int64_t experts) {
  const std::string_view digits = key.substr(base);
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if (digits.empty() || !std::all_of(digits.begin(), digits.end(), is_digit)) return std::nullopt;
  if (digits.size() > 1 && digits[0] == '0') {
    refuse("{}: {} has an index with leading zeros", where, json_string(key));
  }
  int64_t index = 0;
  const auto [at, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  if (error != std::errc() || index >= experts) {
    refuse("{}: {} is of none of {} experts", where, json_string(key), experts);
  }
  return index;
}

Family find_family(const std::string& where, const Keys& keys, const ExpertModule& module,
                   const Leaf& leaf) {
  Family family{module.name + "." + leaf.name, leaf.dims, nullptr, {}};
  for (auto at = keys.lower_bound(family.base);
       at != keys.end() && at->first.starts_with(family.base); ++at) {
    if (at->first == family.base) {
      family.packed = at->second;
    } else if (const auto index = index_of(where, at->first, family.base.size(), module.experts)) {
      family.indexed[*index] = at->second;
    }
  }
  return family;
}

// Throws if some indices are there without the others.
void check_complete(const std::string& where, const Family& family, int64_t experts) {
  const auto found = static_cast<int64_t>(family.indexed.size());
  if (found == 0 || found == experts) return;
  constexpr int64_t kMostListed = 20;
  std::string missing;
  int64_t listed = 0, next = 0;
  const auto list_up_to = [&](int64_t end) {
    for (; next < end && listed < kMostListed; ++next, ++listed) {
      missing += text("{}{}", listed ? ", " : "", next);
    }
    next = end + 1;
  };
  for (const auto& [index, key] : family.indexed) list_up_to(index);
  list_up_to(experts);
  if (experts - found > listed) missing += ", ...";
  refuse("{}: {}<index> is there for {} of {} experts; missing are {}", where, family.base, found,
         experts, missing);
}

void check_family(const std::string& where, const Family& family, const ExpertModule& module,
                  const KeyTarget& target) {
  if (family.packed && !family.indexed.empty()) {
    refuse("{}: both {} and {} are there: which of them counts?", where, family.base,
           family.indexed.begin()->second->name);
  }
  check_complete(where, family, module.experts);
  if (family.indexed.empty() && !family.packed) return;
  const KeyShape& one = family.packed ? *family.packed : *family.indexed.begin()->second;
  const size_t dims = family.packed ? family.dims : family.dims - 1;
  if (one.shape.size() != dims || (family.packed && one.shape[0] != module.experts)) {
    refuse("{}: {} has shape {}, expected {} dimensions{}", where, one.name, shape_text(one.shape),
           dims, family.packed ? text(", the first of {} experts", module.experts) : "");
  }
  for (const auto& [index, key] : family.indexed) {
    if (key->shape == one.shape) continue;
    refuse("{}: {} has shape {}, {} has {}", where, one.name, shape_text(one.shape), key->name,
           shape_text(key->shape));
  }
  if (!module.gated) return;
  const int64_t rows = one.shape[family.packed ? 1 : 0];
  if (rows % 2 != 0) refuse("{}: {} has {} rows, which are no halves", where, one.name, rows);
  for (const int64_t s : {target.from_interleave, target.to_interleave}) {
    check_interleave(s, rows / 2, where + ": " + one.name);
  }
}

void add_moves(const Family& family, const ExpertModule& module, const KeyTarget& target,
               std::vector<KeyMove>& moves) {
  KeyMove move;
  move.of_experts = true;
  move.packed_source = family.packed != nullptr;
  move.packed_target = target.form == ExpertForm::kPacked;
  if (module.gated) {
    move.from_interleave = target.from_interleave;
    move.to_interleave = target.to_interleave;
  }
  if (move.packed_source && move.packed_target) {
    move.source = move.target = *family.packed;
    moves.push_back(std::move(move));
    return;
  }
  for (int64_t e = 0; e < module.experts; ++e) {
    const std::string indexed_name = family.base + std::to_string(e);
    move.expert = e;
    if (move.packed_source) {
      const std::vector<int64_t>& all = family.packed->shape;
      move.source = *family.packed;
      move.target = {indexed_name, {all.begin() + 1, all.end()}};
    } else {
      move.source = move.target = *family.indexed.at(e);
      if (move.packed_target) {
        move.target.name = family.base;
        move.target.shape.insert(move.target.shape.begin(), module.experts);
      }
    }
    moves.push_back(move);
  }
}

int64_t end_of(const Box& box, int d) { return box.start[d] + box.size[d]; }

// The box of rows [begin, begin + rows) of an expert: `like` without its first dimensions if the
// tensor is packed, or with one more.
Box rows_box(const Box& like, bool like_packed, bool packed, int64_t expert, int64_t begin,
             int64_t rows) {
  Box box;
  const int like_row = like_packed ? 1 : 0, row = packed ? 1 : 0;
  box.rank = like.rank - like_row + row;
  if (packed) box.start[0] = expert, box.size[0] = 1;
  box.start[row] = begin;
  box.size[row] = rows;
  for (int d = 1; d < like.rank - like_row; ++d) {
    box.start[row + d] = like.start[like_row + d];
    box.size[row + d] = like.size[like_row + d];
  }
  return box;
}

}  // namespace

const char* name(ExpertForm form) { return form == ExpertForm::kPacked ? "packed" : "indexed"; }

std::string ExpertLayout::describe() const {
  return text("{}, interleave {}", checkpoint::name(form), interleave);
}

void check_interleave(int64_t s, int64_t half, const std::string& where) {
  if (s == 0 || (s > 0 && s % 8 == 0 && half % s == 0)) return;
  refuse("{}: interleave {} must be 0, or a multiple of 8 that divides the {} rows of a half",
         where, s, half);
}

std::vector<KeyMove> key_remap(std::span<const KeyShape> keys, const KeyTarget& target,
                               const std::string& where) {
  Keys by_name;
  for (const KeyShape& key : keys) {
    if (!by_name.emplace(key.name, &key).second) {
      refuse("{}: {} is there twice", where, json_string(key.name));
    }
  }
  std::vector<KeyMove> moves;
  for (const ExpertModule& module : target.modules) {
    for (const Leaf& leaf : kLeaves) {
      const Family family = find_family(where, by_name, module, leaf);
      check_family(where, family, module, target);
      if (family.packed || !family.indexed.empty()) add_moves(family, module, target, moves);
      if (family.packed) by_name.erase(family.base);
      for (const auto& [index, key] : family.indexed) by_name.erase(key->name);
    }
  }
  for (const auto& [name, key] : by_name) {
    KeyMove& move = moves.emplace_back();
    move.source = move.target = *key;
  }
  return moves;
}

std::vector<MovedRows> moved_rows(int64_t begin, int64_t end, int64_t rows, int64_t from,
                                  int64_t to) {
  if (from == to) return {{begin, begin, end - begin}};
  const int64_t half = rows / 2;
  std::vector<MovedRows> out;
  for (int64_t row = begin; row < end;) {
    // The row as f of half h, and how many of the next ones follow it in both orders.
    const int64_t h = to == 0 ? row / half : row % (2 * to) / to;
    const int64_t f = to == 0 ? row % half : row / (2 * to) * to + row % to;
    int64_t run = std::min(end - row, half - f);
    for (const int64_t s : {from, to}) {
      if (s > 0) run = std::min(run, s - f % s);
    }
    const int64_t source = from == 0 ? h * half + f : f / from * 2 * from + h * from + f % from;
    out.push_back({source, row, run});
    row += run;
  }
  return out;
}

std::vector<MovedBox> moved_boxes(const KeyMove& move, const Box& box) {
  const bool same_form = move.packed_source == move.packed_target;
  if (!move.of_experts || (same_form && move.from_interleave == move.to_interleave)) {
    return {{box, box}};
  }
  if (volume(box) == 0) return {};
  const int row = move.packed_target ? 1 : 0;
  const int64_t rows = move.target.shape[row];
  int64_t first = move.expert, last = move.expert + 1;
  if (move.packed_target) {
    first = move.expert < 0 ? box.start[0] : std::max(first, box.start[0]);
    last = move.expert < 0 ? end_of(box, 0) : std::min(last, end_of(box, 0));
  }
  std::vector<MovedBox> out;
  const std::vector<MovedRows> runs =
      moved_rows(box.start[row], end_of(box, row), rows, move.from_interleave, move.to_interleave);
  for (int64_t expert = first; expert < last; ++expert) {
    for (const MovedRows& run : runs) {
      out.push_back(
          {rows_box(box, move.packed_target, move.packed_source, expert, run.from, run.rows),
           rows_box(box, move.packed_target, move.packed_target, expert, run.to, run.rows)});
    }
  }
  return out;
}

}  // namespace moiety::checkpoint
