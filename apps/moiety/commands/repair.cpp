#include "apps/moiety/commands/repair.h"

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/path_kind.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/json_line.h"
#include "moiety/checkpoint/verify.h"

namespace moiety::app {
namespace {

constexpr const char* kRepairAbout =
    "Makes the lost or damaged manifest.json and COMMIT of a checkpoint again, from its rank "
    "files.\n"
    "Damaged data cannot be made again: then nothing is changed, and it ends with 5.";

const char* word(checkpoint::Repair outcome) {
  switch (outcome) {
    case checkpoint::Repair::kNone:
      return "none";
    case checkpoint::Repair::kProved:
      return "proved";
    case checkpoint::Repair::kUnproved:
      return "unproved";
  }
  return "";
}

const char* sentence(checkpoint::Repair outcome) {
  switch (outcome) {
    case checkpoint::Repair::kNone:
      return "good, nothing was to be repaired";
    case checkpoint::Repair::kProved:
      return "repaired: manifest.json and COMMIT are as they were, and all data are what was saved";
    case checkpoint::Repair::kUnproved:
      return "repaired: manifest.json and COMMIT are those of the rank files as they are; nothing "
             "was left to tell whether these are what was saved";
  }
  return "";
}

}  // namespace

int repair_command(const std::vector<std::string>& arguments) {
  std::string path;
  bool json = false;
  CLI::App app(kRepairAbout, "moiety repair");
  app.add_option("CKPT", path, "checkpoint")->required();
  app.add_flag("--json", json, "one line of JSON");
  if (!parse_command_line(app, arguments)) return kExitDone;
  if (kind_of_path(path) != PathKind::kCheckpoint) {
    throw CheckpointError("{}: holds no file of a checkpoint; name one step's directory", path);
  }
  const checkpoint::Repair outcome = checkpoint::repair(path);
  print_result((json ? JsonLine().add("path", path).add("repair", word(outcome)).text()
                     : text("{}: {}", path, sentence(outcome))) +
               "\n");
  return kExitDone;
}

}  // namespace moiety::app
