#include "moiety/gtp/codec.h"

#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/quant/scale_layout.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kAreaAlignment = 256;  // of a GPU's vector accesses and copies

bool has_scales(const Codec& codec) {
  return codec.quantized() && codec.spec().format != Format::kFp8Tensor;
}
// Whether the row data also serve the column view.
bool data_serve_both(const Codec& codec) {
  return !codec.quantized() || codec.spec().format == Format::kMxfp8Tile32;
}

void check_shape(const GatherShape& s, Payload payload, Views views) {
  const Codec& codec = s.codec;
  MOIETY_CHECK(
      s.cols >= 1 && s.ranks >= 1 && s.members >= 1 && s.shard_rows >= 1 &&
          s.shard_rows % codec.align() == 0,
      "gtp codec: {} members of {} rows, {} columns on {} ranks; rows of {} are a multiple "
      "of {}",
      s.members, s.shard_rows, s.cols, s.ranks, codec.name(), codec.align());
  MOIETY_CHECK(views >= 1 && views <= (kRowView | kColView), "gtp codec: views {}", int{views});
  const Views of_payload = codec.one_payload()        ? kRowView | kColView
                           : payload == Payload::kRow ? kRowView
                                                      : kColView;
  MOIETY_CHECK((payload == Payload::kRow || !codec.one_payload()) && (views & ~of_payload) == 0,
               "gtp codec: the {} payload of {} does not make views {}",
               payload == Payload::kRow ? "row" : "column", codec.name(), int{views});
  MOIETY_CHECK(s.scales == ScaleLayout::kCompact || has_scales(codec),
               "gtp codec: {} has no scales to lay out as {}", codec.name(), name(s.scales));
}

// Lays out the areas of a gather, one behind the other.
class LayoutMaker {
 public:
  LayoutMaker(const GatherShape& shape, Views views) {
    out_.shape = shape;
    out_.views = views;
    if (!shape.codec.quantized()) return;
    const QuantSpec& spec = shape.codec.spec();
    shard_ = quantized_sizes(spec, shape.shard_rows, shape.cols, {true, true});
    whole_ = gathered_sizes(shape);
  }

  GatherLayout make(Payload payload) {
    if (!out_.shape.codec.quantized()) {
      const int64_t bytes =
          byte_size(out_.shape.codec.storage(), out_.shape.shard_rows * out_.shape.cols);
      out_.row_data = place(bytes * out_.shape.ranks, false);
      plane(Array::kRowData, bytes, out_.row_data);
    } else if (payload == Payload::kRow) {
      row_payload();
    } else {
      column_payload();
    }
    lay_scales_out();
    return out_;
  }

 private:
  bool compact() const { return out_.shape.scales == ScaleLayout::kCompact; }
  bool reads(Views view) const { return (out_.views & view) != 0; }

  Area place(int64_t bytes, bool scratch) {
    int64_t& total = scratch ? out_.scratch_bytes : out_.slot_bytes;
    const Area area{round_up(total, kAreaAlignment), bytes, scratch};
    total = area.offset + bytes * out_.shape.members;
    return area;
  }
  void plane(Array array, int64_t bytes, const Area& area) {
    out_.planes.push_back({array, bytes, area});
  }

  void row_payload() {
    const bool stays = reads(kRowView) || data_serve_both(out_.shape.codec);
    out_.row_data = place(whole_.row_data.bytes(), !stays);
    plane(Array::kRowData, shard_.row_data.bytes(), out_.row_data);
    row_scales();
    if (reads(kColView) && !data_serve_both(out_.shape.codec)) {
      out_.col_data = place(whole_.col_data.bytes(), false);
    }
  }
  void row_scales() {
    if (!has_scales(out_.shape.codec)) return;
    out_.row_scales = place(whole_.row_scales.bytes(), !compact());
    plane(Array::kRowScales, shard_.row_scales.bytes(), out_.row_scales);
  }

  void column_payload() {
    out_.col_data = place(whole_.col_data.bytes(), false);
    const bool interleaved = is_fp4(out_.shape.codec.spec().format);
    if (interleaved) out_.data_parts = place(whole_.col_data.bytes(), true);
    plane(Array::kColData, shard_.col_data.bytes(), interleaved ? out_.data_parts : out_.col_data);
    if (out_.shape.codec.column_planes()) return row_scales();
    out_.col_scales = place(whole_.col_scales.bytes(), !compact());
    if (interleaved) out_.scale_parts = place(whole_.col_scales.bytes(), true);
    plane(Array::kColScales, shard_.col_scales.bytes(),
          interleaved ? out_.scale_parts : out_.col_scales);
  }

  void lay_scales_out() {
    if (compact()) return;
    const GatherShape& shape = out_.shape;
    QuantizedView view;
    view.spec = shape.codec.spec();
    view.rows = shape.rows();
    view.cols = shape.cols;
    const auto bytes = [&](Direction d) {
      return quant::scale_layout_size(view, d, shape.scales).bytes();
    };
    if (reads(kRowView)) out_.row_layout = place(bytes(Direction::kRow), false);
    if (reads(kColView)) out_.col_layout = place(bytes(Direction::kCol), false);
  }

  GatherLayout out_;
  QuantizedSizes shard_, whole_;
};

}  // namespace

Codec::Codec(DType storage) : storage_(storage) {
  MOIETY_CHECK(storage == DType::kBFloat16 || storage == DType::kFloat32,
               "gtp codec: storage is {}, expected bfloat16 or float32", moiety::name(storage));
}

Codec::Codec(const QuantSpec& spec, bool column_planes)
    : spec_(spec), column_planes_(column_planes) {
  check_spec("gtp codec", spec);
  if (spec.format == Format::kFp8Block1x128 || spec.row_scaled || spec.rht_col) {
    fail(ErrorKind::kUnsupported, "gtp codec: {}{} is for activations and gradients, not weights",
         moiety::name(spec.format),
         spec.row_scaled ? ", row_scaled,"
         : spec.rht_col  ? ", rht,"
                         : "");
  }
  MOIETY_CHECK(spec.rounding == Rounding::kNearest, "gtp codec: weights are rounded to nearest");
  MOIETY_CHECK(!column_planes || spec.format == Format::kNvfp4Tile16,
               "gtp codec: column_planes with {}, expected nvfp4_tile16",
               moiety::name(spec.format));
}

const char* Codec::name() const {
  if (spec_) return moiety::name(spec_->format);
  return storage_ == DType::kBFloat16 ? "bf16" : "fp32";
}

int64_t Codec::align() const {
  if (!spec_) return 16;
  if (is_mxfp8(spec_->format)) return 32;
  return is_fp8_block(spec_->format) ? 128 : 16;
}

int64_t Codec::block() const {
  return !spec_ || spec_->format == Format::kFp8Tensor ? 1 : block_shape(spec_->format).cols;
}

bool Codec::one_payload() const {
  if (!spec_) return true;
  return spec_->format != Format::kMxfp8 && spec_->format != Format::kNvfp4 && !column_planes_;
}

int64_t GatherLayout::received() const {
  int64_t bytes = 0;
  for (const Plane& p : planes) bytes += p.bytes;
  return bytes * shape.members * (shape.ranks - 1);
}

GatherLayout gather_layout(const GatherShape& shape, Payload payload, Views views) {
  check_shape(shape, payload, views);
  return LayoutMaker(shape, views).make(payload);
}

QuantizedSizes gathered_sizes(const GatherShape& shape) {
  return quantized_sizes(shape.codec.spec(), shape.rows(), shape.cols, {true, true});
}

}  // namespace moiety::gtp
