#include "moiety/data/sample_source.h"

#include <numeric>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/base/rng.h"
#include "moiety/data/background_check.h"
#include "moiety/data/token_file.h"

namespace moiety::data {
namespace {

constexpr uint64_t kCheckAtOpen = uint64_t{256} << 20;  // bytes: a fraction of a second
constexpr double kCheckWait = 20;  // seconds: well below what a rank waits for another

class FileSamples : public SampleSource {
 public:
  FileSamples(std::vector<std::shared_ptr<const TokenFile>> files, std::vector<uint64_t> weights,
              int64_t seq_len)
      : files_(std::move(files)), weights_(std::move(weights)), seq_len_(seq_len) {
    uint64_t bytes = 0;
    for (const auto& file : files_) bytes += file->bytes();
    if (bytes > kCheckAtOpen) {
      check_ = std::make_unique<BackgroundCheck>(files_);
    } else {
      for (const auto& file : files_) file->verify();
    }
  }

  int64_t seq_len() const override { return seq_len_; }

  std::vector<SamplerSource> sources() const override {
    std::vector<SamplerSource> list;
    for (size_t s = 0; s < files_.size(); ++s) {
      const TokenFileHeader& h = files_[s]->header();
      list.push_back({.identity = {h.crc32c, h.tokens, weights_[s]},
                      .samples = (h.tokens - 1) / static_cast<uint64_t>(seq_len_)});
    }
    return list;
  }

  void read(SampleRef sample, std::span<int32_t> tokens,
            std::span<int32_t> positions) const override {
    const TokenFile& file = *files_[sample.source];
    const uint64_t begin = sample.index * static_cast<uint64_t>(seq_len_);
    if (check_) check_->touch(static_cast<size_t>(sample.source), begin, tokens.size());
    file.read(begin, tokens);
    if (!positions.empty()) file.positions(begin, positions);
  }

  std::string name(int source) const override { return files_[source]->path(); }
  double bytes_per_token(int source) const override {
    const TokenFileHeader& h = files_[source]->header();
    return static_cast<double>(h.source_bytes) / static_cast<double>(h.tokens);
  }

  void await_checks() const override {
    const uint64_t left = check_ ? check_->settle(kCheckWait) : 0;
    if (left == 0) return;
    log(LogLevel::kWarning,
        "data: {} of the tokens that were read are not checked yet (moiety verify checks a file)",
        bytes_text(static_cast<int64_t>(left * kPieceBytes)));
  }

 private:
  std::vector<std::shared_ptr<const TokenFile>> files_;
  std::vector<uint64_t> weights_;
  int64_t seq_len_;
  std::unique_ptr<BackgroundCheck> check_;  // null: all has been checked
};

enum class SyntheticKind { kUniform, kCopy, kMarkov };

class SyntheticSamples : public SampleSource {
 public:
  SyntheticSamples(SyntheticKind kind, int64_t seq_len, uint32_t vocab, uint64_t seed)
      : kind_(kind), seq_len_(seq_len), vocab_(vocab), key_(rng_key(seed, RngDomain::kShuffle)) {}

  int64_t seq_len() const override { return seq_len_; }

  std::vector<SamplerSource> sources() const override {
    // No file has 0 tokens and samples.
    const SourceIdentity identity{static_cast<uint32_t>(kind_), 0, uint64_t{1} << 32};
    return {{.identity = identity, .samples = uint64_t{1} << 48}};
  }

  void read(SampleRef sample, std::span<int32_t> tokens,
            std::span<int32_t> positions) const override {
    const size_t period = kind_ == SyntheticKind::kCopy ? (tokens.size() + 1) / 2 : tokens.size();
    for (size_t p = 0; p < tokens.size(); ++p) {
      if (p >= period) {
        tokens[p] = tokens[p - period];
        continue;
      }
      const uint32_t word =
          philox(key_, {static_cast<uint32_t>(p), static_cast<uint32_t>(sample.index),
                        static_cast<uint32_t>(sample.index >> 32), kSampleStream})[0];
      tokens[p] = kind_ == SyntheticKind::kMarkov && p > 0
                      ? successor(static_cast<uint32_t>(tokens[p - 1]), word >> 30)
                      : id_below_vocab(word);
    }
    std::iota(positions.begin(), positions.end(), 0);
  }

  double bytes_per_token(int) const override { return 0; }

 private:
  // This stands for the source's number in the counters of the shuffle, so that streams do not
  // meet.
  static constexpr uint32_t kSampleStream = 0xffffffff;
  static constexpr uint32_t kSuccessorStream = 0xfffffffe;

  int32_t id_below_vocab(uint32_t word) const {
    return static_cast<int32_t>((uint64_t{word} * vocab_) >> 32);
  }
  int32_t successor(uint32_t id, uint32_t choice) const {
    return id_below_vocab(philox(key_, {id, 0, 0, kSuccessorStream})[choice]);
  }

  SyntheticKind kind_;
  int64_t seq_len_;
  uint32_t vocab_;
  PhiloxKey key_;
};

}  // namespace

std::shared_ptr<const SampleSource> open_token_files(std::span<const WeightedPath> files,
                                                     int64_t seq_len, uint32_t vocab,
                                                     const Sha256& identity) {
  MOIETY_CHECK(seq_len >= 1, "data: seq_len is {}", seq_len);
  std::vector<std::shared_ptr<const TokenFile>> opened;
  std::vector<double> weights;
  for (const WeightedPath& f : files) {
    const auto& file = opened.emplace_back(TokenFile::open(f.path));
    weights.push_back(f.weight);
    const TokenFileHeader& h = file->header();
    if (h.tokenizer != identity) {
      throw DataError(
          "{}: made with another tokenizer: its SHA-256 is {}, that of data.tokenizer {}", f.path,
          hex(h.tokenizer), hex(identity));
    }
    if (h.vocab > vocab) {
      throw DataError("{}: its vocabulary of {} does not fit the model's of {}", f.path, h.vocab,
                      vocab);
    }
    if (h.tokens < static_cast<uint64_t>(seq_len) + 1) {
      throw DataError("{}: {} tokens are too few for one sample of seq_len + 1 = {}", f.path,
                      h.tokens, seq_len + 1);
    }
  }
  return std::make_shared<FileSamples>(std::move(opened), integer_weights(weights), seq_len);
}

std::shared_ptr<const SampleSource> synthetic_source(std::string_view kind, int64_t seq_len,
                                                     uint32_t vocab, uint64_t seed) {
  MOIETY_CHECK(seq_len >= 1 && vocab >= 1, "synthetic data: seq_len {}, vocab {}", seq_len, vocab);
  const auto make = [&](SyntheticKind k) {
    return std::make_shared<SyntheticSamples>(k, seq_len, vocab, seed);
  };
  if (kind == "uniform") return make(SyntheticKind::kUniform);
  if (kind == "copy") return make(SyntheticKind::kCopy);
  if (kind == "markov") return make(SyntheticKind::kMarkov);
  throw UsageError("data.synthetic is '{}'; there are: uniform, copy, markov", kind);
}

}  // namespace moiety::data
