#include "moiety/data/prepare.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <filesystem>
#include <future>
#include <memory>

#include "apps/moiety/errors.h"
#include "apps/moiety/report/console.h"
#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/base/rng.h"
#include "moiety/data/token_file.h"

namespace moiety::app {
namespace {

// The token files being written, and which document goes where.
class Outputs {
 public:
  Outputs(const PrepareOptions& options, const Tokenizer& tokenizer)
      : valid_fraction_(options.valid_fraction) {
    const std::filesystem::path directory = std::filesystem::path(options.out).parent_path();
    std::error_code error;
    if (!directory.empty()) std::filesystem::create_directories(directory, error);
    if (error) throw IoError("{}: cannot create: {}", directory.string(), error.message());
    const uint32_t flags =
        kDocumentsEndInEos | (options.rules.bos ? kDocumentsStartWithBos : uint32_t{0});
    const bool split = valid_fraction_ > 0;
    add_file(options.out + (split ? ".train.tok" : ".tok"), tokenizer, flags);
    if (split) add_file(options.out + ".valid.tok", tokenizer, flags);
  }

  void add(const EncodedBlock& block) {
    std::span<const uint32_t> ids = block.ids;
    for (const EncodedBlock::Document& d : block.documents) {
      const bool valid = valid_fraction_ > 0 && is_validation_document(documents_, valid_fraction_);
      files_[valid ? 1 : 0]->add(ids.first(d.tokens), d.source_bytes);
      ids = ids.subspan(d.tokens);
      ++documents_;
    }
  }

  uint64_t documents() const { return documents_; }

  // All files or none: names are given once everything is on the disk.
  void publish() {
    for (const auto& f : files_) {
      if (f->header().documents > 0) continue;
      throw DataError("{}: none of {} documents would be in it{}", f->path(), documents_,
                      documents_ == 0 ? ": the inputs hold no text" : " (see --valid-fraction)");
    }
    for (const auto& f : files_) f->finish();
    for (const auto& f : files_) f->publish();
  }

  std::vector<PrepareSummary::File> summary() const {
    std::vector<PrepareSummary::File> list;
    for (const auto& f : files_) {
      const TokenFileHeader& h = f->header();
      list.push_back({f->path(), h.documents, h.tokens, h.source_bytes});
    }
    return list;
  }

 private:
  void add_file(const std::string& path, const Tokenizer& tokenizer, uint32_t flags) {
    files_.push_back(std::make_unique<TokenFileWriter>(path, tokenizer, flags));
  }

  double valid_fraction_;
  std::vector<std::unique_ptr<TokenFileWriter>> files_;
  uint64_t documents_ = 0;
};

// How far it is: a status line on a terminal, elsewhere a log line now and then.
class Progress {
 public:
  Progress(bool on, const std::vector<std::string>& paths)
      : on_(on), console_(Console::standard_error("auto", "auto")) {
    for (const std::string& path : paths) {
      std::error_code error;
      const uintmax_t size = std::filesystem::file_size(path, error);
      if (!error) total_ += static_cast<double>(size);  // of standard input unknown
    }
  }

  void update(uint64_t bytes, uint64_t documents, const std::string& path) {
    if (!on_) return;
    bytes_ += static_cast<double>(bytes);
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - start_).count();
    const std::string line = text("{:.0f} MB, {:.1f} MB/s, {} documents, {}", bytes_ / 1e6,
                                  bytes_ / 1e6 / seconds, documents, path);
    // An estimate: the bytes done are decompressed, those of the files may not be.
    console_.status(std::min(1.0, bytes_ / std::max(total_, 1.0)), line);
    if (!console_.has_bar() && now - logged_ >= std::chrono::seconds(10)) {
      logged_ = now;
      log(LogLevel::kInfo, "prepare: {}", line);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool on_;
  Console console_;
  double bytes_ = 0, total_ = 0;
  Clock::time_point start_ = Clock::now(), logged_ = start_;
};

// Encodes blocks on several threads and hands the results over in the order of the blocks.
class Pipeline {
 public:
  Pipeline(const PrepareOptions& options, const std::vector<std::string>& paths,
           const Tokenizer& tokenizer, Outputs& outputs)
      : options_(options),
        paths_(paths),
        tokenizer_(tokenizer),
        outputs_(outputs),
        workers_(options.workers > 0 ? options.workers : core_count()),
        progress_(options.progress, paths) {}

  void run(PrepareSummary& summary) {
    for (const std::string& path : paths_) {
      std::optional<BlockReader> reader;
      while (std::optional<Block> block = read(path, reader, summary)) {
        push(std::move(*block), summary);
      }
    }
    drain(0, summary);
  }

 private:
  std::optional<Block> read(const std::string& path, std::optional<BlockReader>& reader,
                            PrepareSummary& summary) {
    try {
      if (!reader) reader.emplace(path, options_.rules);
      return reader->next();
    } catch (const Error&) {
      drain(0, summary);  // what is wrong in earlier blocks is reported first
      throw;
    }
  }

  void push(Block block, PrepareSummary& summary) {
    drain(workers_ - 1, summary);
    running_.push_back({block.path, std::async(std::launch::async, [this, b = std::move(block)] {
                          return encode(b, options_.rules, tokenizer_);
                        })});
  }

  void drain(size_t leave, PrepareSummary& summary) {
    while (running_.size() > leave) {
      Running first = std::move(running_.front());
      running_.pop_front();
      const EncodedBlock block = first.result.get();
      outputs_.add(block);
      summary.bad += block.bad;
      summary.empty += block.empty;
      progress_.update(block.bytes, outputs_.documents(), first.path);
    }
  }

  struct Running {
    std::string path;
    std::future<EncodedBlock> result;
  };
  const PrepareOptions& options_;
  const std::vector<std::string>& paths_;
  const Tokenizer& tokenizer_;
  Outputs& outputs_;
  size_t workers_;
  Progress progress_;
  std::deque<Running> running_;
};

}  // namespace

bool is_validation_document(uint64_t d, double valid_fraction) {
  constexpr PhiloxKey kKey = rng_key(0, RngDomain::kValidationSplit);
  const uint32_t word =
      philox(kKey, {static_cast<uint32_t>(d), static_cast<uint32_t>(d >> 32), 0, 0})[0];
  return word < valid_fraction * 0x1p32;
}

PrepareSummary prepare(const PrepareOptions& options) {
  if (options.inputs.empty()) throw UsageError("prepare: no inputs");
  if (options.out.empty()) throw UsageError("prepare: --out PREFIX is missing");
  if (!(options.valid_fraction >= 0 && options.valid_fraction < 1)) {
    throw UsageError("prepare: --valid-fraction is {}, not in [0, 1)", options.valid_fraction);
  }
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  PrepareSummary summary;
  const std::vector<std::string> paths = list_inputs(options.inputs, summary.repeated);
  summary.inputs = static_cast<int64_t>(paths.size());
  Outputs outputs(options, tokenizer);
  Pipeline(options, paths, tokenizer, outputs).run(summary);
  outputs.publish();
  summary.files = outputs.summary();
  return summary;
}

}  // namespace moiety::app
