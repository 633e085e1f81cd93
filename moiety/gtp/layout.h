// The places of ranks in the grids of parallelism, and the part of a logical weight that a rank
// stores (docs/spec/gtp.md#layout). These are pure values, without communication or tensors.
#pragma once

#include <compare>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace moiety::gtp {

enum class Axis : uint8_t { kTp, kGtp, kDp, kEp, kEgtp, kEdp };
inline constexpr Axis kAllAxes[] = {Axis::kTp, Axis::kGtp,  Axis::kDp,
                                    Axis::kEp, Axis::kEgtp, Axis::kEdp};
const char* name(Axis axis);
constexpr bool of_experts(Axis axis) { return axis >= Axis::kEp; }

// A set of axes of one grid.
class Axes {
 public:
  constexpr Axes() = default;
  constexpr Axes(std::initializer_list<Axis> axes) {
    for (const Axis axis : axes) bits_ = static_cast<uint8_t>(bits_ | 1u << static_cast<int>(axis));
  }
  constexpr bool has(Axis axis) const { return (bits_ >> static_cast<int>(axis) & 1) != 0; }
  constexpr void add(Axis axis) { *this = Axes(bits_ | Axes({axis}).bits_); }
  constexpr Axes without(Axis axis) const {
    Axes out = *this;
    out.bits_ = static_cast<uint8_t>(bits_ & ~(1u << static_cast<int>(axis)));
    return out;
  }
  friend constexpr auto operator<=>(Axes, Axes) = default;

 private:
  constexpr explicit Axes(int bits) : bits_(static_cast<uint8_t>(bits)) {}
  uint8_t bits_ = 0;
};
// The axes as text: "dp x tp".
std::string name(Axes axes);

// Two grids over the same ranks, the fastest axis first:
//   dense   rank = tp + TP * (gtp + GTP * dp)
//   expert  rank = ep + EP * (egtp + EGTP * edp)
// The axes of one are independent of those of the other (egtp != gtp is normal). Members are the
// degrees.
struct Grid {
  int tp = 1, gtp = 1, dp = 1, ep = 1, egtp = 1, edp = 1;

  int degree(Axis axis) const;
  // The size of the group over a set of axes.
  int degree(Axes axes) const;
  // The axes that have several ranks; groups are the same without the others.
  Axes several(Axes axes) const;
  // The rank's coordinate on an axis.
  int place(Axis axis, int rank) const;
  // The ranks, ascending, that differ from `rank` only in these axes, `rank` included. All axes are
  // of one grid.
  std::vector<int> group(Axes axes, int rank) const;
};

// Throws Error(kInvalidArgument) naming all six degrees unless each is at least 1 and TP * GTP * DP
// == EP * EGTP * EDP == ranks.
void check_grid(const Grid& grid, int ranks);

struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
  friend bool operator==(const Range&, const Range&) = default;
};
struct Box {
  Range rows, cols;
  friend bool operator==(const Box&, const Box&) = default;
};

// The cut of a logical weight W[N, K] (out x in, row-major). TP cuts along an axis; then GTP cuts
// along the rows of the part that is left to a TP rank (its slice), which are padded so that all
// shards are of equal size. Experts have no TP; they take egtp as GTP, and their number is an index
// in front.
//
//    N_tp = N / TP or N, K_tp = K / TP or K        the slice, exact
//    s    = up(N_tp, A * G) / G                    rows of a shard;  M = s * G when gathered
//    rows [g * s, (g + 1) * s) of the slice are rank g's, as far as they exist; the rest of its
//    shard is padding: zero in weight, master, moments and gradient, always, and a tail of the
//    gathered tensor. A rank may have nothing but padding.
//
// The padding comes after the TP cut: before it, slices would begin off the grid of blocks.
struct Layout {
  int64_t rows = 0, cols = 0;  // N, K
  int tp_axis = -1;            // 0: rows (column-parallel), 1: columns (row-parallel), -1: not cut
  int tp_rank = 0, tp_size = 1;
  int gtp_rank = 0, gtp_size = 1;
  int64_t align = 16;  // A, of the codec
  // The unit along its axis that TP must not part: the least common multiple of the codec's block
  // (so that codes do not depend on TP), the 2i rows of a GLU interleaved by i, and a group of
  // heads.
  int64_t tp_unit = 1;
  // The rows are a vocabulary, which TP cuts into up(ceil(N / TP), A): the last slices are short or
  // empty.
  bool vocabulary = false;

  int64_t slice_rows() const;  // N_tp, rows that do not exist included
  int64_t slice_cols() const;  // K_tp
  int64_t real_rows() const;   // rows of the slice that exist
  int64_t shard_rows() const;  // s
  int64_t padded_rows() const { return shard_rows() * gtp_size; }  // M
  // The rows of the slice that exist and are gtp rank g's; if there are none, empty at the slice's
  // end.
  Range valid(int g) const;
  // The part of W that gtp rank g holds.
  Box global_box(int g) const;
};

// Throws Error(kInvalidArgument) naming the tensor, the dimension, its value and the number that it
// has to be a multiple of.
void check_layout(std::string_view tensor, const Layout& layout);

}  // namespace moiety::gtp
