// What a weight is stored as and travels as, and where what travels has to land so that a GEMM can
// read it (docs/spec/gtp.md#codecs). Values only; landing.h has the memory and the finish. Arrays
// and bytes are those of formats/quantized.h.
//
//   format             row view travels as           column view travels as   finish of it
//   bf16, fp32         data [s,K]                    the row payload          -
//   kFp8Tensor         data                          the row payload          transpose
//   kFp8Block128x128   data, f32 scales [s/128,..]   the row payload          transpose
//   kMxfp8             data, scales [s,K/32]         data, scales [s/32,K]    -
//   kMxfp8Tile32       data, scales [s/32,K/32]      the row payload          -
//   kNvfp4             data, scales [s,K/16]         data [K,s/2], [K,s/16]   interleave
//   kNvfp4Tile16       data, scales [s/16,K/16]      the row payload          transpose
//                      or, from separate planes:     data [K,s/2], the scales interleave
//
// Scales travel compact; tensor-level values do not travel, since they are equal on all peers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moiety/formats/quantized.h"
#include "moiety/gtp/plan.h"

namespace moiety::gtp {

class Codec {
 public:
  // Not quantized: bfloat16, or float32.
  explicit Codec(DType storage = DType::kBFloat16);
  // A format of the table, rounded to nearest; `column_planes`: shards of kNvfp4Tile16 have column
  // codes of their own. Throws Error(Unsupported) for formats of activations.
  explicit Codec(const QuantSpec& spec, bool column_planes = false);

  bool quantized() const { return spec_.has_value(); }
  const QuantSpec& spec() const { return *spec_; }
  DType storage() const { return storage_; }  // if it is not quantized
  bool column_planes() const { return column_planes_; }
  const char* name() const;

  // A of the layout: shards are a multiple of it of rows.
  int64_t align() const;
  // What TP must not part, so that codes do not depend on it.
  int64_t block() const;
  // One payload for both views.
  bool one_payload() const;

 private:
  DType storage_ = DType::kBFloat16;
  std::optional<QuantSpec> spec_;
  bool column_planes_ = false;
};

// The gather of a bundle: `members` weights of `cols` columns whose shards of `shard_rows` rows
// `ranks` peers hold. `scales`: how the GEMM reads them.
struct GatherShape {
  Codec codec;
  int64_t shard_rows = 0, cols = 0;
  int ranks = 1, members = 1;
  ScaleLayout scales = ScaleLayout::kCompact;
  int64_t rows() const { return shard_rows * ranks; }  // M, gathered
};

// Arrays of a shard, and of what is gathered; bf16 is row data.
enum class Array : uint8_t { kRowData, kRowScales, kColData, kColScales };

// Memory of an array of every member, in a gather's slot or in the lane's scratch.
struct Area {
  int64_t offset = -1;  // bytes; -1: the array is not there
  int64_t stride = 0;   // bytes of a member, which lie one behind the other
  bool scratch = false;
  bool defined() const { return offset >= 0; }
};

// An array that travels: of member e, rank g's `bytes` bytes go to offset + e * stride + g * bytes.
struct Plane {
  Array array;
  int64_t bytes;  // of one shard
  Area area;
};

struct GatherLayout {
  GatherShape shape;
  Views views = 0;
  std::vector<Plane> planes;
  // What is there in the end (row_data and scales may be in scratch, if only their column view or
  // another layout is read), compact.
  Area row_data, row_scales, col_data, col_scales;
  // What is interleaved: parts [G][K][..] of column data and scales.
  Area data_parts, scale_parts;
  // Scales as `shape.scales` has them, of each view; absent if that is compact.
  Area row_layout, col_layout;
  int64_t slot_bytes = 0, scratch_bytes = 0;
  // Of all members, from all other ranks.
  int64_t received() const;
  BundleSpec::Transfer transfer() const { return {received(), slot_bytes, scratch_bytes}; }
};

// Throws Error(InvalidArgument) for shapes off the codec's grid, views that the payload does not
// have, and scale layouts of other scales.
GatherLayout gather_layout(const GatherShape& shape, Payload payload, Views views);

// Shapes of the arrays of one gathered member.
QuantizedSizes gathered_sizes(const GatherShape& shape);

}  // namespace moiety::gtp
