// The memory that a gather fills, and the step from what travelled to what a GEMM reads
// (docs/spec/gtp.md#codecs). Addresses are fixed: made once for a slot, used in every step,
// captured in graphs.
#pragma once

#include <vector>

#include "moiety/gtp/codec.h"
#include "moiety/quant/quantize.h"

namespace moiety::gtp {

class Landing {
 public:
  // `slot` and `scratch` are uint8 [at least the bytes of the layout], apart from each other, at
  // multiples of 256 bytes.
  Landing(const GatherLayout& layout, TensorView slot, TensorView scratch);

  const GatherLayout& layout() const { return layout_; }
  // Where rank g's bytes of a plane of the layout belong: uint8 [members, bytes], rows `stride`
  // apart.
  TensorView part(const Plane& plane, int g) const;
  // Once all parts have landed: transposes, interleaves, lays the scales out. Every byte of the
  // views is written, pads with 0.
  void finish(Stream stream) const;

  // What is gathered of member e, with padding rows: the arrays of the views that the layout makes,
  // scales as it says. amax and tensor_scale are undefined: the shard has them. Not quantized:
  // undefined.
  const QuantizedView& view(int e) const { return views_[e]; }
  // Not quantized: [rows, cols] in the storage type.
  TensorView data(int e) const;

 private:
  TensorView memory(const Area& area) const { return area.scratch ? scratch_ : slot_; }
  // The array of member e; undefined where the layout has none.
  TensorView array(const Area& area, const ArraySpec& spec, int e) const;
  // All members', uint8 [members, ...].
  TensorView bytes(const Area& area, std::initializer_list<int64_t> sizes) const;

  GatherLayout layout_;
  TensorView slot_, scratch_;
  std::vector<QuantizedView> compact_;  // as gathered
  std::vector<QuantizedView> views_;
  quant::QuantizeTable transposes_;
};

}  // namespace moiety::gtp
