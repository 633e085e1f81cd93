#include "moiety/optim/shard_rows.h"

#include <algorithm>

#include "moiety/base/error.h"

namespace moiety::optim {

ParamSpec shard_rows(const ParamSpec& slice, const gtp::Layout& layout) {
  const size_t dims = slice.shape.size();
  MOIETY_CHECK(dims == 2 || dims == 3, "shard_rows: {} has {} dimensions, expected 2 or 3",
               slice.name, dims);
  const int64_t members = dims == 3 ? slice.shape[0] : 1, rows = slice.shape[dims - 2];
  MOIETY_CHECK(members * rows == slice.rows && slice.shape.back() == slice.row_elements,
               "shard_rows: {} has matrices of {} x {} in {} x {}", slice.name, rows,
               slice.shape.back(), slice.rows, slice.row_elements);
  gtp::check_layout(slice.name, layout);
  MOIETY_CHECK(rows <= layout.slice_rows() && slice.row_elements == layout.slice_cols(),
               "shard_rows: {} is {} x {}, its layout's slice {} x {}", slice.name, rows,
               slice.row_elements, layout.slice_rows(), layout.slice_cols());
  const int64_t s = layout.shard_rows(), first = layout.gtp_rank * s;
  ParamSpec out = slice;
  out.rows = members * s;
  out.shape[dims - 2] = s;
  out.row_map.clear();
  for (int64_t e = 0; e < members; ++e) {
    const int64_t begin = e * rows + std::min(first, rows);
    const int64_t end = e * rows + std::min(first + s, rows);
    for (const RowRun& run : slice.row_map) {
      const int64_t from = std::max(run.memory_row, begin);
      const int64_t to = std::min(run.memory_row + run.rows, end);
      if (from >= to) continue;
      out.row_map.push_back(
          {e * s + from - begin, run.tensor, run.logical_row + from - run.memory_row, to - from});
    }
  }
  return out;
}

}  // namespace moiety::optim
