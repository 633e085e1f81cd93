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

inline constexpr int32_t kNoTarget = -100;  // a target that does not count

// Where a sample is read to: S tokens and, of each, the token that follows it, or kNoTarget.
// Positions restart at 0 with each document. Where they are asked for, a document's last token has
// no target.
struct SampleRow {
  std::span<int32_t> token, target;
  std::span<int32_t> position = {};  // S, or empty: not asked for
  std::span<uint8_t> routed = {};    // S, or empty: not asked for; 0: padding, which is zeros
};

// How documents become samples.
enum class Pack {
  kStream,     // one behind the other; samples are cut out of the stream
  kDocuments,  // whole, with padding (packing.h)
};

// Samples of S tokens and targets, from several sources. Reading is safe from several threads.
class SampleSource {
 public:
  virtual ~SampleSource() = default;

  virtual int64_t seq_len() const = 0;
  // The sources as the sampler needs them.
  virtual std::vector<SamplerSource> sources() const = 0;
  virtual void read(SampleRef sample, const SampleRow& row) const = 0;
  // The name of a source for people: the path of its file.
  virtual std::string name(int source) const { return "source " + std::to_string(source); }
  // Bytes of text of a source's first samples, where there is a loss mask of the targets' text; 0 if
  // there is no text.
  virtual double text_bytes(int source, uint64_t samples) const = 0;
  // Waits a while until all that was read is checked; what is left then is a warning. Throws the
  // DataError of damaged data, as read() does once it is known.
  virtual void await_checks() const {}
};

struct WeightedPath {
  std::string path;
  double weight = 1;
};

// Samples from token files. In a stream sample i of a file is tokens [i*S, i*S + S], with N =
// floor((tokens - 1) / S) samples. DataError for a file that is unreadable, too short for one
// sample, or of another tokenizer than `identity`, and for files with ids that do not fit `vocab`.
// Files of at most 256 MiB together are checked whole; of larger ones the pieces that are read are,
// in the background.
std::shared_ptr<const SampleSource> open_token_files(std::span<const WeightedPath> files,
                                                     int64_t seq_len, uint32_t vocab,
                                                     const Sha256& identity,
                                                     Pack pack = Pack::kStream);

// Endless samples that are functions of (seed, index). `kind` is one of:
//   uniform: independent ids below vocab; the best loss is ln(vocab).
//   copy: the second half of a sample repeats its first half; half the targets can be learnt.
//   markov: an id is followed by one of four that belong to it; the best loss is at most ln 4.
std::shared_ptr<const SampleSource> synthetic_source(std::string_view kind, int64_t seq_len,
                                                     uint32_t vocab, uint64_t seed);

}  // namespace moiety::data
