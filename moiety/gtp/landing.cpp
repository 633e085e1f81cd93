#include "moiety/gtp/landing.h"

#include "moiety/gtp/interleave.h"
#include "moiety/quant/scale_layout.h"
#include "moiety/quant/transpose.h"

namespace moiety::gtp {
namespace {

constexpr uintptr_t kAlignment = 256;

void check_memory(const char* what, const TensorView& memory, int64_t bytes) {
  if (bytes == 0 && !memory.defined()) return;
  check_tensor("gtp landing", what, memory, DType::kUInt8, {-1});
  MOIETY_CHECK(memory.contiguous() && memory.bytes() >= bytes &&
                   reinterpret_cast<uintptr_t>(memory.raw()) % kAlignment == 0,
               "gtp landing: {} is {}, expected {} bytes at a multiple of {}", what,
               memory.describe(), bytes, kAlignment);
}

}  // namespace

Landing::Landing(const GatherLayout& layout, TensorView slot, TensorView scratch)
    : layout_(layout), slot_(slot), scratch_(scratch), transposes_({}) {
  check_memory("slot", slot, layout.slot_bytes);
  check_memory("scratch", scratch, layout.scratch_bytes);
  const auto* s = static_cast<const std::byte*>(slot.raw());
  const auto* t = static_cast<const std::byte*>(scratch.raw());
  MOIETY_CHECK(!scratch.defined() || s + slot.bytes() <= t || t + scratch.bytes() <= s,
               "gtp landing: slot and scratch overlap");
  const GatherShape& shape = layout.shape;
  if (!shape.codec.quantized()) return;
  const QuantizedSizes sizes = gathered_sizes(shape);
  const bool transposed = layout.row_data.defined() && layout.col_data.defined();
  std::vector<quant::QuantizeItem> items;
  for (int e = 0; e < shape.members; ++e) {
    QuantizedView all;
    all.spec = shape.codec.spec();
    all.rows = shape.rows();
    all.cols = shape.cols;
    all.row_data = array(layout.row_data, sizes.row_data, e);
    all.row_scales = array(layout.row_scales, sizes.row_scales, e);
    all.col_data = array(layout.col_data, sizes.col_data, e);
    all.col_scales = array(layout.col_scales, sizes.col_scales, e);
    compact_.push_back(all);
    if (transposed) items.push_back({{}, all, {}});

    QuantizedView view = all;
    view.layout = shape.scales;
    if (layout.row_data.scratch) view.row_data = {};
    if (shape.scales != ScaleLayout::kCompact) {
      const auto laid_out = [&](const Area& area, Direction d) {
        return area.defined() ? array(area, quant::scale_layout_size(all, d, shape.scales), e)
                              : TensorView();
      };
      view.row_scales = laid_out(layout.row_layout, Direction::kRow);
      view.col_scales = laid_out(layout.col_layout, Direction::kCol);
    }
    views_.push_back(view);
  }
  transposes_ = quant::QuantizeTable(items);
}

TensorView Landing::array(const Area& area, const ArraySpec& spec, int e) const {
  if (!area.defined()) return {};
  auto* at = static_cast<std::byte*>(memory(area).raw()) + area.offset + e * area.stride;
  return {at, spec.dtype, std::span(spec.sizes.data(), static_cast<size_t>(spec.dims)),
          slot_.device()};
}

TensorView Landing::bytes(const Area& area, std::initializer_list<int64_t> sizes) const {
  return {static_cast<std::byte*>(memory(area).raw()) + area.offset, DType::kUInt8, sizes,
          slot_.device()};
}

TensorView Landing::part(const Plane& plane, int g) const {
  const int64_t members = layout_.shape.members;
  const TensorView all = bytes(plane.area, {members, plane.area.stride});
  return all.slice(1, g * plane.bytes, (g + 1) * plane.bytes);
}

TensorView Landing::data(int e) const {
  MOIETY_CHECK(!layout_.shape.codec.quantized(), "gtp landing: data of {}, expected values",
               layout_.shape.codec.name());
  const GatherShape& shape = layout_.shape;
  return array(layout_.row_data, {shape.codec.storage(), 2, {shape.rows(), shape.cols}}, e);
}

void Landing::finish(Stream stream) const {
  const GatherShape& shape = layout_.shape;
  const int64_t E = shape.members, G = shape.ranks, K = shape.cols;
  const auto side_by_side = [&](const Area& parts, const Area& whole) {
    if (!parts.defined()) return;
    const int64_t row = parts.stride / K;
    interleave(bytes(parts, {E, G, K, row / G}), bytes(whole, {E, K, row}), stream);
  };
  side_by_side(layout_.data_parts, layout_.col_data);
  side_by_side(layout_.scale_parts, layout_.col_scales);
  if (!transposes_.items().empty()) quant::transpose_quantized(transposes_, stream);
  if (shape.scales == ScaleLayout::kCompact) return;
  for (int e = 0; e < shape.members; ++e) {
    const auto lay_out = [&](const TensorView& scales, Direction d) {
      if (scales.defined()) quant::convert_scales(compact_[e], d, shape.scales, scales, stream);
    };
    lay_out(views_[e].row_scales, Direction::kRow);
    lay_out(views_[e].col_scales, Direction::kCol);
  }
}

}  // namespace moiety::gtp
