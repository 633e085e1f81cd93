// The weights of a bucket (buffer_layout.h) as the model reads them: in a storage dtype, or each
// tensor in a low-precision format that is cast from the owners' masters (quant/partial_cast.h).
// The bits do not depend on how the bucket is divided among ranks: a weight in a format is
// quantize() of the master rounded to bf16.
//
// In memory the codes of a bucket lie as its elements do, a byte or a nibble each (kMxfp8: two
// planes, one for each direction), so a rank's segment of codes is a range of bytes. Scales are
// computed by every rank and do not travel.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/comm/communicator.h"
#include "moiety/optim/buffer_layout.h"
#include "moiety/quant/partial_cast.h"

namespace moiety::optim {

class BucketWeights {
 public:
  // `rank` is the rank in the bucket's domain. The slots' parameters all have one format, or all
  // none: then they have the dtype `storage`. `memory` is bytes_needed() zeroed bytes, aligned to
  // 64, on the device; with null the object makes its own.
  BucketWeights(std::span<const ParamSpec> specs, const BucketLayout& layout, DType storage,
                int rank, Device device, std::byte* memory = nullptr);
  // Sets what a cast (weight_cast.h) reads, float32 [segment]: the master of the own segment.
  void set_master(const TensorView& master);
  // The bytes that the weights take, a multiple of 64. The place of a weight's arrays depends only
  // on the bucket's layout.
  static int64_t bytes_needed(std::span<const ParamSpec> specs, const BucketLayout& layout,
                              DType storage);

  // Points the slots' parameters at the weights. Addresses do not change.
  void bind(std::span<Parameter> parameters) const;

  // The own segment in the storage dtype, which the update writes; undefined if the weights are
  // kept in a format.
  const TensorView& own_storage() const { return own_storage_; }
  // The members' matrices for a cast, with their arrays; none in the storage dtype.
  std::span<const quant::PartialCastItem> cast_items() const { return items_; }
  std::span<const quant::PartialCastArrays> cast_arrays() const { return arrays_; }
  // Completes the cast: column views have the scales of the row codes.
  void finish_cast(Stream stream) const;
  // Begins to fetch the segments of the other ranks. Collective.
  void gather(comm::Communicator& domain, std::vector<comm::Ticket>& tickets, Stream stream) const;

  // The bytes of gathered weights that are the same on all ranks of the domain; with `tensors`, on
  // all holders. Each a multiple of 64.
  const std::vector<TensorView>& copies(bool tensors) const { return copies_[tensors]; }

 private:
  void place_members(std::span<const ParamSpec> specs, const BucketLayout& layout, int rank);
  std::byte* place_codes(const BucketLayout& layout, int rank, std::byte* memory);
  void place_scales(std::byte* memory);
  TensorView array_at(void* data, const ArraySpec& array) const;

  std::vector<BucketLayout::Slot> slots_;
  std::optional<QuantSpec> format_;
  Device device_;
  Buffer memory_;
  TensorView own_storage_;
  std::vector<TensorView> planes_;  // the parts that travel: [length], or half of it for nibbles
  std::vector<TensorView> own_planes_;               // their own segments
  std::vector<TensorView> weights_;                  // by slot, in the storage dtype
  std::vector<std::vector<QuantizedView>> members_;  // by slot, in the format
  std::vector<quant::PartialCastItem> items_;        // of all members
  std::vector<quant::PartialCastArrays> arrays_;     // theirs, once there is a master
  std::vector<int64_t> starts_;    // where the matrix of each begins, in the own segment
  std::vector<TensorView> words_;  // float32 [members, 2]: amax, tensor_scale
  std::array<std::vector<TensorView>, 2> copies_;
};

}  // namespace moiety::optim
