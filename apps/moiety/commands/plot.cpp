#include "apps/moiety/commands/plot.h"

#include <algorithm>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/result.h"
#include "apps/moiety/report/run_plots.h"
#include "moiety/base/replace_file.h"

namespace moiety::app {
namespace {

constexpr const char* kPlotAbout =
    "Curves of one or several runs as one SVG picture, which any browser shows. Reads the runs'\n"
    "metrics.jsonl; a run that is training may be plotted too.";

// The names of runs: the last part of each path or, where two runs would have the same name, the
// whole path.
std::vector<std::string> run_names(const std::vector<std::string>& paths) {
  std::vector<std::string> names;
  for (const std::string& path : paths) {
    names.push_back(run_name(path));
  }
  std::vector<std::string> unique = names;
  for (size_t i = 0; i < names.size(); ++i) {
    if (std::count(names.begin(), names.end(), names[i]) > 1) unique[i] = run_name(paths[i], true);
  }
  return unique;
}

}  // namespace

int plot_command(const std::vector<std::string>& arguments) {
  std::vector<std::string> paths;
  std::string out, which = "loss";
  PlotOptions options;
  CLI::App app(kPlotAbout, "moiety plot");
  app.add_option("RUN", paths, "run directories")->required();
  app.add_option("--out", out, "the picture; - is stdout")->required();
  const std::vector<std::string> names = plot_names();
  Rule rule;
  rule.choices.assign(names.begin(), names.end());
  add_word(app, "--which", which, rule, range_text(rule));
  add_choice<PlotX>(app, "--x", options.x,
                    {{"steps", PlotX::kSteps}, {"tokens", PlotX::kTokens}, {"time", PlotX::kTime}},
                    "steps, tokens or time; pauses between resumes take no time");
  app.add_flag("--log-y", options.logarithmic, "logarithmic y axis");
  if (!parse_command_line(app, arguments)) return kExitDone;

  std::vector<RunHistory> histories;
  for (const std::string& path : paths) {
    histories.push_back(read_history(path));
    if (histories.back().steps().empty()) throw DataError("{}: holds no steps", path);
  }
  const std::vector<std::string> labels = run_names(paths);
  std::vector<PlotRun> runs;
  for (size_t i = 0; i < paths.size(); ++i) runs.push_back({labels[i], &histories[i]});
  const std::string svg = draw(run_chart(which, runs, options));
  if (out == "-") {
    print_result(svg);
  } else {
    replace_file(out, svg);
  }
  return kExitDone;
}

}  // namespace moiety::app
