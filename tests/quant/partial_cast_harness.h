// Ranks that cast their parts of some weights, simulated one after the other, and what must come
// out of it: after the reduction and the gather, quantize() of the whole, and no other byte.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moiety/quant/partial_cast.h"
#include "tests/quant/cases.h"

namespace moiety::quant {

// A weight and its shards: rank r owns elements [cuts[r], cuts[r + 1]).
struct PartialWeight {
  QuantSpec spec;
  int64_t rows = 0, cols = 0;
  std::vector<int64_t> cuts;
  bool col = false;
  bool delayed = false;
  DType master = DType::kFloat32;
  Data data = Data::kNormal;
  uint32_t seed = 1;

  std::string describe() const;
};

struct PartialRun {
  bool aligned = false;
  bool shard_only = false;
  bool reference = false;  // the scalar reference instead of the fast path
  int threads = 1;
  Device device = {};  // where the ranks' arrays are
};

// The weight's elements, [rows, cols] of its master's dtype.
Tensor make_elements(const PartialWeight& weight);

// Each run: all phases on all ranks, twice, over complementary poison. Empty if everything is as it
// must be, else what is not.
std::string run_partial_cast(const std::vector<PartialWeight>& weights,
                             const std::vector<PartialRun>& runs);

// Elementwise maxima over the buffers of all ranks, in the ranges that belong to `over`.
void reduce_max(std::span<const PartialReduction> ranges, PartialReduction::Over over,
                std::span<std::byte* const> buffers);

// Boundaries of `ranks` shards of n elements.
std::vector<int64_t> even_cuts(int64_t n, int ranks);
std::vector<int64_t> random_cuts(int64_t n, int ranks, uint64_t seed);

// Well-mixed bits of a position.
uint64_t mix(uint64_t seed, uint64_t i);

}  // namespace moiety::quant
