#include "apps/moiety/commands/info.h"

#include <cstdlib>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/info_sheet.h"
#include "apps/moiety/commands/path_kind.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/result.h"

namespace moiety::app {
namespace {

constexpr const char* kInfoAbout =
    "What a thing is. Of a run or a checkpoint: model, parameters, training, layout, losses,\n"
    "checkpoints, branches, disk. Of a token file: its documents, and the text of some.";

InfoSheet sheet_of(const std::string& path, const ShownDocuments& shown, bool tensors) {
  switch (kind_of_path(path)) {
    case PathKind::kTokenFile:
      return token_file_info(path, shown);
    case PathKind::kCheckpoint:
      return checkpoint_info(path, tensors);
    case PathKind::kRun:
      return run_info(path, tensors);
    case PathKind::kQuantized:
      break;
  }
  throw UsageError("{}: quantized.json in it says what it is", path);
}

}  // namespace

std::string text_json(std::string_view bytes) {
  return nlohmann::json(bytes).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string list_json(std::span<const std::string> values) {
  std::string out = "[";
  for (const std::string& value : values) out += (out.size() > 1 ? "," : "") + value;
  return out + "]";
}

int info_command(const std::vector<std::string>& arguments) {
  std::string path;
  bool json = false, tensors = false;
  ShownDocuments shown;
  CLI::App app(kInfoAbout, "moiety info");
  app.add_option("PATH", path, "run directory, checkpoint or token file")->required();
  app.add_flag("--json", json, "one line of JSON");
  app.add_flag("--tensors", tensors, "names, shapes, types and layout of a checkpoint's tensors");
  add_number(app, "--documents", shown.count, between(0, 1 << 20),
             "documents of a token file whose beginning is shown");
  add_number(app, "--from", shown.from, between(0, 1e15), "the first of them, counted from 0");
  add_number(app, "--tokens", shown.tokens, between(1, 1 << 30), "of each of them");
  app.add_option("--tokenizer", shown.tokenizer,
                 "of a token file, for the text: bytes, or the path of a tokenizer.json or of its "
                 "folder (a run or checkpoint keeps one)")
      ->capture_default_str();
  if (!parse_command_line(app, arguments)) return kExitDone;
  const char* no_color = std::getenv("NO_COLOR");
  shown.color = ::isatty(STDOUT_FILENO) && (no_color == nullptr || *no_color == '\0');
  const InfoSheet sheet = sheet_of(path, shown, tensors);
  if (json) {
    print_result(sheet.json.text() + "\n");
    return kExitDone;
  }
  std::string out;
  for (const auto& [word, what] : sheet.lines) out += text("{:<12} {}\n", word, what);
  print_result(out);
  return kExitDone;
}

}  // namespace moiety::app
