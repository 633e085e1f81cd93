#include "moiety/data/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "moiety/base/error.h"

namespace moiety::data {
namespace {

constexpr uint64_t kWeightSum = uint64_t{1} << 32;
constexpr int kRounds = 6;

}  // namespace

Permutation::Permutation(uint64_t n, uint64_t seed, uint32_t source)
    : n_(n), key_(rng_key(seed, RngDomain::kShuffle)), source_(source) {
  MOIETY_CHECK(n >= 1, "permutation: n is 0");
  const int bits = std::bit_width(n - 1);  // ceil(log2 n)
  half_bits_ = std::max(1, (bits + 1) / 2);
}

uint64_t Permutation::operator()(uint64_t j, uint32_t epoch) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = j >> half_bits_, right = j & mask;
  while (true) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      const PhiloxBlock block = philox(key_, {static_cast<uint32_t>(right), round, epoch, source_});
      left ^= block[0] & mask;
      std::swap(left, right);
    }
    const uint64_t i = left << half_bits_ | right;
    if (i < n_) return i;
  }
}

std::vector<uint64_t> integer_weights(std::span<const double> weights) {
  double sum = 0;
  for (const double w : weights) {
    MOIETY_CHECK(std::isfinite(w) && w > 0, "data: weight {} is not a positive number", w);
    sum += w;
  }
  std::vector<uint64_t> whole(weights.size());
  std::vector<double> remainder(weights.size());
  for (size_t s = 0; s < weights.size(); ++s) {
    const double exact = weights[s] / sum * static_cast<double>(kWeightSum);
    whole[s] = static_cast<uint64_t>(exact);
    remainder[s] = exact - std::floor(exact);
  }
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return remainder[a] > remainder[b]; });
  // The rest is below the number of sources (and, by rounding, at worst one unit negative).
  int64_t left = static_cast<int64_t>(kWeightSum) -
                 static_cast<int64_t>(std::accumulate(whole.begin(), whole.end(), uint64_t{0}));
  for (size_t k = 0; left > 0; k = (k + 1) % order.size(), --left) ++whole[order[k]];
  for (size_t k = order.size(); left < 0; ++left) --whole[order[--k]];
  return whole;
}

Sampler::Sampler(std::span<const SamplerSource> sources, uint64_t seed, bool shuffle,
                 uint64_t epochs)
    : shuffle_(shuffle), epochs_(epochs) {
  MOIETY_CHECK(!sources.empty(), "sampler: no sources");
  uint64_t weight = 0;
  for (const SamplerSource& s : sources) {
    order_.emplace_back(s.samples, seed, static_cast<uint32_t>(order_.size()));
    samples_.push_back(s.samples);
    state_.sources.push_back({.identity = s.identity});
    weight += s.identity.weight;
  }
  MOIETY_CHECK(weight == kWeightSum, "sampler: weights sum to {}, not 2^32", weight);
}

SampleRef Sampler::take_one() {
  size_t best = 0;
  for (size_t s = 0; s < state_.sources.size(); ++s) {
    state_.sources[s].credit += static_cast<int64_t>(state_.sources[s].identity.weight);
    if (state_.sources[s].credit > state_.sources[best].credit) best = s;
  }
  SamplerState::Source& source = state_.sources[best];
  if (epochs_ > 0 && source.epoch >= epochs_) return {.source = -1};
  source.credit -= static_cast<int64_t>(kWeightSum);
  const uint64_t j = source.position;
  const uint64_t i = shuffle_ ? order_[best](j, static_cast<uint32_t>(source.epoch)) : j;
  if (++source.position == samples_[best]) {
    source.position = 0;
    ++source.epoch;
  }
  ++state_.sample;
  return {static_cast<int>(best), i};
}

bool Sampler::take(int64_t count, std::vector<SampleRef>& samples) {
  const SamplerState before = state_;
  samples.clear();
  for (int64_t k = 0; k < count; ++k) {
    samples.push_back(take_one());
    if (samples.back().source < 0) {
      samples.clear();
      state_ = before;
      return false;
    }
  }
  return true;
}

void Sampler::restore(const SamplerState& state) {
  const auto describe = [](const SamplerState& s) {
    std::string list;
    for (const auto& source : s.sources) {
      const SourceIdentity& id = source.identity;
      list += text("{}(crc32c {:08x}, {} tokens, weight {:.6f})", list.empty() ? "" : ", ",
                   id.crc32c, id.tokens, static_cast<double>(id.weight) / kWeightSum);
    }
    return list;
  };
  bool same = state.sources.size() == state_.sources.size();
  for (size_t s = 0; same && s < samples_.size(); ++s) {
    same = state.sources[s].identity == state_.sources[s].identity &&
           state.sources[s].position < samples_[s];
  }
  if (!same) {
    throw CheckpointError("data.train: the checkpoint was trained on {}; the files now are {}",
                          describe(state), describe(state_));
  }
  state_ = state;
}

}  // namespace moiety::data
