#include "moiety/gtp/layout.h"

#include <algorithm>
#include <optional>

#include "moiety/base/error.h"
#include "moiety/base/integer.h"

namespace moiety::gtp {
namespace {

// The number of ranks from one place of an axis to the next.
int stride(const Grid& grid, Axis axis) {
  switch (axis) {
    case Axis::kGtp:
      return grid.tp;
    case Axis::kDp:
      return grid.tp * grid.gtp;
    case Axis::kEgtp:
      return grid.ep;
    case Axis::kEdp:
      return grid.ep * grid.egtp;
    default:
      return 1;
  }
}

}  // namespace

const char* name(Axis axis) {
  constexpr const char* kNames[] = {"tp", "gtp", "dp", "ep", "egtp", "edp"};
  return kNames[static_cast<int>(axis)];
}

int Grid::degree(Axis axis) const {
  const int degrees[] = {tp, gtp, dp, ep, egtp, edp};
  return degrees[static_cast<int>(axis)];
}

std::string name(Axes axes) {
  std::string out;
  for (const Axis axis : kAllAxes) {
    if (axes.has(axis)) out += (out.empty() ? "" : " x ") + std::string(name(axis));
  }
  return out;
}

int Grid::degree(Axes axes) const {
  int ranks = 1;
  for (const Axis axis : kAllAxes) {
    if (axes.has(axis)) ranks *= degree(axis);
  }
  return ranks;
}

Axes Grid::several(Axes axes) const {
  Axes out;
  for (const Axis axis : kAllAxes) {
    if (axes.has(axis) && degree(axis) > 1) out.add(axis);
  }
  return out;
}

int Grid::place(Axis axis, int rank) const { return rank / stride(*this, axis) % degree(axis); }

std::vector<int> Grid::group(Axes axes, int rank) const {
  std::vector<int> out{rank};
  std::optional<Axis> first;
  for (const Axis axis : kAllAxes) {
    if (!axes.has(axis)) continue;
    if (!first) first = axis;
    MOIETY_CHECK(of_experts(axis) == of_experts(*first),
                 "grid: a group over {} and {}, which are axes of different grids", name(*first),
                 name(axis));
    const std::vector<int> before = std::move(out);
    out.clear();
    for (const int r : before) {
      const int begin = r - place(axis, r) * stride(*this, axis);
      for (int i = 0; i < degree(axis); ++i) out.push_back(begin + i * stride(*this, axis));
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

void check_grid(const Grid& grid, int ranks) {
  const std::initializer_list<int> degrees{grid.tp, grid.gtp,  grid.dp,
                                           grid.ep, grid.egtp, grid.edp};
  // The product is checked with wide numbers: it could pass for `ranks` by overflow.
  const bool in_range =
      std::all_of(degrees.begin(), degrees.end(), [&](int d) { return d >= 1 && d <= ranks; });
  const auto covers = [&](int64_t a, int64_t b, int64_t c) {
    return a * b <= ranks && a * b * c == ranks;
  };
  MOIETY_CHECK(
      in_range && covers(grid.tp, grid.gtp, grid.dp) && covers(grid.ep, grid.egtp, grid.edp),
      "grid: tp {} * gtp {} * dp {} and ep {} * egtp {} * edp {} must both be the number "
      "of ranks, {}",
      grid.tp, grid.gtp, grid.dp, grid.ep, grid.egtp, grid.edp, ranks);
}

int64_t Layout::slice_rows() const {
  if (vocabulary) return round_up(ceil_div(rows, tp_size), align);
  return tp_axis == 0 ? rows / tp_size : rows;
}

int64_t Layout::slice_cols() const { return tp_axis == 1 ? cols / tp_size : cols; }

int64_t Layout::real_rows() const {
  if (tp_axis != 0) return rows;
  return std::clamp<int64_t>(rows - tp_rank * slice_rows(), 0, slice_rows());
}

int64_t Layout::shard_rows() const { return round_up(slice_rows(), align * gtp_size) / gtp_size; }

Range Layout::valid(int g) const {
  const int64_t s = shard_rows(), n = real_rows();
  return {std::min(g * s, n), std::min((g + 1) * s, n)};
}

Box Layout::global_box(int g) const {
  const Range r = valid(g);
  const int64_t row0 = tp_axis == 0 ? tp_rank * slice_rows() : 0;
  const int64_t col0 = tp_axis == 1 ? tp_rank * slice_cols() : 0;
  return {{row0 + r.begin, row0 + r.end}, {col0, col0 + slice_cols()}};
}

void check_layout(std::string_view tensor, const Layout& l) {
  MOIETY_CHECK(l.rows >= 1 && l.cols >= 1, "layout of {}: shape [{}, {}]", tensor, l.rows, l.cols);
  MOIETY_CHECK(l.tp_axis >= -1 && l.tp_axis <= 1,
               "layout of {}: tp_axis is {}, expected -1, 0 or 1", tensor, l.tp_axis);
  MOIETY_CHECK(l.tp_size >= 1 && l.tp_rank >= 0 && l.tp_rank < l.tp_size,
               "layout of {}: tp rank {} of {}", tensor, l.tp_rank, l.tp_size);
  MOIETY_CHECK(l.gtp_size >= 1 && l.gtp_rank >= 0 && l.gtp_rank < l.gtp_size,
               "layout of {}: gtp rank {} of {}", tensor, l.gtp_rank, l.gtp_size);
  MOIETY_CHECK(l.align >= 1 && l.tp_unit >= 1, "layout of {}: align {}, tp_unit {}, at least 1",
               tensor, l.align, l.tp_unit);
  MOIETY_CHECK(!l.vocabulary || (l.tp_axis == 0 && l.align % l.tp_unit == 0),
               "layout of {}: a vocabulary has tp_axis 0 and a tp_unit that divides align {}, not "
               "{} and {}",
               tensor, l.align, l.tp_axis, l.tp_unit);
  if (l.tp_axis < 0 || l.tp_size == 1 || l.vocabulary) return;
  const int64_t size = l.tp_axis == 0 ? l.rows : l.cols;
  MOIETY_CHECK(size % (l.tp_size * l.tp_unit) == 0,
               "layout of {}: {} {} cannot be cut by tp {}, expected a multiple of {}", tensor,
               size, l.tp_axis == 0 ? "rows" : "columns", l.tp_size, l.tp_size * l.tp_unit);
}

}  // namespace moiety::gtp
