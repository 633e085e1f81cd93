// The places of parameters in the optimizer's flat buffers, and the elements that a rank owns
// (docs/spec/optimizer.md#buckets). Everything is a pure function of the parameter list.
//
// Parameters share buckets if they are of one grid and one format class, all trained or all frozen,
// and their gradients are summed over the same ranks (the domain). Buckets hold them in reverse order of construction,
// which is close to the order of backward. A bucket is divided evenly: rank i of P owns [i*L/P,
// (i+1)*L/P) of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "moiety/base/host_device.h"
#include "moiety/optim/parameter.h"

namespace moiety::optim {

inline constexpr int64_t kParameterAlignment = 128;  // elements
inline constexpr int64_t kBucketElements = int64_t{32} << 20;

struct BucketLayout {
  struct Slot {
    int parameter = 0;  // index into the specs
    int64_t start = 0;  // element of the bucket, a multiple of kParameterAlignment
  };
  bool expert = false;  // whether it belongs to the expert grid
  bool frozen = false;  // whether its parameters are
  gtp::Axes domain;     // axes of the domain that have several ranks
  int ranks = 1;        // P, ranks of the domain
  int64_t length = 0;   // elements, a multiple of kParameterAlignment * ranks
  std::vector<Slot> slots;

  int64_t segment() const { return length / ranks; }  // elements that a rank owns
};

// The buckets, dense ones first. A parameter never spans buckets; one that is larger than a bucket
// stands alone.
std::vector<BucketLayout> layout_buffers(std::span<const ParamSpec> specs, const gtp::Grid& grid,
                                         int64_t bucket_elements = kBucketElements);

// The columns [first, first + count), of `all` columns of a tensor, that a rank holds.
struct ColumnRange {
  int64_t first = 0, count = 1, all = 1;

  MOIETY_HD bool whole() const { return count == all; }
  // The index in the tensor of element i, row-major, of these columns.
  MOIETY_HD int64_t in_tensor(int64_t i) const {
    return whole() ? i : i / count * all + first + i % count;
  }
  // The number of elements, of n from the i-th on, that follow each other in the tensor too.
  int64_t stretch(int64_t i, int64_t n) const {
    return whole() ? n : std::min(n, count - i % count);
  }
};

// The parameter's tensor in the bucket's memory `flat`, [length].
TensorView slot_view(const TensorView& flat, const BucketLayout::Slot& slot, const ParamSpec& spec);

// Consecutive elements of a segment that hold consecutive elements of a logical tensor's columns on
// this rank. Elements between runs are padding: zero in weights and state.
struct ElementRun {
  int64_t begin = 0;  // elements of the segment
  int64_t end = 0;
  int parameter = 0;    // index into the specs
  int tensor = 0;       // index into the parameter's tensors
  int64_t logical = 0;  // row-major index of the first element in `columns` of the tensor
  ColumnRange columns{};
  uint32_t tensor_id = 0;  // as base/rng has it
  bool decay = true;
  ParameterClass kind = ParameterClass::kDense;
};

// The runs that rank `rank` of the bucket's domain owns, ascending.
std::vector<ElementRun> segment_runs(std::span<const ParamSpec> specs, const BucketLayout& bucket,
                                     int rank);

// Throws Error(kInvalidArgument) naming the first spec that does not fit itself (a row map that
// goes back or leaves its tensors, columns outside of them, a shape of another size, a domain with
// axes of the other grid), or two tensors with one name or tensor_id.
void check_specs(std::span<const ParamSpec> specs);

// A hash that is equal on ranks that agree about the bucket: its parameters, their sizes and
// places.
uint32_t size_hash(std::span<const ParamSpec> specs, const BucketLayout& bucket);
// A hash that is equal on all ranks of a domain that agree also about the parts that they share.
uint32_t part_hash(std::span<const ParamSpec> specs, const BucketLayout& bucket);

}  // namespace moiety::optim
