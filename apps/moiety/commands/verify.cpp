#include "apps/moiety/commands/verify.h"

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/path_kind.h"
#include "apps/moiety/commands/quantized_directory.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/branches.h"
#include "apps/moiety/report/people.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/json_line.h"
#include "moiety/checkpoint/verify.h"
#include "moiety/data/token_file.h"

namespace moiety::app {
namespace {

constexpr const char* kVerifyAbout =
    "Reads all of token files, checkpoints, runs (all their checkpoints) and directories that\n"
    "quantize wrote, and compares every byte with its checksum. Ends with 3 if a token file or a\n"
    "quantized directory is damaged, with 5 if a checkpoint is.";

// What was found good: for people, and the fields of the JSON line.
struct Good {
  const char* kind;
  std::string sentence;
  JsonLine fields;
};

Good verify_token_file(const std::string& path) {
  const auto file = data::TokenFile::open(path);
  file->verify();
  const data::TokenFileHeader& h = file->header();
  const bool has_pieces = h.flags & data::kPiecesHaveChecksums;
  return {"token file",
          text("{} in {}, {}{}", counted(int64_t(h.tokens), "token"),
               counted(int64_t(h.documents), "document"), counted(int64_t(file->pieces()), "piece"),
               has_pieces ? "" : " without checksums of their own"),
          JsonLine()
              .add("bytes", file->bytes())
              .add("tokens", h.tokens)
              .add("documents", h.documents)
              .add("crc32c", text("{:08x}", h.crc32c))};
}

Good verify_quantized(const std::string& path) {
  const QuantizedCheck check = check_quantized(path);
  const bool has_sums = !check.description.checksums.empty();
  return {"quantized tensor",
          text("{}, {}{}", counted(check.arrays, "array"), bytes_text(check.bytes),
               has_sums ? "" : " without checksums: only their sizes are known to be right"),
          JsonLine().add("bytes", check.bytes).add("checksums", has_sums)};
}

Good verify_checkpoint(const std::string& path) {
  const checkpoint::Manifest m = checkpoint::verify(path);
  int64_t bytes = 0;
  for (const checkpoint::FileEntry& file : m.files) bytes += int64_t(file.bytes);
  const int64_t tokenizer = check_tokenizer_files(path, m.run.config).value_or(0);
  return {"checkpoint",
          text("step {}, {}, {} in {}{}", m.run.step, counted(std::ssize(m.tensors), "tensor"),
               bytes_text(bytes), counted(std::ssize(m.files), "file"),
               tokenizer ? ", and " + counted(tokenizer, "file") + " of its tokenizer" : ""),
          JsonLine()
              .add("bytes", bytes)
              .add("step", m.run.step)
              .add("id", m.id)
              .add("tokenizer_files", tokenizer)};
}

Good verify_one(const std::string& path, PathKind kind) {
  switch (kind) {
    case PathKind::kTokenFile:
      return verify_token_file(path);
    case PathKind::kQuantized:
      return verify_quantized(path);
    default:
      return verify_checkpoint(path);
  }
}

// Verifies things one after the other, with a line on stdout for each.
class Verifier {
 public:
  explicit Verifier(bool json) : json_(json) {}

  void verify(const std::string& path) {
    attempt(path, [&] {
      const PathKind kind = kind_of_path(path);
      kind == PathKind::kRun ? verify_run(path) : print_good(path, verify_one(path, kind));
    });
  }
  // Throws the first failure, which decides the exit code.
  void end() const {
    if (failures_.empty()) return;
    const size_t more = failures_.size() - 1;
    fail(failures_[0].kind, "{}{}", failures_[0].text,
         more == 0 ? "" : text("; {} more of what was verified failed too", more));
  }

 private:
  template <class Body>
  void attempt(const std::string& path, Body&& body) {
    try {
      body();
    } catch (const Error&) {
      failures_.push_back(current_failure());
      const std::string& error = failures_.back().text;
      print_result((json_
                        ? JsonLine().add("path", path).add("good", false).add("error", error).text()
                        : text("{}: not good: {}", path, error)) +
                   "\n");
    }
  }
  void verify_run(const std::string& path) {
    const std::string directory = checkpoints_of(path);
    std::vector<std::string> all = list_steps(directory);
    for (const LeftBranch& branch : list_left_branches(directory)) {
      all.insert(all.end(), branch.checkpoints.begin(), branch.checkpoints.end());
    }
    if (all.empty()) throw CheckpointError("{}: holds no checkpoint", path);
    for (const std::string& one : all) {
      attempt(one, [&] { print_good(one, verify_checkpoint(one)); });
    }
  }
  void print_good(const std::string& path, const Good& good) const {
    const JsonLine head = JsonLine().add("path", path).add("good", true).add("kind", good.kind);
    print_result((json_ ? JsonLine(head).append(good.fields).text()
                        : text("{}: good: {}", path, good.sentence)) +
                 "\n");
  }

  bool json_;
  std::vector<Failure> failures_;
};

}  // namespace

int verify_command(const std::vector<std::string>& arguments) {
  std::vector<std::string> paths;
  bool json = false;
  CLI::App app(kVerifyAbout, "moiety verify");
  app.add_option("PATH", paths, "token files, checkpoints, runs, directories of quantize")
      ->required();
  app.add_flag("--json", json, "a line of JSON for each");
  if (!parse_command_line(app, arguments)) return kExitDone;
  Verifier verifier(json);
  for (const std::string& path : paths) verifier.verify(path);
  verifier.end();
  return kExitDone;
}

}  // namespace moiety::app
