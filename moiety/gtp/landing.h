// The memory that a gather fills, and the step from the parts that travelled to the arrays that a
// GEMM reads (docs/spec/gtp.md#codecs). Addresses are fixed: a landing is made once for a slot,
// used in every step, and captured in graphs.
#pragma once

#include <vector>

#include "moiety/gtp/codec.h"
#include "moiety/quant/quantize.h"

namespace moiety::gtp {

class Landing {
 public:
  // `slot` and `scratch` are uint8 [at least the bytes of the layout]; they do not overlap and
  // begin at multiples of 256 bytes.
  Landing(const GatherLayout& layout, TensorView slot, TensorView scratch);

  const GatherLayout& layout() const { return layout_; }
  // The place of rank g's bytes of a plane of the layout: uint8 [members, bytes], rows `stride`
  // apart.
  TensorView part(const Plane& plane, int g) const;
  // Transposes, interleaves and lays out the scales, once all parts have landed. Every byte of the
  // views is written, pads with 0.
  void finish(Stream stream) const;

  // Member e as gathered, with padding rows: the arrays of the views that the layout makes, with
  // scales as it says. amax and tensor_scale are undefined, since the shard has them. Undefined for
  // weights that are not quantized.
  const QuantizedView& view(int e) const { return views_[e]; }
  // Member e of weights that are not quantized: [rows, cols] in the storage dtype.
  TensorView data(int e) const;

 private:
  TensorView memory(const Area& area) const { return area.scratch ? scratch_ : slot_; }
  // The array of member e; undefined if the layout has none.
  TensorView array(const Area& area, const ArraySpec& spec, int e) const;
  // The arrays of all members, uint8 [members, ...].
  TensorView bytes(const Area& area, std::initializer_list<int64_t> sizes) const;

  GatherLayout layout_;
  TensorView slot_, scratch_;
  std::vector<QuantizedView> compact_;  // as gathered
  std::vector<QuantizedView> views_;
  quant::QuantizeTable transposes_;
};

}  // namespace moiety::gtp
