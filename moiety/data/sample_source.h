// The sources of samples: token files, or made-up tokens for benchmarks and tests.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/data/sampler.h"
#include "moiety/data/sha256.h"

namespace moiety::data {

// Samples of S+1 tokens, from several sources. Reading is safe from several threads.
class SampleSource {
 public:
  virtual ~SampleSource() = default;

  virtual int64_t seq_len() const = 0;
  // The sources as the sampler needs them.
  virtual std::vector<SamplerSource> sources() const = 0;
  // Reads a sample into `tokens`, S+1 ids, and into `positions`, which is empty or gets S+1
  // positions that restart at 0 with each document.
  virtual void read(SampleRef sample, std::span<int32_t> tokens,
                    std::span<int32_t> positions) const = 0;
  // The name of a source for people: the path of its file.
  virtual std::string name(int source) const { return "source " + std::to_string(source); }
  // Bytes of text per token of a source; 0 if there is no text.
  virtual double bytes_per_token(int source) const = 0;
  // Waits a while until all that was read is checked; what is left then is a warning. Throws the
  // DataError of damaged data, as read() does once it is known.
  virtual void await_checks() const {}
};

struct WeightedPath {
  std::string path;
  double weight = 1;
};

// Samples from token files: sample i of a file is tokens [i*S, i*S + S], with N = floor((tokens -
// 1) / S) samples. DataError for a file that is unreadable, too short for one sample, or of another
// tokenizer than `identity`, and for files with ids that do not fit `vocab`. Files of at most 256 MiB
// together are checked whole; of larger ones the pieces that are read are, in the background.
std::shared_ptr<const SampleSource> open_token_files(std::span<const WeightedPath> files,
                                                     int64_t seq_len, uint32_t vocab,
                                                     const Sha256& identity);

// Endless samples that are functions of (seed, index). `kind` is one of:
//   uniform: independent ids below vocab; the best loss is ln(vocab).
//   copy: the second half of a sample repeats its first half; half the targets can be learnt.
//   markov: an id is followed by one of four that belong to it; the best loss is at most ln 4.
std::shared_ptr<const SampleSource> synthetic_source(std::string_view kind, int64_t seq_len,
                                                     uint32_t vocab, uint64_t seed);

}  // namespace moiety::data
