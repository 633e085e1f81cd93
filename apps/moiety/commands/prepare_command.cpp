// The arguments and the output of `moiety prepare`.
#include <algorithm>
#include <chrono>
#include <optional>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/prepare.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/console.h"
#include "apps/moiety/report/people.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/log.h"
#include "moiety/data/prepare.h"

namespace moiety::app {
namespace {

constexpr const char* kPrepareAbout =
    "Turns text or JSONL into token files for `moiety train`.\n\n"
    "Inputs are files, directories (all files below, sorted by path, without hidden and .tok\n"
    "files) and - (standard input); gzip and zstd are recognized by their content. A name that "
    "ends\n"
    "in .jsonl is JSON Lines, one object a line; other files are UTF-8 text, one document a file\n"
    "or, with --split, what stands between the separators. Every document ends in eos; empty ones\n"
    "are left out. A file that is named twice is taken once.\n\n"
    "With --chat every line is a conversation: {\"messages\": [{\"role\", \"content\"}]}, or\n"
    "{\"prompt\", \"completion\"}. The assistant's messages, each with the token that ends it, "
    "are\n"
    "targets; all else is read and has no loss (a loss mask in the token file).\n\n"
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
    const std::string line =
        text("{:.0f} MB, {:.1f} MB/s, {}, {}", bytes / 1e6, bytes / 1e6 / seconds,
             counted(done.documents, "document"), done.path);
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
    const bool is_masked = f.targets < f.tokens;
    const double share = 100 * static_cast<double>(f.targets) / static_cast<double>(f.tokens);
    const std::string targets = is_masked ? text(" ({:.1f} % are targets)", share) : "";
    print_result(text("{}: {}, {}{}, {} of text{}\n", f.path, counted(f.documents, "document"),
                      counted(f.tokens, "token"), targets, counted(f.source_bytes, "byte"),
                      is_masked ? " in them" : ""));
  }
}

void warn(const data::PrepareSummary& summary) {
  if (summary.bad > 0) {
    log(LogLevel::kWarning,
        "prepare: {} left out: bad JSON or UTF-8, or a conversation without an answer",
        counted(summary.bad, "document"));
  }
  if (summary.repeated > 0) {
    log(LogLevel::kWarning, "prepare: {} of a file that was named before: left out",
        counted(summary.repeated, "repetition"));
  }
  if (summary.empty > 0) {
    log(LogLevel::kInfo, "prepare: {} left out: empty", counted(summary.empty, "document"));
  }
}

}  // namespace

int prepare_command(const std::vector<std::string>& arguments) {
  data::PrepareOptions options;
  bool force = false;
  CLI::App app(kPrepareAbout, "moiety prepare");
  app.add_option("INPUT", options.inputs, "files, directories, or -")->required();
  app.add_option("--tokenizer", options.tokenizer,
                 "bytes, or the path of a tokenizer.json or of its folder")
      ->capture_default_str();
  app.add_option("--out", options.out, "PREFIX of the files to write")->required();
  add_number(app, "--valid-fraction", options.valid_fraction, between(0, 1).without_max(),
             "share of the documents, 0 <= f < 1, that goes to PREFIX.valid.tok; which ones "
             "depends on their number alone");
  add_choice<data::InputFormat>(app, "--format", options.rules.format,
                                {{"auto", data::InputFormat::kAuto},
                                 {"text", data::InputFormat::kText},
                                 {"jsonl", data::InputFormat::kJsonl}},
                                "auto (by name), text or jsonl");
  app.add_option("--text-key", options.rules.text_keys,
                 "key of the text in a JSONL object; of several, the texts stand below each other")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str();
  bool chat = false;
  auto chat_template = data::ChatTemplate::kChatml;
  app.add_flag("--chat", chat, "lines of JSON are conversations");
  add_choice<data::ChatTemplate>(app, "--chat-template", chat_template,
                                 {{"chatml", data::ChatTemplate::kChatml},
                                  {"mistral", data::ChatTemplate::kMistral},
                                  {"llama3", data::ChatTemplate::kLlama3}},
                                 "of --chat: chatml (Qwen, SmolLM2), mistral (Mixtral) or llama3")
      ->needs("--chat");
  app.add_option("--split", options.rules.split,
                 "separator of documents in text files; \\n, \\t, \\r, \\\\ are understood");
  auto foreign = data::ForeignTokens::kLlmc;
  CLI::Option* const from_option = add_choice<data::ForeignTokens>(
      app, "--from", foreign,
      {{"llmc", data::ForeignTokens::kLlmc}, {"megatron", data::ForeignTokens::kMegatron}},
      "inputs are token files of llm.c (llmc: .bin) or Megatron-LM (megatron: .bin or .idx), made "
      "with --tokenizer");
  from_option->default_str("");
  app.add_flag("--force", force, "overwrite token files");
  app.add_flag("--bos", options.rules.bos, "begin every document with bos");
  app.add_flag("--parse-special", options.rules.parse_special,
               "special tokens that a text spells become their ids; else they stay text");
  app.add_flag(
      "--skip-bad", options.rules.skip_bad,
      "leave out documents with bad JSON or UTF-8, and conversations without an answer, and "
      "count them");
  int64_t workers = 0;
  add_number(app, "--workers", workers, between(0, 1024),
             "threads; 0 is one per core; the output does not depend on it");
  bool quiet = false;
  if (!parse_command_line(app, arguments, &quiet)) return kExitDone;
  options.workers = static_cast<int>(workers);
  options.overwrite = force;
  if (chat) options.rules.chat = chat_template;
  if (from_option->count() > 0) options.from = foreign;
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
