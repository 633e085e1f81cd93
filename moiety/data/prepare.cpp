#include "moiety/data/prepare.h"

#include <algorithm>
#include <deque>
#include <filesystem>
#include <future>
#include <memory>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/base/rng.h"
#include "moiety/data/token_file.h"

namespace moiety::data {
namespace {

namespace fs = std::filesystem;

// Checks a file before it is written: that it may be replaced, and is none of the inputs.
void check_output(const std::string& path, const PrepareOptions& options) {
  std::error_code none;
  const fs::file_status status = fs::status(path, none);
  if (!fs::exists(status)) return;
  if (!fs::is_regular_file(status)) throw UsageError("{}: is not a regular file", path);
  for (const std::string& input : options.inputs) {
    if (fs::equivalent(path, input, none)) throw UsageError("{}: is an input too", path);
  }
  if (!options.overwrite) throw UsageError("{}: is there already; --force overwrites", path);
}

// The token files being written, and the choice of the file for each document.
class Outputs {
 public:
  Outputs(const PrepareOptions& options, const Tokenizer& tokenizer)
      : valid_fraction_(options.valid_fraction) {
    if (!fs::path(options.out).has_filename()) {
      throw UsageError("--out {}: is a directory; the PREFIX of the files in it is missing",
                       options.out);
    }
    const bool split = valid_fraction_ > 0;
    std::vector<std::string> paths{options.out + (split ? ".train.tok" : ".tok")};
    if (split) paths.push_back(options.out + ".valid.tok");
    for (const std::string& path : paths) check_output(path, options);
    const fs::path directory = fs::path(options.out).parent_path();
    std::error_code error;
    if (!directory.empty()) fs::create_directories(directory, error);
    if (error) throw IoError("{}: cannot create: {}", directory.string(), error.message());
    const uint32_t flags =
        options.from ? 0
        : options.rules.chat
            ? kHasLossMask
            : kDocumentsEndInEos | (options.rules.bos ? kDocumentsStartWithBos : uint32_t{0});
    for (const std::string& path : paths) add_file(path, tokenizer, flags);
  }

  void add(const EncodedBlock& block) {
    std::span<const uint32_t> ids = block.ids;
    std::span<const uint8_t> targets = block.targets;
    for (const EncodedBlock::Document& d : block.documents) {
      const bool valid = valid_fraction_ > 0 && is_validation_document(documents_, valid_fraction_);
      const size_t masked = targets.empty() ? 0 : d.tokens;
      files_[valid ? 1 : 0]->add(ids.first(d.tokens), d.source_bytes, targets.first(masked));
      ids = ids.subspan(d.tokens);
      targets = targets.subspan(masked);
      ++documents_;
    }
  }

  uint64_t documents() const { return documents_; }

  // Publishes all files or none: names are given once everything is on the disk.
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
      list.push_back({f->path(), h.documents, h.tokens, h.source_bytes, f->target_count()});
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

uint64_t bytes_of_files(const std::vector<std::string>& paths) {
  uint64_t bytes = 0;
  for (const std::string& path : paths) {
    std::error_code error;
    const uintmax_t size = fs::file_size(path, error);
    if (!error) bytes += size;
  }
  return bytes;
}

// Encodes blocks on several threads and hands the results over in the order of the blocks.
class Pipeline {
 public:
  Pipeline(const PrepareOptions& options, const std::vector<std::string>& paths,
           const Tokenizer& tokenizer, Outputs& outputs)
      : options_(options),
        paths_(paths),
        tokenizer_(tokenizer),
        outputs_(outputs),
        workers_(options.workers > 0 ? options.workers : core_count()) {
    progress_.all_bytes = bytes_of_files(paths);
  }

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
      drain(0, summary);  // faults in earlier blocks are reported first
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
      progress_.bytes += block.bytes;
      progress_.documents = outputs_.documents();
      progress_.path = std::move(first.path);
      if (options_.progress) options_.progress(progress_);
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
  PrepareProgress progress_;
  std::deque<Running> running_;
};

// The documents of other projects' token files. The bytes of their text are those that their ids
// spell.
void take_foreign(const PrepareOptions& options, const Tokenizer& tokenizer, Outputs& outputs) {
  const uint32_t separator =
      tokenizer.eos() == Tokenizer::kNoToken ? tokenizer.bos() : tokenizer.eos();
  PrepareProgress progress;
  progress.all_bytes = bytes_of_files(options.inputs);
  for (const std::string& path : options.inputs) {
    progress.path = path;
    uint64_t shown = 0;
    read_foreign_tokens(*options.from, path, separator, tokenizer.vocab(),
                        [&](std::span<const uint32_t> ids) {
                          const std::vector<int32_t> decoded(ids.begin(), ids.end());
                          EncodedBlock block;
                          block.ids.assign(ids.begin(), ids.end());
                          block.documents = {{ids.size(), tokenizer.decode(decoded).size()}};
                          outputs.add(block);
                          progress.bytes += block.documents[0].source_bytes;
                          progress.documents = outputs.documents();
                          if (!options.progress || progress.bytes - shown < (1 << 20)) return;
                          shown = progress.bytes;
                          options.progress(progress);
                        });
  }
}

// Throws UsageError if the tokenizer lacks a token that documents begin or end with.
void check_tokens(const Tokenizer& tokenizer, const DocumentRules& rules) {
  constexpr std::string_view kAdvice =
      "a tokenizer_config.json beside its tokenizer.json may name it: {\"eos_token\": \"...\"}";
  if (rules.chat) {
    if (rules.bos) throw UsageError("--bos: a chat template says where bos stands");
    if (rules.parse_special) {
      throw UsageError("--parse-special: the messages of a conversation are text");
    }
    for (const std::string& token : ChatRenderer(tokenizer, *rules.chat).spelled()) {
      log(LogLevel::kWarning,
          "prepare: the tokenizer {} has no token {}, which the chat template asks for: it is "
          "spelled "
          "as text, and a message may spell it too",
          tokenizer.name(), token);
    }
    return;
  }
  if (tokenizer.eos() == Tokenizer::kNoToken) {
    throw UsageError("--tokenizer {}: has no eos, in which documents end; {}", tokenizer.name(),
                     kAdvice);
  }
  if (rules.bos && tokenizer.bos() == Tokenizer::kNoToken) {
    throw UsageError("--bos: the tokenizer {} has no bos", tokenizer.name());
  }
}

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
  if (options.from) {
    if (options.rules.chat) throw UsageError("--from: its inputs are tokens, not conversations");
    Outputs outputs(options, tokenizer);
    take_foreign(options, tokenizer, outputs);
    outputs.publish();
    summary.files = outputs.summary();
    summary.inputs = std::ssize(options.inputs);
    return summary;
  }
  check_tokens(tokenizer, options.rules);
  const std::vector<std::string> paths = list_inputs(options.inputs, summary.repeated);
  summary.inputs = static_cast<int64_t>(paths.size());
  Outputs outputs(options, tokenizer);
  Pipeline(options, paths, tokenizer, outputs).run(summary);
  outputs.publish();
  summary.files = outputs.summary();
  return summary;
}

}  // namespace moiety::data
