// The arguments of `moiety train`.
#include <algorithm>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/train.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/result.h"

namespace moiety::app {
namespace {

constexpr const char* kTrainAbout =
    "Trains a mixture-of-experts model. Continues by itself if the run directory holds a complete\n"
    "checkpoint. Results go to the run directory, progress to stderr.\n\n"
    "Configuration: defaults, then model.preset, then the --config files in order, then\n"
    "--section.key=value. --section.key alone is true.";

}  // namespace

int train_command(const std::vector<std::string>& given) {
  if (std::find(given.begin(), given.end(), "--help=markdown") != given.end()) {
    print_result(options_markdown());
    return kExitDone;
  }
  std::vector<std::string> arguments = given;
  std::vector<std::string> overrides = take_overrides(arguments);
  std::vector<std::string> files;
  std::string run, ranks;
  TrainFlags flags;
  flags.arguments = given;
  flags.arguments.insert(flags.arguments.begin(), "train");
  CLI::App app(kTrainAbout, "moiety train");
  app.footer([] { return options_help(); });
  app.add_option("--config", files, "TOML file; several are read in order")
      ->take_all()
      ->expected(1);
  app.add_option("--run", run, "run directory: run.dir");
  app.add_option("--ranks", ranks,
                 "ranks of this host, as threads or processes (run.launch; mpirun starts processes "
                 "itself): run.ranks");
  app.add_flag("--print-config", flags.print_config,
               "print every key with its value and source, and stop");
  app.add_flag("--dry-run", flags.dry_run, "check and set up everything, and stop before step 1");
  if (!parse_command_line(app, arguments, &flags.quiet)) return kExitDone;
  // The short forms come first, so that a key that is spelled out wins.
  if (!ranks.empty()) overrides.insert(overrides.begin(), "--run.ranks=" + ranks);
  if (!run.empty()) overrides.insert(overrides.begin(), "--run.dir=" + run);
  return train([&] { return load_config(files, overrides); }, flags);
}

}  // namespace moiety::app
