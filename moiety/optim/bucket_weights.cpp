#include "moiety/optim/bucket_weights.h"

#include <algorithm>

#include "moiety/base/copy.h"
#include "moiety/base/error.h"

namespace moiety::optim {
namespace {

// The matrices in which a parameter is quantized.
struct Members {
  int64_t count, rows, cols;
};
Members members_of(const ParamSpec& spec) {
  if (spec.shape.size() == 3) return {spec.shape[0], spec.shape[1], spec.shape[2]};
  return {1, spec.rows, spec.row_elements};
}

std::optional<QuantSpec> format_of_slots(std::span<const ParamSpec> specs,
                                         const BucketLayout& layout) {
  if (layout.slots.empty()) return std::nullopt;
  return specs[layout.slots[0].parameter].format;
}

// The number of planes of codes, and the bytes of one.
int plane_count(const QuantSpec& format) { return format.format == Format::kMxfp8 ? 2 : 1; }
int64_t code_bytes(const QuantSpec& format, int64_t elements) {
  return is_fp4(format.format) ? elements / 2 : elements;
}

QuantizedSizes sizes_of(const QuantSpec& format, int64_t rows, int64_t cols) {
  return quantized_sizes(format, rows, cols, {true, plane_count(format) == 2});
}

// An array of a member that does not hold codes.
struct ScaleArray {
  TensorView QuantizedView::*view;
  ArraySpec array;
  bool words = false;  // float32 [2]: one word of the tensor in each direction
};
constexpr size_t kScaleArrays = 5, kFlags = 4;  // their number, and the last
std::array<ScaleArray, kScaleArrays> scale_arrays(const QuantSpec& format, int64_t rows,
                                                  int64_t cols) {
  const QuantizedSizes sizes = sizes_of(format, rows, cols);
  return {{{&QuantizedView::row_scales, sizes.row_scales},
           {&QuantizedView::col_scales, sizes.col_scales},
           {&QuantizedView::amax, sizes.amax, true},
           {&QuantizedView::tensor_scale, sizes.tensor_scale, true},
           {&QuantizedView::flags, ArraySpec{DType::kUInt32, 1, {1, 0}}}}};
}

}  // namespace

BucketWeights::BucketWeights(std::span<const ParamSpec> specs, const BucketLayout& layout,
                             DType storage, int rank, Device device, std::byte* memory)
    : slots_(layout.slots), format_(format_of_slots(specs, layout)), device_(device) {
  for (const BucketLayout::Slot& slot : slots_) {
    const ParamSpec& spec = specs[slot.parameter];
    MOIETY_CHECK(spec.format == format_, "optimizer: {} and {} share a bucket, not a format",
                 spec.name, specs[slots_[0].parameter].name);
  }
  if (!memory) {
    memory_ = Buffer(bytes_needed(specs, layout, storage), device_, "weights");
    memory = memory_.data();
  }
  if (format_) {
    place_members(specs, layout, rank);
    place_scales(place_codes(layout, rank, memory));
    return;
  }
  const int64_t n = layout.segment();
  planes_.emplace_back(memory, storage, std::initializer_list{layout.length}, device_);
  copies_[0].push_back(planes_[0]);
  own_storage_ = planes_[0].slice(0, rank * n, (rank + 1) * n);
  own_planes_.push_back(own_storage_);
  for (const BucketLayout::Slot& slot : slots_) {
    weights_.push_back(slot_view(planes_[0], slot, specs[slot.parameter]));
  }
}

int64_t BucketWeights::bytes_needed(std::span<const ParamSpec> specs, const BucketLayout& layout,
                                    DType storage) {
  const std::optional<QuantSpec> format = format_of_slots(specs, layout);
  if (!format) return padded_bytes(byte_size(storage, layout.length));
  int64_t bytes = plane_count(*format) * padded_bytes(code_bytes(*format, layout.length));
  for (const BucketLayout::Slot& slot : layout.slots) {
    const Members m = members_of(specs[slot.parameter]);
    for (const ScaleArray& a : scale_arrays(*format, m.rows, m.cols)) {
      bytes += m.count * padded_bytes(a.array.bytes());
    }
  }
  return bytes;
}

// Finds each member's matrix, and the elements of it that the own segment holds.
void BucketWeights::place_members(std::span<const ParamSpec> specs, const BucketLayout& layout,
                                  int rank) {
  const int64_t segment = layout.segment(), first = rank * segment;
  // Members begin at a multiple of 16 bytes, and no byte is split between them.
  const int64_t aligned = is_fp4(format_->format) ? 32 : 16;
  for (const BucketLayout::Slot& slot : slots_) {
    const ParamSpec& spec = specs[slot.parameter];
    const Members m = members_of(spec);
    const int64_t size = m.rows * m.cols;
    MOIETY_CHECK(!is_fp4(format_->format) || m.cols % 16 == 0,
                 "optimizer: {} has rows of {} elements, {} needs multiples of 16", spec.name,
                 m.cols, name(format_->format));
    MOIETY_CHECK(m.count == 1 || size % aligned == 0,
                 "optimizer: an expert of {} has {} elements, {} needs multiples of {}", spec.name,
                 size, name(format_->format), aligned);
    std::vector<QuantizedView>& views = members_.emplace_back();
    for (int64_t e = 0; e < m.count; ++e) {
      QuantizedView& view = views.emplace_back();
      view.spec = *format_;
      view.rows = m.rows;
      view.cols = m.cols;
      const int64_t start = slot.start + e * size - first;  // in the segment
      const int64_t begin = std::clamp<int64_t>(-start, 0, size);
      const int64_t end = std::clamp<int64_t>(segment - start, begin, size);
      items_.push_back({*format_, m.rows, m.cols, begin, end, format_->format == Format::kMxfp8});
      starts_.push_back(start);
    }
  }
}

TensorView BucketWeights::array_at(void* data, const ArraySpec& array) const {
  return TensorView(data, array.dtype, std::span(array.sizes.data(), array.dims), device_);
}

// Places the codes and returns the first byte after them.
std::byte* BucketWeights::place_codes(const BucketLayout& layout, int rank, std::byte* next) {
  const auto bytes_of = [&](int64_t elements) { return code_bytes(*format_, elements); };
  const int64_t plane_bytes = bytes_of(layout.length);
  for (int p = 0; p < plane_count(*format_); ++p, next += padded_bytes(plane_bytes)) {
    planes_.emplace_back(next, DType::kUInt8, std::initializer_list{plane_bytes}, device_);
    copies_[0].push_back(planes_.back());
    own_planes_.push_back(planes_[p].slice(0, bytes_of(rank * layout.segment()),
                                           bytes_of((rank + 1) * layout.segment())));
  }
  for (size_t s = 0; s < slots_.size(); ++s) {
    int64_t at = slots_[s].start;
    for (QuantizedView& view : members_[s]) {
      const QuantizedSizes sizes = sizes_of(*format_, view.rows, view.cols);
      const auto codes = [&](const TensorView& plane, const ArraySpec& a) {
        return array_at(plane.data<uint8_t>() + bytes_of(at), a);
      };
      view.row_data = codes(planes_[0], sizes.row_data);
      if (planes_.size() == 2) view.col_data = codes(planes_[1], sizes.col_data);
      at += view.rows * view.cols;
    }
  }
  return next;
}

// Places the scales. Arrays of a kind lie together, so that one copy reaches a word of every
// member.
void BucketWeights::place_scales(std::byte* next) {
  for (size_t k = 0; k < kScaleArrays; ++k) {
    std::byte* const first = next;
    bool words = false;
    for (std::vector<QuantizedView>& views : members_) {
      for (QuantizedView& view : views) {
        const ScaleArray a = scale_arrays(*format_, view.rows, view.cols)[k];
        if (a.array.dims == 0) continue;
        view.*a.view = array_at(next, a.array);
        next += padded_bytes(a.array.bytes());
        words = a.words;
      }
    }
    if (next > first && k < kFlags) {
      copies_[words].emplace_back(first, DType::kUInt8, std::initializer_list{next - first},
                                  device_);
    }
    if (!words) continue;
    const std::array<int64_t, 2> sizes{static_cast<int64_t>(items_.size()), 2};
    const std::array<int64_t, 2> strides{padded_bytes(2 * sizeof(float)) / int64_t{sizeof(float)},
                                         1};
    words_.emplace_back(first, DType::kFloat32, sizes, strides, device_);
  }
}

void BucketWeights::set_master(const TensorView& master) {
  arrays_.clear();
  for (const std::vector<QuantizedView>& views : members_) {
    for (const QuantizedView& view : views) {
      const quant::PartialCastItem& item = items_[arrays_.size()];
      const int64_t start = starts_[arrays_.size()];
      quant::PartialCastArrays& a = arrays_.emplace_back();
      if (item.start < item.end) a.master = master.slice(0, start + item.start, start + item.end);
      a.out = view;
    }
  }
}

void BucketWeights::bind(std::span<Parameter> parameters) const {
  for (size_t s = 0; s < slots_.size(); ++s) {
    Parameter& p = parameters[slots_[s].parameter];
    p.spec.format = format_;
    p.weight = format_ ? TensorView() : weights_[s];
    p.quantized = format_ ? members_[s] : std::vector<QuantizedView>();
  }
}

void BucketWeights::finish_cast(Stream stream) const {
  if (plane_count(*format_) == 2) return;
  for (const TensorView& x : words_) copy(x.slice(1, 1, 2), x.slice(1, 0, 1), stream);
}

void BucketWeights::gather(comm::Communicator& domain, std::vector<comm::Ticket>& tickets,
                           Stream stream) const {
  if (domain.size() == 1) return;
  for (size_t p = 0; p < planes_.size(); ++p) {
    tickets.push_back(domain.all_gather(own_planes_[p], planes_[p], stream));
  }
}

}  // namespace moiety::optim
