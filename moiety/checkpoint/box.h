// Boxes: ranges in every dimension of a logical tensor. Their volumes, intersections and covers,
// and the places of their elements in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moiety/optim/state_view.h"

namespace moiety::checkpoint {

using optim::Box;
using optim::kMaxBoxRank;
using optim::StatePiece;
using optim::StateView;

int64_t volume(const Box& box);
// The reason why a tensor of this shape cannot be stored: more than kMaxBoxRank dimensions, a
// negative one, or more than 2^59 elements. Null if it can be stored.
const char* shape_fault(std::span<const int64_t> shape);
// The box of a whole tensor. Throws Error(kInvalidArgument) on a shape_fault.
Box whole(std::span<const int64_t> shape);
bool contains(const Box& outer, const Box& inner);
// The common part; empty if there is none.
std::optional<Box> intersect(const Box& a, const Box& b);
// Cuts `box` into parts of at most `limit` bytes and appends them, along the first dimension with
// more than one index: a part is one run of the box's elements. One index of the last dimension is
// never cut.
void cut_box(const Box& box, int64_t element_bytes, int64_t limit, std::vector<Box>& parts);
// The box as text: "[0:16,4:8]".
std::string describe(const Box& box);
// The shape as text: "[16,8]".
std::string shape_text(std::span<const int64_t> shape);

// The reason why `boxes`, all of them in `target`, do not cover every element of it exactly once:
// "[0:1,4:8] is not covered", "[0:1,4:8] is covered twice". Empty if they do.
std::optional<std::string> cover_fault(const Box& target, std::span<const Box> boxes);

// The elements of `inner` as runs that are consecutive when `outer` is stored row-major: `count`
// runs of `length` elements. Run k begins at element `outer_offset(k)` of outer, and at k * length
// of inner.
class BoxRuns {
 public:
  BoxRuns(const Box& outer, const Box& inner);
  int64_t count() const { return count_; }
  int64_t length() const { return length_; }
  int64_t outer_offset(int64_t k) const;

 private:
  int dims_ = 0;  // leading dimensions that runs are counted over
  int64_t first_ = 0;
  int64_t count_ = 0;
  int64_t length_ = 0;
  std::array<int64_t, kMaxBoxRank> size_{};
  std::array<int64_t, kMaxBoxRank> stride_{};
};

// A copy of rows with the same number of bytes each, which begin a fixed number of bytes apart.
struct RowCopy {
  int64_t from = 0, to = 0;  // bytes from the beginning of either box to the first row
  int64_t bytes = 0, rows = 1;
  int64_t from_pitch = 0, to_pitch = 0;
};
// The copies that move the elements of `region` from one row-major box to another, both of which
// contain it; as few as possible, in ascending order.
std::vector<RowCopy> row_copies(const Box& region, int64_t element_bytes, const Box& from,
                                const Box& to);
void copy_region(const Box& region, int64_t element_bytes, const Box& from, const std::byte* source,
                 const Box& to, std::byte* destination);

}  // namespace moiety::checkpoint
