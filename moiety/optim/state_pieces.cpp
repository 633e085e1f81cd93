#include "moiety/optim/state_pieces.h"

#include <functional>
#include <numeric>

#include "moiety/base/error.h"

namespace moiety::optim {
namespace {

int64_t volume(const Box& box) {
  return std::accumulate(box.size.begin(), box.size.begin() + box.rank, int64_t{1},
                         std::multiplies<>());
}

// Appends elements [begin, end) of the part that `box` fixes in dimensions before `dim` and leaves
// open from it on.
void append_boxes(std::span<const int64_t> shape, int dim, int64_t begin, int64_t end, Box box,
                  std::vector<Box>& out) {
  int64_t stride = 1;
  for (size_t d = dim + 1; d < shape.size(); ++d) stride *= shape[d];
  const auto inside = [&](int64_t index, int64_t from, int64_t to) {
    box.start[dim] = index;
    box.size[dim] = 1;
    append_boxes(shape, dim + 1, from, to, box, out);
  };
  int64_t first = begin / stride;
  const int64_t last = end / stride;
  if (begin % stride != 0) {  // a partial first row, which may be the last one too
    if (first == last) return inside(first, begin % stride, end % stride);
    inside(first, begin % stride, stride);
    ++first;
  }
  if (first < last) {
    box.start[dim] = first;
    box.size[dim] = last - first;
    for (size_t d = dim + 1; d < shape.size(); ++d) {
      box.start[d] = 0;
      box.size[d] = shape[d];
    }
    out.push_back(box);
  }
  if (end % stride != 0) inside(last, 0, end % stride);
}

}  // namespace

std::vector<Box> boxes_of_range(std::span<const int64_t> shape, int64_t begin, int64_t end) {
  MOIETY_CHECK(!shape.empty() && shape.size() <= kMaxBoxRank, "boxes_of_range: {} dimensions",
               shape.size());
  std::vector<Box> out;
  Box box;
  box.rank = static_cast<int>(shape.size());
  if (begin < end) append_boxes(shape, 0, begin, end, box, out);
  return out;
}

void append_pieces(std::span<const ParamSpec> specs, std::span<const ElementRun> runs,
                   const std::string& slot, const TensorView& data, StateView& view) {
  for (const ElementRun& run : runs) {
    const LogicalTensor& tensor = specs[run.parameter].tensors[run.tensor];
    std::byte* at = static_cast<std::byte*>(data.raw()) + byte_size(data.dtype(), run.begin);
    std::vector<int64_t> own_columns = tensor.shape;
    if (!run.columns.whole()) own_columns.back() = run.columns.count;
    for (Box box : boxes_of_range(own_columns, run.logical, run.logical + run.end - run.begin)) {
      box.start[box.rank - 1] += run.columns.first;
      view.push_back({.tensor = tensor.name,
                      .slot = slot,
                      .dtype = data.dtype(),
                      .shape = tensor.shape,
                      .box = box,
                      .data = at,
                      .device = data.device()});
      at += byte_size(data.dtype(), volume(box));
    }
  }
}

}  // namespace moiety::optim
