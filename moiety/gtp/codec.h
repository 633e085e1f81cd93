// Codecs: the form in which a weight is stored and travels, and the places where its parts have to
// land so that a GEMM can read them (docs/spec/gtp.md#codecs). These are values only; landing.h has
// the memory and the finish. Arrays and bytes are those of formats/quantized.h.
//
//    format             row view travels as           column view travels as   finish of it
//    bf16, fp32         data [s,K]                    the row payload          -
//    kFp8Tensor         data                          the row payload          transpose
//    kFp8Block128x128   data, f32 scales [s/128,..]   the row payload          transpose
//    kMxfp8             data, scales [s,K/32]         data, scales [s/32,K]    -
//    kMxfp8Tile32       data, scales [s/32,K/32]      the row payload          -
//    kNvfp4             data, scales [s,K/16]         data [K,s/2], [K,s/16]   interleave
//    kNvfp4Tile16       data, scales [s/16,K/16]      the row payload          transpose
//                       or, from separate planes:     data [K,s/2], the scales interleave
//
// Scales travel compact. Tensor-level values do not travel, since they are equal on all peers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moiety/formats/quantized.h"
#include "moiety/gtp/plan.h"

namespace moiety::gtp {

class Codec {
 public:
  // Without quantization: bfloat16 or float32.
  explicit Codec(DType storage = DType::kBFloat16);
  // A format of the table, rounded to nearest. With `column_planes`, shards of kNvfp4Tile16 have
  // column codes of their own. Throws Error(kUnsupported) for formats of activations.
  explicit Codec(const QuantSpec& spec, bool column_planes = false);

  bool quantized() const { return spec_.has_value(); }
  const QuantSpec& spec() const { return *spec_; }
  DType storage() const { return storage_; }  // dtype, if it is not quantized
  bool column_planes() const { return column_planes_; }
  const char* name() const;

  // A of the layout: the rows of a shard are a multiple of it.
  int64_t align() const;
  // The rows or columns that TP must not part, so that codes do not depend on TP.
  int64_t block() const;
  // Whether one payload serves both views.
  bool one_payload() const;

 private:
  DType storage_ = DType::kBFloat16;
  std::optional<QuantSpec> spec_;
  bool column_planes_ = false;
};

// The gather of a bundle: `members` weights of `cols` columns, of which `ranks` peers hold shards
// of `shard_rows` rows. `scales` is the layout in which the GEMM reads them.
struct GatherShape {
  Codec codec;
  int64_t shard_rows = 0, cols = 0;
  int ranks = 1, members = 1;
  ScaleLayout scales = ScaleLayout::kCompact;
  int64_t rows() const { return shard_rows * ranks; }  // M, gathered
};

// The arrays of a shard and of a gathered weight; bf16 counts as row data.
enum class Array : uint8_t { kRowData, kRowScales, kColData, kColScales };

// Memory for an array of every member, in a gather's slot or in the lane's scratch.
struct Area {
  int64_t offset = -1;  // bytes; -1 if there is no such array
  int64_t stride = 0;   // bytes of a member; members lie one behind the other
  bool scratch = false;
  bool defined() const { return offset >= 0; }
};

// An array that travels. For member e, the `bytes` bytes of rank g go to offset + e * stride + g *
// bytes.
struct Plane {
  Array array;
  int64_t bytes;  // bytes of one shard
  Area area;
};

struct GatherLayout {
  GatherShape shape;
  Views views = 0;
  std::vector<Plane> planes;
  // The arrays at the end, compact (row_data and scales may be in scratch, if only their column
  // view or another layout is read).
  Area row_data, row_scales, col_data, col_scales;
  // The parts that are interleaved: [G][K][..] of column data and scales.
  Area data_parts, scale_parts;
  // Scales of each view in the layout `shape.scales`; absent if that is compact.
  Area row_layout, col_layout;
  int64_t slot_bytes = 0, scratch_bytes = 0;
  // Bytes received of all members from all other ranks.
  int64_t received() const;
  BundleSpec::Transfer transfer() const { return {received(), slot_bytes, scratch_bytes}; }
};

// The layout of a gather. Throws Error(kInvalidArgument) for shapes off the codec's grid, views
// that the payload does not have, and scale layouts of other scales.
GatherLayout gather_layout(const GatherShape& shape, Payload payload, Views views);

// The shapes of the arrays of one gathered member.
QuantizedSizes gathered_sizes(const GatherShape& shape);

}  // namespace moiety::gtp
