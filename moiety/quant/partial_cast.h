// The partial cast. Every rank owns elements [start, end) of each weight, in row-major order, as
// float32 or bf16 master values, and casts them into the low-precision weight. After three phases
// and an all-gather every rank holds the result of quantize() of the whole weight, bit for bit, for
// every split (docs/spec/formats.md#partial-cast):
//
//    partial_amax(plan, ...)      amax of the owned elements, into the reduction buffer
//    MAX over ranks               by the caller, of plan.reductions()
//    partial_cast(plan, ...)      every scale of every tensor; the codes of the owned elements
//    all-gather of the codes, then transpose_quantized
//
// Formats: kFp8Tensor (current, delayed), kFp8Block128x128, kMxfp8 (row and col), kMxfp8Tile32,
// kNvfp4Tile16; only in the row direction kFp8Block1x128 and kNvfp4. Rounding is to nearest. With
// spec.through_bf16 masters are rounded to bf16 first.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "moiety/base/stream.h"
#include "moiety/formats/quantized.h"
#include "moiety/quant/delayed_scaling.h"

namespace moiety::quant {

// A weight and this rank's part of it: elements [start, end), with start == end for no part.
struct PartialCastItem {
  QuantSpec spec;
  int64_t rows = 0, cols = 0;
  int64_t start = 0, end = 0;
  bool col = false;      // kMxfp8: col codes and scales too
  bool delayed = false;  // kFp8Tensor: delayed scaling
};

// A range of the reduction buffer, to be reduced with MAX over ranks.
struct PartialReduction {
  enum class Over : uint8_t {
    kTensor,  // all holders of the uncut tensor: amax words
    kShard,   // the ranks that share this shard: block amaxes and exponents
  };
  Over over = Over::kTensor;
  DType dtype = DType::kInt32;    // kInt32: bits of maxima; kUInt8: E8M0 bytes
  int64_t offset = 0, bytes = 0;  // place in the reduction buffer
};

// The words of an item in the reduction buffer: where they begin, in bytes, or -1 if it has none.
struct PartialWords {
  // Words of the blocks of a direction, row-major: int32 bits of their amaxes; of MXFP8 E8M0 bytes.
  struct Blocks {
    int64_t offset = -1;
    int64_t rows = 0, cols = 0;
  };
  int64_t tensor = -1;  // int32 bits of the tensor's amax
  Blocks row, col;      // col: of MXFP8 alone, if it is asked for
};

// Bytes [begin, end) of an item's row data.
struct ByteRange {
  int64_t begin = 0, end = 0;
};
// The bytes that the codes of elements [start, end) take in the row data of a rows x cols tensor;
// up to the next row if `end` closes one.
ByteRange shard_bytes(const QuantSpec& spec, int64_t rows, int64_t cols, int64_t start,
                      int64_t end);

// The plan of a list of items: a pure function of the list and of `aligned`, made once, before the
// first step. Offsets and dtypes of the reductions follow from shapes and specs alone, so they are
// equal on all ranks.
class PartialCastPlan {
 public:
  // `aligned` is a promise, equal on all ranks, that every boundary of every tensor is a multiple
  // of (rows of a block) * cols. Blocks then belong to one rank: only the words of tensor-scaled
  // formats are reduced, and each rank writes its own scales, which travel beside the codes. Throws
  // Error(kInvalidArgument) for ranges out of bounds and own ranges that break the promise,
  // Error(kUnsupported) for formats and options that have no partial cast.
  // Plans with `aligned` are library only: those of the optimizer are not aligned.
  PartialCastPlan(std::span<const PartialCastItem> items, bool aligned);
  ~PartialCastPlan();
  PartialCastPlan(PartialCastPlan&&) noexcept;
  PartialCastPlan& operator=(PartialCastPlan&&) noexcept;

  std::span<const PartialCastItem> items() const;
  bool aligned() const;
  // Bytes of the buffer [int32 region | uint8 region], whose parts are aligned to 16 bytes.
  int64_t reduction_bytes() const;
  std::span<const PartialReduction> reductions() const;
  PartialWords words(int64_t item) const;
  // Whether an all-gather of bytes can join the shards of an item, since no byte is split.
  bool gatherable(int64_t item) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// The arrays of each item of a plan, made once. `out.row_data` (and for kMxfp8 `out.col_data`)
// holds the whole tensor or, if shard_only, the bytes of this rank's shard, with element `start` in
// the first byte. Scales, amax and tensor_scale are those of the whole tensor.
struct PartialCastArrays {
  TensorView master;  // float32 or bf16 [end - start]; undefined if this rank owns nothing
  QuantizedView out;
  bool shard_only = false;
  const DelayedScaling* delayed = nullptr;
};
// The arrays of a plan's items. The table copies them; the plan must outlive it, and both outlive
// the operations that use them. All arrays are on one device, and so is the table; making it waits
// for a GPU.
class PartialCastTable {
 public:
  PartialCastTable(const PartialCastPlan& plan, std::span<const PartialCastArrays> arrays);
  ~PartialCastTable();
  PartialCastTable(PartialCastTable&&) noexcept;
  PartialCastTable& operator=(PartialCastTable&&) noexcept;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// Phase 1: zeroes `reduction` (uint8 [plan.reduction_bytes()]) and adds the maxima of the owned
// elements. The work is proportional to their number.
void partial_amax(const PartialCastPlan& plan, const PartialCastTable& table, TensorView reduction,
                  Stream stream);
// Phase 3: sets scales, amax[0], tensor_scale[0] (for kMxfp8 with col also [1]) and flags to those
// of quantize(); with aligned shards each rank has only its own scales, and flags of those. Bytes
// of codes outside of the owned range keep their values; in a byte that two ranks share only the
// own nibble changes. With a delayed scale the reduced amax goes to step_amax.
void partial_cast(const PartialCastPlan& plan, const PartialCastTable& table, TensorView reduction,
                  Stream stream);

}  // namespace moiety::quant
