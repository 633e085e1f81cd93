#include "moiety/quant/partial_cast/partial_cast_plan.h"

#include <algorithm>

#include "moiety/base/integer.h"

namespace moiety::quant {
namespace {

using detail::PartialBlocks;
using detail::PartialItem;
using detail::PartialScales;
using detail::PartialTile;

constexpr const char* kOperation = "PartialCastPlan";
constexpr int64_t kTileScales = 16 << 10;  // scales in a piece

void check_options(int64_t i, const PartialCastItem& item) {
  const QuantSpec& spec = item.spec;
  check_spec(kOperation, spec);
  const auto refuse = [&](const char* reason) {
    fail(ErrorKind::kUnsupported, "{}: item {} is {} {}", kOperation, i, name(spec.format), reason);
  };
  if (spec.rounding != Rounding::kNearest) {
    refuse("with stochastic rounding; weights are rounded to nearest");
  }
  if (spec.row_scaled) refuse("with a scale for each row; a part of a row does not know its amax");
  if (item.col && spec.format != Format::kMxfp8) {
    refuse(is_tile(spec.format) || spec.format == Format::kFp8Tensor
               ? "with col; transpose_quantized makes its col data"
               : "with col; its col data are transposed, a range of X is no range of them");
  }
  MOIETY_CHECK(!item.delayed || spec.format == Format::kFp8Tensor,
               "{}: item {} is {} with delayed scaling, which only fp8_tensor has", kOperation, i,
               name(spec.format));
}

// Rows of a block, over both directions if col is asked for; shards are aligned to them.
int64_t shared_rows(const PartialCastItem& item) {
  return item.col ? 32 : block_shape(item.spec.format).rows;
}

void check_range(int64_t i, const PartialCastItem& item, bool aligned) {
  MOIETY_CHECK(item.rows >= 0 && item.cols >= 0, "{}: item {} is {} x {}", kOperation, i, item.rows,
               item.cols);
  const int64_t n = item.rows * item.cols;
  MOIETY_CHECK(item.start >= 0 && item.start <= item.end && item.end <= n,
               "{}: item {} owns [{}, {}) of {} x {} elements", kOperation, i, item.start, item.end,
               item.rows, item.cols);
  if (!aligned || item.start == item.end) return;
  const int64_t unit = shared_rows(item) * item.cols;  // 0: a tensor without blocks
  for (const int64_t boundary : {item.start, item.end}) {
    MOIETY_CHECK(unit == 0 || boundary == n || boundary % unit == 0,
                 "{}: item {} ({} x {} {}) owns [{}, {}); aligned boundaries are multiples of {}",
                 kOperation, i, item.rows, item.cols, name(item.spec.format), item.start, item.end,
                 unit);
  }
}

PartialBlocks make_blocks(const PartialItem& item, int64_t block_rows, int64_t block_cols,
                          bool aligned) {
  PartialBlocks out;
  out.rows = ceil_div(item.rows, block_rows);
  out.cols = ceil_div(item.cols, block_cols);
  out.end = out.rows * out.cols;
  if (aligned) {
    const int64_t unit = std::max<int64_t>(block_rows * item.cols, 1);
    out.begin = item.start / unit * out.cols;
    out.end = item.start == item.end ? out.begin : ceil_div(item.end, unit) * out.cols;
  }
  return out;
}

PartialItem make_item(const PartialCastItem& given, bool aligned) {
  const Format format = given.spec.format;
  PartialItem out;
  out.spec = given.spec;
  out.delayed = given.delayed;
  out.want_col = given.col;
  out.start = given.start;
  out.end = given.end;
  if (format == Format::kFp8Tensor) {
    out.rows = ceil_div(given.rows * given.cols, detail::kFlatCols);
    out.cols = out.pitch = detail::kFlatCols;
    out.band = out.block_rows = detail::kFlatBand;
    out.block_cols = 128;
    return out;
  }
  const BlockShape block = block_shape(format);
  out.rows = given.rows;
  out.cols = given.cols;
  out.pitch = is_fp4(format) ? 8 * ceil_div(given.cols, 16) : given.cols;
  out.block_rows = block.rows;
  out.block_cols = block.cols;
  out.band = format == Format::kMxfp8 ? 32 : block.rows;
  out.row = make_blocks(out, block.rows, block.cols, aligned);
  if (given.col) out.col = make_blocks(out, 32, 1, aligned);
  return out;
}

// Adds parts to the reduction buffer, each at a multiple of 16 bytes.
class ReductionLayout {
 public:
  int64_t add(int64_t bytes) {
    const int64_t offset = bytes_;
    bytes_ = round_up(bytes_ + bytes, 16);
    return offset;
  }
  // Closes one range with all parts since the last call.
  void close(std::vector<PartialReduction>& out, PartialReduction::Over over, DType dtype,
             bool reduced) {
    if (reduced && bytes_ > closed_) out.push_back({over, dtype, closed_, bytes_ - closed_});
    closed_ = bytes_;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0, closed_ = 0;
};

void lay_out_reduction(PartialCastPlan::Impl& plan) {
  using Over = PartialReduction::Over;
  ReductionLayout layout;
  int64_t tensors = 0;
  for (PartialItem& item : plan.items) {
    if (is_tensor_scaled(item.spec.format)) item.tensor_word = 4 * tensors++;
  }
  layout.add(4 * tensors);
  layout.close(plan.reductions, Over::kTensor, DType::kInt32, true);
  for (PartialItem& item : plan.items) {
    if (is_fp8_block(item.spec.format) || is_fp4(item.spec.format)) {
      item.row.offset = layout.add(4 * item.row.size());
    }
  }
  layout.close(plan.reductions, Over::kShard, DType::kInt32, !plan.aligned);
  for (PartialItem& item : plan.items) {
    if (!is_mxfp8(item.spec.format)) continue;
    item.row.offset = layout.add(item.row.size());
    item.col.offset = layout.add(item.col.size());
  }
  layout.close(plan.reductions, Over::kShard, DType::kUInt8, !plan.aligned);
  plan.reduction_bytes = layout.bytes();
}

bool owns_any(const PartialItem& item, const PartialTile& tile) {
  const int64_t first = std::max(tile.row, item.start / item.cols);
  const int64_t last = std::min(tile.row + tile.rows, ceil_div(item.end, item.cols)) - 1;
  // Rows between the first and the last are whole, so one of three tells.
  for (const int64_t r : {first, std::min(first + 1, last), last}) {
    const detail::OwnedColumns owned = detail::owned_columns(item, tile, r);
    if (first <= last && owned.begin < owned.end) return true;
  }
  return false;
}

void add_scales(std::vector<PartialScales>& out, const PartialBlocks& blocks, int32_t index,
                bool col) {
  for (int64_t b = blocks.begin; b < blocks.end; b += kTileScales) {
    out.push_back({index, col, b, std::min(b + kTileScales, blocks.end)});
  }
}

}  // namespace

void detail::add_tiles(std::vector<PartialTile>& out, const PartialItem& item, int32_t index,
                       const PartialTiling& tiling) {
  if (item.start == item.end) return;
  const int64_t band = std::min(item.band, tiling.band);
  const int64_t width = std::min(tiling.cols, round_up(item.cols, 128));
  const int64_t height = std::max<int64_t>(tiling.elements / width / band, 1) * band;
  const int64_t bottom = std::min(item.rows, round_up(ceil_div(item.end, item.cols), band));
  for (int64_t r = item.start / item.cols / band * band; r < bottom; r += height) {
    for (int64_t c = 0; c < item.cols; c += width) {
      const PartialTile tile{index, r, c, std::min(height, bottom - r),
                             std::min(width, item.cols - c)};
      if (owns_any(item, tile)) out.push_back(tile);
    }
  }
}

PartialCastPlan::PartialCastPlan(std::span<const PartialCastItem> items, bool aligned)
    : impl_(new Impl) {
  impl_->given.assign(items.begin(), items.end());
  impl_->aligned = aligned;
  for (size_t i = 0; i < items.size(); ++i) {
    check_options(static_cast<int64_t>(i), items[i]);
    check_range(static_cast<int64_t>(i), items[i], aligned);
    impl_->items.push_back(make_item(items[i], aligned));
  }
  lay_out_reduction(*impl_);
  for (size_t i = 0; i < items.size(); ++i) {
    const PartialItem& item = impl_->items[i];
    const auto index = static_cast<int32_t>(i);
    detail::add_tiles(impl_->tiles, item, index, detail::kTiles);
    add_scales(impl_->scales, item.row, index, false);
    add_scales(impl_->scales, item.col, index, true);
  }
}

PartialCastPlan::~PartialCastPlan() = default;
PartialCastPlan::PartialCastPlan(PartialCastPlan&&) noexcept = default;
PartialCastPlan& PartialCastPlan::operator=(PartialCastPlan&&) noexcept = default;

std::span<const PartialCastItem> PartialCastPlan::items() const { return impl_->given; }
bool PartialCastPlan::aligned() const { return impl_->aligned; }
int64_t PartialCastPlan::reduction_bytes() const { return impl_->reduction_bytes; }
std::span<const PartialReduction> PartialCastPlan::reductions() const { return impl_->reductions; }

PartialWords PartialCastPlan::words(int64_t item) const {
  MOIETY_CHECK(item >= 0 && item < std::ssize(items()), "words: item {} of {}", item,
               items().size());
  const PartialItem& x = impl_->items[static_cast<size_t>(item)];
  const auto blocks = [](const PartialBlocks& b) {
    return b.size() == 0 ? PartialWords::Blocks{} : PartialWords::Blocks{b.offset, b.rows, b.cols};
  };
  return {x.tensor_word, blocks(x.row), blocks(x.col)};
}

bool PartialCastPlan::gatherable(int64_t item) const {
  MOIETY_CHECK(item >= 0 && item < static_cast<int64_t>(items().size()),
               "gatherable: item {} of {}", item, items().size());
  const PartialCastItem& x = impl_->given[item];
  if (!is_fp4(x.spec.format) || x.cols == 0) return true;
  return x.start % x.cols % 2 == 0 && x.end % x.cols % 2 == 0;
}

ByteRange shard_bytes(const QuantSpec& spec, int64_t rows, int64_t cols, int64_t start,
                      int64_t end) {
  MOIETY_CHECK(rows >= 0 && cols >= 0 && start >= 0 && start <= end && end <= rows * cols,
               "shard_bytes: elements [{}, {}) of {} x {}", start, end, rows, cols);
  if (!is_fp4(spec.format)) return {start, end};
  if (cols == 0) return {};
  const int64_t pitch = 8 * ceil_div(cols, 16);
  const auto first_byte = [&](int64_t e) { return e / cols * pitch + e % cols / 2; };
  const int64_t begin = first_byte(start);
  if (start == end) return {begin, begin};
  return {begin, end % cols == 0 ? end / cols * pitch : first_byte(end - 1) + 1};
}

}  // namespace moiety::quant
