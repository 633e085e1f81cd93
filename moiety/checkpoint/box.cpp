#include "moiety/checkpoint/box.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "moiety/base/error.h"

namespace moiety::checkpoint {
namespace {

int64_t end_of(const Box& box, int d) { return box.start[d] + box.size[d]; }

// The dimension along which the boxes begin at the most places. Along it a sweep has only few boxes
// open at a time.
int sweep_dimension(std::span<const Box> boxes) {
  int best = 0;
  size_t most = 0;
  std::vector<int64_t> starts;
  for (int d = 0; d < boxes[0].rank; ++d) {
    starts.clear();
    for (const Box& b : boxes) starts.push_back(b.start[d]);
    std::sort(starts.begin(), starts.end());
    const size_t distinct = std::unique(starts.begin(), starts.end()) - starts.begin();
    if (distinct > most) {
      most = distinct;
      best = d;
    }
  }
  return best;
}

std::optional<Box> find_overlap(std::span<const Box> boxes) {
  if (boxes.size() < 2) return std::nullopt;
  if (boxes[0].rank == 0) return boxes[0];
  const int d = sweep_dimension(boxes);
  std::vector<Box> sorted(boxes.begin(), boxes.end());
  std::sort(sorted.begin(), sorted.end(),
            [d](const Box& a, const Box& b) { return a.start[d] < b.start[d]; });
  std::vector<const Box*> open;
  for (const Box& box : sorted) {
    std::erase_if(open, [&](const Box* o) { return end_of(*o, d) <= box.start[d]; });
    for (const Box* o : open) {
      if (auto common = intersect(*o, box)) return common;
    }
    open.push_back(&box);
  }
  return std::nullopt;
}

// A part of `target` that none of the boxes touches, found depth first: the parts of the target
// that the first box leaves are looked for in the others.
std::optional<Box> find_hole(const Box& target, std::span<const Box> boxes) {
  std::vector<std::pair<Box, size_t>> todo{{target, 0}};
  while (!todo.empty()) {
    auto [rest, next] = todo.back();
    todo.pop_back();
    std::optional<Box> common;
    while (next < boxes.size() && !(common = intersect(rest, boxes[next]))) ++next;
    if (!common) return rest;
    for (int d = 0; d < rest.rank; ++d) {
      Box before = rest, after = rest;
      before.size[d] = common->start[d] - rest.start[d];
      after.start[d] = end_of(*common, d);
      after.size[d] = end_of(rest, d) - end_of(*common, d);
      if (after.size[d] > 0) todo.emplace_back(after, next + 1);
      if (before.size[d] > 0) todo.emplace_back(before, next + 1);
      rest.start[d] = common->start[d];
      rest.size[d] = common->size[d];
    }
  }
  return std::nullopt;
}

}  // namespace

int64_t volume(const Box& box) {
  int64_t n = 1;
  for (int d = 0; d < box.rank; ++d) n *= box.size[d];
  return n;
}

const char* shape_fault(std::span<const int64_t> shape) {
  if (shape.size() > kMaxBoxRank) return "a tensor has more than 4 dimensions";
  int64_t elements = 1;
  for (const int64_t size : shape) {
    if (size < 0) return "a dimension of a tensor is negative";
    if (__builtin_mul_overflow(elements, size, &elements) || elements > int64_t{1} << 59) {
      return "a tensor has over 2^59 elements";
    }
  }
  return nullptr;
}

Box whole(std::span<const int64_t> shape) {
  const char* fault = shape_fault(shape);
  MOIETY_CHECK(!fault, "checkpoint: {}", fault);
  Box box;
  box.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), box.size.begin());
  return box;
}

bool contains(const Box& outer, const Box& inner) {
  if (outer.rank != inner.rank) return false;
  for (int d = 0; d < outer.rank; ++d) {
    if (inner.size[d] < 0 || inner.start[d] < outer.start[d] ||
        inner.size[d] > outer.size[d] - (inner.start[d] - outer.start[d])) {
      return false;
    }
  }
  return true;
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box common;
  common.rank = a.rank;
  for (int d = 0; d < a.rank; ++d) {
    common.start[d] = std::max(a.start[d], b.start[d]);
    common.size[d] = std::min(end_of(a, d), end_of(b, d)) - common.start[d];
    if (common.size[d] <= 0) return std::nullopt;
  }
  return common;
}

void cut_box(const Box& box, int64_t element_bytes, int64_t limit, std::vector<Box>& parts) {
  int d = 0;
  while (d < box.rank && box.size[d] == 1) ++d;
  const int64_t bytes = element_bytes * volume(box);
  if (bytes <= limit || d == box.rank) {
    parts.push_back(box);
    return;
  }
  const int64_t step = std::max<int64_t>(1, limit / (bytes / box.size[d]));
  const int64_t end = end_of(box, d);
  for (int64_t at = box.start[d]; at < end; at += step) {
    Box part = box;
    part.start[d] = at;
    part.size[d] = std::min(step, end - at);
    cut_box(part, element_bytes, limit, parts);
  }
}

std::string describe(const Box& box) {
  std::string out = "[";
  for (int d = 0; d < box.rank; ++d) {
    out += text("{}{}:{}", d ? "," : "", box.start[d], end_of(box, d));
  }
  return out + "]";
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string out = "[";
  for (size_t d = 0; d < shape.size(); ++d) out += text("{}{}", d ? "," : "", shape[d]);
  return out + "]";
}

std::optional<std::string> cover_fault(const Box& target, std::span<const Box> boxes) {
  std::vector<Box> filled;
  int64_t covered = 0;
  for (const Box& b : boxes) {
    if (volume(b) == 0) continue;
    filled.push_back(b);
    covered += volume(b);
    if (covered > volume(target)) break;  // the overlap is among those seen
  }
  if (auto twice = find_overlap(filled)) return describe(*twice) + " is covered twice";
  if (covered == volume(target)) return std::nullopt;
  return describe(*find_hole(target, filled)) + " is not covered";
}

BoxRuns::BoxRuns(const Box& outer, const Box& inner) {
  // Trailing dimensions that inner takes wholly join the run.
  int d = outer.rank;
  int64_t stride = 1;
  length_ = 1;
  bool joined = true;
  while (d > 0 && joined) {
    --d;
    length_ *= inner.size[d];
    first_ += (inner.start[d] - outer.start[d]) * stride;
    stride *= outer.size[d];
    joined = inner.size[d] == outer.size[d];
  }
  dims_ = d;
  count_ = 1;
  for (--d; d >= 0; --d) {
    size_[d] = inner.size[d];
    stride_[d] = stride;
    count_ *= inner.size[d];
    first_ += (inner.start[d] - outer.start[d]) * stride;
    stride *= outer.size[d];
  }
  if (length_ == 0) count_ = 0;
}

int64_t BoxRuns::outer_offset(int64_t k) const {
  int64_t offset = first_;
  for (int d = dims_ - 1; d >= 0; --d) {
    offset += k % size_[d] * stride_[d];
    k /= size_[d];
  }
  return offset;
}

std::vector<RowCopy> row_copies(const Box& region, int64_t element_bytes, const Box& from,
                                const Box& to) {
  const BoxRuns in(from, region), out(to, region);
  // Runs of both have lengths that are multiples of the shorter one's.
  const int64_t length = std::min(in.length(), out.length());
  std::vector<RowCopy> copies;
  if (length == 0) return copies;
  const int64_t in_parts = in.length() / length, out_parts = out.length() / length;
  const int64_t count = in.count() * in_parts;
  for (int64_t k = 0; k < count; ++k) {
    RowCopy row;
    row.from = (in.outer_offset(k / in_parts) + k % in_parts * length) * element_bytes;
    row.to = (out.outer_offset(k / out_parts) + k % out_parts * length) * element_bytes;
    row.bytes = length * element_bytes;
    if (!copies.empty()) {
      RowCopy& last = copies.back();
      const int64_t from_pitch = row.from - last.from - (last.rows - 1) * last.from_pitch;
      const int64_t to_pitch = row.to - last.to - (last.rows - 1) * last.to_pitch;
      if (last.rows == 1 || (from_pitch == last.from_pitch && to_pitch == last.to_pitch)) {
        last.from_pitch = from_pitch;
        last.to_pitch = to_pitch;
        ++last.rows;
        continue;
      }
    }
    copies.push_back(row);
  }
  return copies;
}

void copy_region(const Box& region, int64_t element_bytes, const Box& from, const std::byte* source,
                 const Box& to, std::byte* destination) {
  for (const RowCopy& c : row_copies(region, element_bytes, from, to)) {
    for (int64_t row = 0; row < c.rows; ++row) {
      std::memcpy(destination + c.to + row * c.to_pitch, source + c.from + row * c.from_pitch,
                  static_cast<size_t>(c.bytes));
    }
  }
}

}  // namespace moiety::checkpoint
