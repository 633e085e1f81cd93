// The arguments and the output of `moiety prepare`.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/prepare.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/console.h"
#include "moiety/base/log.h"
#include "moiety/data/prepare.h"

namespace moiety::app {
namespace {

constexpr const char* kPrepareAbout =
    "Turns text or JSONL into token files for `moiety train`.\n\n"
    "Inputs are files, directories (all files below, sorted by path, without hidden and .tok\n"
    "files) and - (standard input); gzip is recognized by its content. A name that ends in .jsonl\n"
    "is JSON Lines, one object a line; other files are UTF-8 text, one document a file or, with\n"
    "--split, what stands between the separators. Every document ends in eos; empty ones are left\n"
    "out. A file that is named twice is taken once.\n\n"
    "Writes PREFIX.tok, or with --valid-fraction PREFIX.train.tok and PREFIX.valid.tok. Lines and\n"
    "bytes in errors count from 1, in the decompressed file.";

// Replaces \n, \t, \r and \\ in a separator as typed in a shell.
std::string unescape(const std::string& typed) {
  std::string s;
  for (size_t i = 0; i < typed.size(); ++i) {
    const char next = i + 1 < typed.size() ? typed[i + 1] : '\0';
    const size_t known = std::string_view("ntr\\").find(next);
    if (typed[i] != '\\' || next == '\0' || known == std::string_view::npos) {
      s += typed[i];
      continue;
    }
    s += "\n\t\r\\"[known];
    ++i;
  }
  return s;
}

// The progress: a status line on a terminal, elsewhere a log line now and then.
class ProgressLine {
 public:
  void update(const data::PrepareProgress& done) {
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - start_).count();
    const double bytes = static_cast<double>(done.bytes);
    const std::string line = text("{:.0f} MB, {:.1f} MB/s, {} documents, {}", bytes / 1e6,
                                  bytes / 1e6 / seconds, done.documents, done.path);
    // This is an estimate: the bytes done are decompressed, those of the files may not be.
    const double all = std::max(static_cast<double>(done.all_bytes), 1.0);
    console_.status(std::min(1.0, bytes / all), line);
    if (!console_.has_bar() && now - logged_ >= std::chrono::seconds(10)) {
      logged_ = now;
      log(LogLevel::kInfo, "prepare: {}", line);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  Console console_{Console::standard_error("auto", "auto")};
  Clock::time_point start_ = Clock::now(), logged_ = start_;
};

void print(const data::PrepareSummary& summary) {
  for (const data::PrepareSummary::File& f : summary.files) {
    const std::string line = text("{}: {} documents, {} tokens, {} bytes of text\n", f.path,
                                  f.documents, f.tokens, f.source_bytes);
    std::fputs(line.c_str(), stdout);
  }
  std::fflush(stdout);
}

void warn(const data::PrepareSummary& summary) {
  if (summary.bad > 0) {
    log(LogLevel::kWarning, "prepare: {} documents left out: bad JSON or UTF-8", summary.bad);
  }
  if (summary.repeated > 0) {
    log(LogLevel::kWarning, "prepare: {} of the inputs are repeated; each was taken once",
        summary.repeated);
  }
  if (summary.empty > 0) {
    log(LogLevel::kInfo, "prepare: {} documents left out: empty", summary.empty);
  }
}

}  // namespace

int prepare_command(const std::vector<std::string>& arguments) {
  data::PrepareOptions options;
  CLI::App app(kPrepareAbout, "moiety prepare");
  app.add_option("INPUT", options.inputs, "files, directories, or -")->required();
  app.add_option("--tokenizer", options.tokenizer, "bytes")->capture_default_str();
  app.add_option("--out", options.out, "PREFIX of the files to write")->required();
  app.add_option("--valid-fraction", options.valid_fraction,
                 "share of the documents, 0 <= f < 1, that goes to PREFIX.valid.tok; which ones "
                 "depends on their number alone")
      ->capture_default_str();
  const std::map<std::string, data::InputFormat> formats{{"auto", data::InputFormat::kAuto},
                                                         {"text", data::InputFormat::kText},
                                                         {"jsonl", data::InputFormat::kJsonl}};
  app.add_option("--format", options.rules.format, "auto (by name), text or jsonl")
      ->transform(CLI::CheckedTransformer(formats).description(""))
      ->default_str("auto");
  app.add_option("--text-key", options.rules.text_key, "key of the text in a JSONL object")
      ->capture_default_str();
  app.add_option("--split", options.rules.split,
                 "separator of documents in text files; \\n, \\t, \\r, \\\\ are understood");
  app.add_flag("--bos", options.rules.bos, "begin every document with bos");
  app.add_flag("--skip-bad", options.rules.skip_bad,
               "leave out documents with bad JSON or UTF-8, and count them");
  app.add_option("--workers", options.workers,
                 "threads; 0 is one per core; the output does not depend on it")
      ->check(CLI::Range(0, 1024).description(""))
      ->capture_default_str();
  bool quiet = false;
  if (!parse_command_line(app, arguments, &quiet)) return kExitDone;
  options.rules.split = unescape(options.rules.split);
  std::optional<ProgressLine> line;
  if (!quiet) {
    line.emplace();
    options.progress = [&line](const data::PrepareProgress& done) { line->update(done); };
  }
  const data::PrepareSummary summary = data::prepare(options);
  line.reset();
  warn(summary);
  print(summary);
  return kExitDone;
}

}  // namespace moiety::app
