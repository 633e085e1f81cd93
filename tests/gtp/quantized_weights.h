// Quantized weights, whole and as shards, and what a gather of the shards has to give.
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "moiety/gtp/landing.h"
#include "moiety/quant/scale_layout.h"
#include "tests/quant/cases.h"

namespace moiety::gtp {

inline constexpr Views kBothViews = kRowView | kColView;
inline constexpr int64_t kGuard = 256;

// Memory full of poison, with guard bytes behind it.
class Poisoned {
 public:
  explicit Poisoned(int64_t bytes) : bytes_(bytes), buffer_(bytes + kGuard, "test", 256) {
    std::memset(buffer_.data(), 0xA5, static_cast<size_t>(buffer_.bytes()));
  }
  TensorView view() const { return buffer_.view(DType::kUInt8, {bytes_}); }
  bool guard_intact() const {
    for (int64_t i = bytes_; i < bytes_ + kGuard; ++i) {
      if (buffer_.data()[i] != std::byte{0xA5}) return false;
    }
    return true;
  }

 private:
  int64_t bytes_;
  Buffer buffer_;
};

struct CodecCase {
  std::string name;
  Codec codec;
};
inline std::vector<CodecCase> codec_cases() {
  std::vector<CodecCase> out;
  for (const Format f : {Format::kFp8Tensor, Format::kFp8Block128x128, Format::kMxfp8,
                         Format::kMxfp8Tile32, Format::kNvfp4, Format::kNvfp4Tile16}) {
    out.push_back({name(f), Codec(QuantSpec::of(f))});
  }
  QuantSpec e5m2 = QuantSpec::of(Format::kFp8Block128x128);
  e5m2.element = DType::kE5M2;
  e5m2.pow2_scales = false;
  out.push_back({"fp8_block e5m2", Codec(e5m2)});
  out.push_back({"nvfp4_tile16 columns", Codec(QuantSpec::of(Format::kNvfp4Tile16), true)});
  return out;
}

// The quantized weights of a bundle, whole and as the shards of `ranks` peers, as they are in
// `version`. The last rows are padding: zero.
struct Weights {
  std::vector<QuantizedTensor> whole;                // by member
  std::vector<std::vector<QuantizedTensor>> shards;  // by rank, member

  explicit Weights(const GatherShape& shape, uint32_t version = 0) : shards(shape.ranks) {
    const int64_t M = shape.rows(), K = shape.cols, s = shape.shard_rows;
    const QuantSpec& spec = shape.codec.spec();
    for (int e = 0; e < shape.members; ++e) {
      const int64_t real = M - (e + 1) * s / 3 - (shape.ranks > 2 ? s : 0);
      Tensor x(DType::kBFloat16, {M, K});
      quant::fill(x.view().slice(0, 0, real), quant::Data::kNormal,
                  100 * version + static_cast<uint32_t>(e + 1));
      whole.emplace_back(spec, M, K, Directions{true, true});
      quant::quantize(x, whole.back(), {}, Stream());
      for (int g = 0; g < shape.ranks; ++g) {
        QuantizedTensor& shard = shards[g].emplace_back(spec, s, K, Directions{true, true});
        quant::QuantizeOptions options;
        // The amax of the uncut weight, as reduced over the ranks.
        if (is_tensor_scaled(spec.format)) {
          options.amax_given = true;
          std::memcpy(shard.view().amax.raw(), whole.back().view().amax.raw(), 8);
        }
        quant::quantize(x.view().slice(0, g * s, (g + 1) * s), shard, options, Stream());
      }
    }
  }
};

inline const TensorView& array_of(const QuantizedView& view, Array array) {
  const TensorView* arrays[] = {&view.row_data, &view.row_scales, &view.col_data, &view.col_scales};
  return *arrays[static_cast<int>(array)];
}

// Scales of the whole as the GEMM reads them.
inline Tensor laid_out(const QuantizedView& whole, Direction d, ScaleLayout layout) {
  const ArraySpec spec = quant::scale_layout_size(whole, d, layout);
  Tensor out(spec.dtype, std::span(spec.sizes.data(), static_cast<size_t>(spec.dims)));
  quant::convert_scales(whole, d, layout, out, Stream());
  return out;
}

// The first difference of the views of member e from the whole; empty if there is none.
inline std::string fault_of(const Landing& landing, const QuantizedView& whole, int e) {
  const GatherLayout& layout = landing.layout();
  const QuantizedView& view = landing.view(e);
  const ScaleLayout scales = layout.shape.scales;
  const Format format = whole.spec.format;
  std::string out;
  const auto expect = [&](const char* array, const TensorView& got, const TensorView& expected) {
    if (!got.defined()) {
      out += std::string(array) + " is not there; ";
    } else {
      out += difference(array, got, expected);
    }
  };
  const bool row = layout.views & kRowView, col = layout.views & kColView;
  const bool one_data = format == Format::kMxfp8Tile32;
  if (row || one_data) expect("row_data", view.row_data, whole.row_data);
  if (col && !one_data) expect("col_data", view.col_data, whole.col_data);
  if (format == Format::kFp8Tensor) return out;
  if (scales == ScaleLayout::kCompact) {
    if (row || is_tile(format)) expect("row_scales", view.row_scales, whole.row_scales);
    if (col && !is_tile(format)) expect("col_scales", view.col_scales, whole.col_scales);
    return out;
  }
  if (row) expect("row_scales", view.row_scales, laid_out(whole, Direction::kRow, scales));
  if (col) expect("col_scales", view.col_scales, laid_out(whole, Direction::kCol, scales));
  return out;
}

inline std::vector<std::pair<Payload, Views>> gathers_of(const Codec& codec) {
  if (!codec.one_payload()) return {{Payload::kRow, kRowView}, {Payload::kCol, kColView}};
  return {{Payload::kRow, kRowView}, {Payload::kRow, kColView}, {Payload::kRow, kBothViews}};
}

}  // namespace moiety::gtp
