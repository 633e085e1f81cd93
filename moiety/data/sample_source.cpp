#include "moiety/data/sample_source.h"

#include <algorithm>
#include <numeric>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/base/rng.h"
#include "moiety/data/background_check.h"
#include "moiety/data/packing.h"
#include "moiety/data/token_file.h"

namespace moiety::data {
namespace {

constexpr uint64_t kCheckAtOpen = uint64_t{256} << 20;  // bytes: a fraction of a second
constexpr double kCheckWait = 20;  // seconds: well below what a rank waits for another

// Where there is no loss the target becomes kNoTarget: target[i] is token begin + 1 + i of the file.
void mask_targets(const TokenFile& file, uint64_t begin, std::span<int32_t> target) {
  if (!file.has_mask()) return;
  std::vector<uint8_t> is_target(target.size());
  file.targets(begin + 1, is_target);
  for (size_t i = 0; i < target.size(); ++i) {
    if (!is_target[i]) target[i] = kNoTarget;
  }
}

// Reads tokens [begin, begin + size) and, as targets, the tokens that follow them; the last one's
// is behind them only if `goes_on`.
void read_tokens(const TokenFile& file, uint64_t begin, bool goes_on, std::span<int32_t> token,
                 std::span<int32_t> target) {
  const size_t size = token.size();
  file.read(begin, token);
  std::copy(token.begin() + 1, token.end(), target.begin());
  target[size - 1] = kNoTarget;
  if (goes_on) file.read(begin + size, target.last(1));
  mask_targets(file, begin, goes_on ? target : target.first(size - 1));
}

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
      // Files whose loss masks differ are not the same data.
      const uint32_t crc =
          files_[s]->has_mask() ? moiety::crc32c(&h.mask_crc32c, 4, h.crc32c) : h.crc32c;
      list.push_back({.identity = {crc, h.tokens, weights_[s]}, .samples = samples(s)});
    }
    return list;
  }

  std::string name(int source) const override { return files_[source]->path(); }

  double text_bytes(int source, uint64_t samples) const override {
    const TokenFile& file = *files_[source];
    const TokenFileHeader& h = file.header();
    const auto source_bytes = static_cast<double>(h.source_bytes);
    if (!file.has_mask()) {
      return source_bytes / static_cast<double>(h.tokens) *
             static_cast<double>(tokens_of(source, samples));
    }
    return source_bytes * (static_cast<double>(targets_of(source, samples)) /
                           static_cast<double>(std::max<uint64_t>(file.target_count(), 1)));
  }

  void await_checks() const override {
    const uint64_t left = check_ ? check_->settle(kCheckWait) : 0;
    if (left == 0) return;
    log(LogLevel::kWarning,
        "data: {} of the tokens that were read are not checked yet (moiety verify checks a file)",
        bytes_text(static_cast<int64_t>(left * kPieceBytes)));
  }

 protected:
  const TokenFile& file(int source) const { return *files_[source]; }
  void touch(int source, uint64_t begin, uint64_t count) const {
    if (check_) check_->touch(static_cast<size_t>(source), begin, count);
  }
  virtual uint64_t samples(size_t source) const = 0;
  // The tokens, and the targets among them, in a source's first samples.
  virtual uint64_t tokens_of(int source, uint64_t samples) const = 0;
  virtual uint64_t targets_of(int source, uint64_t samples) const = 0;

 private:
  std::vector<std::shared_ptr<const TokenFile>> files_;
  std::vector<uint64_t> weights_;
  int64_t seq_len_;
  std::unique_ptr<BackgroundCheck> check_;  // null: all has been checked
};

class StreamSamples : public FileSamples {
 public:
  using FileSamples::FileSamples;

  void read(SampleRef sample, const SampleRow& row) const override {
    const TokenFile& tokens = file(sample.source);
    const size_t length = row.token.size();
    const uint64_t begin = sample.index * length;
    touch(sample.source, begin, length + 1);
    read_tokens(tokens, begin, true, row.token, row.target);
    std::fill(row.routed.begin(), row.routed.end(), uint8_t{1});
    if (row.position.empty()) return;
    std::vector<int32_t> positions(length + 1);
    tokens.positions(begin, positions);
    std::copy_n(positions.begin(), length, row.position.begin());
    for (size_t i = 0; i < length; ++i) {
      if (positions[i + 1] == 0) row.target[i] = kNoTarget;
    }
  }

 private:
  uint64_t samples(size_t source) const override {
    return (file(static_cast<int>(source)).header().tokens - 1) / static_cast<uint64_t>(seq_len());
  }
  uint64_t tokens_of(int, uint64_t samples) const override {
    return samples * static_cast<uint64_t>(seq_len());
  }
  uint64_t targets_of(int source, uint64_t samples) const override {
    return file(source).count_targets(1, tokens_of(source, samples));
  }
};

class PackedSamples : public FileSamples {
 public:
  PackedSamples(std::vector<std::shared_ptr<const TokenFile>> files, std::vector<uint64_t> weights,
                int64_t seq_len)
      : FileSamples(files, std::move(weights), seq_len) {
    for (const auto& file : files) {
      const Packing& packing = packings_.emplace_back(*file, seq_len);
      if (packing.samples() == 0) throw DataError("{}: has no tokens", file->path());
      const TokenFileHeader& h = file->header();
      const double fill = static_cast<double>(h.tokens) /
                          (static_cast<double>(packing.samples()) * static_cast<double>(seq_len));
      log(LogLevel::kInfo, "{}: {} documents in {} samples of {} tokens, {:.1f} % full; {} cut",
          file->path(), h.documents, packing.samples(), seq_len, 100 * fill,
          packing.cut_documents());
    }
  }

  void read(SampleRef sample, const SampleRow& row) const override {
    size_t at = 0;
    for (const PackedPiece& piece : packings_[sample.source].sample(sample.index)) {
      const size_t n = piece.length;
      touch(sample.source, piece.begin, n + piece.goes_on);
      read_tokens(file(sample.source), piece.begin, piece.goes_on, row.token.subspan(at, n),
                  row.target.subspan(at, n));
      if (!row.position.empty()) {
        const auto position = row.position.subspan(at, n);
        std::iota(position.begin(), position.end(), 0);
      }
      at += n;
    }
    // A token of padding sees itself alone.
    std::fill(row.token.begin() + static_cast<ptrdiff_t>(at), row.token.end(), 0);
    std::fill(row.target.begin() + static_cast<ptrdiff_t>(at), row.target.end(), kNoTarget);
    if (!row.position.empty()) {
      std::fill(row.position.begin() + static_cast<ptrdiff_t>(at), row.position.end(), 0);
    }
    for (size_t i = 0; i < row.routed.size(); ++i) row.routed[i] = i < at;
  }

 private:
  uint64_t samples(size_t source) const override { return packings_[source].samples(); }
  uint64_t tokens_of(int source, uint64_t samples) const override {
    return sum(source, samples, [](const PackedPiece& piece) { return uint64_t{piece.length}; });
  }
  uint64_t targets_of(int source, uint64_t samples) const override {
    return sum(source, samples, [&](const PackedPiece& piece) {
      const bool goes_on = piece.goes_on;
      return file(source).count_targets(piece.begin + 1, piece.length - 1 + uint64_t{goes_on});
    });
  }
  template <class F>
  uint64_t sum(int source, uint64_t samples, F of_piece) const {
    uint64_t total = 0;
    for (uint64_t i = 0; i < samples; ++i) {
      for (const PackedPiece& piece : packings_[source].sample(i)) total += of_piece(piece);
    }
    return total;
  }

  std::vector<Packing> packings_;
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

  void read(SampleRef sample, const SampleRow& row) const override {
    std::vector<int32_t> tokens(row.token.size() + 1);
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
    std::copy_n(tokens.begin(), row.token.size(), row.token.begin());
    std::copy(tokens.begin() + 1, tokens.end(), row.target.begin());
    std::iota(row.position.begin(), row.position.end(), 0);
    std::fill(row.routed.begin(), row.routed.end(), uint8_t{1});
  }

  double text_bytes(int, uint64_t) const override { return 0; }

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
                                                     const Sha256& identity, Pack pack) {
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
    if (pack == Pack::kStream && h.tokens < static_cast<uint64_t>(seq_len) + 1) {
      throw DataError("{}: {} tokens are too few for one sample of seq_len + 1 = {}", f.path,
                      h.tokens, seq_len + 1);
    }
  }
  if (pack == Pack::kDocuments) {
    return std::make_shared<PackedSamples>(std::move(opened), integer_weights(weights), seq_len);
  }
  return std::make_shared<StreamSamples>(std::move(opened), integer_weights(weights), seq_len);
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
