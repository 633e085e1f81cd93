// The order of samples (docs/spec/trainer.md#order-of-samples). It is a function only of seed,
// sources and the global sample number: it knows nothing of ranks and layouts, and its whole state
// is a few numbers per source, so a resumed run continues exactly.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/base/rng.h"

namespace moiety::data {

// A bijection of [0, n): six Feistel rounds on the smallest even number of bits that holds n,
// repeated until the result is below n.
class Permutation {
 public:
  // n >= 1; different sources and epochs give different orders.
  Permutation(uint64_t n, uint64_t seed, uint32_t source);
  uint64_t operator()(uint64_t j, uint32_t epoch) const;

 private:
  uint64_t n_;
  int half_bits_;
  PhiloxKey key_;
  uint32_t source_;
};

// Weights as integers that sum to 2^32, by largest remainder (in ties the lower index comes first).
std::vector<uint64_t> integer_weights(std::span<const double> weights);

// The facts by which a resumed run recognizes a source; its path may change.
struct SourceIdentity {
  uint32_t crc32c = 0;
  uint64_t tokens = 0;
  uint64_t weight = 0;  // from integer_weights
  bool operator==(const SourceIdentity&) const = default;
};

struct SamplerSource {
  SourceIdentity identity;
  uint64_t samples = 0;
};

struct SampleRef {
  int source = 0;
  uint64_t index = 0;  // index in the source
  bool operator==(const SampleRef&) const = default;
};

struct SamplerState {
  struct Source {
    SourceIdentity identity;
    int64_t credit = 0;
    uint64_t epoch = 0;
    uint64_t position = 0;  // samples taken in this epoch
    bool operator==(const Source&) const = default;
  };
  uint64_t sample = 0;  // global sample number: samples taken from all sources
  std::vector<Source> sources;
  bool operator==(const SamplerState&) const = default;
};
std::string to_json(const SamplerState& state);
// The state in a JSON text. Throws CheckpointError if it is none.
SamplerState parse_sampler_state(std::string_view json);

class Sampler {
 public:
  // `epochs` is the number of passes over a source before the data ends; 0 is endless.
  Sampler(std::span<const SamplerSource> sources, uint64_t seed, bool shuffle, uint64_t epochs);

  // Gives the next `count` samples; or returns false and takes none, if a source would begin an
  // epoch too many.
  bool take(int64_t count, std::vector<SampleRef>& samples);

  const SamplerState& state() const { return state_; }
  // Throws CheckpointError with both lists if the state belongs to other sources.
  void restore(const SamplerState& state);

 private:
  SampleRef take_one();

  std::vector<uint64_t> samples_;
  std::vector<Permutation> order_;
  bool shuffle_;
  uint64_t epochs_;
  SamplerState state_;
};

}  // namespace moiety::data
