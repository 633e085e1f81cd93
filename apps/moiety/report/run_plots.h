// Charts of training runs: one of their quantities over steps, tokens or time.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "apps/moiety/report/chart.h"
#include "apps/moiety/report/run_history.h"

namespace moiety::app {

enum class PlotX { kSteps, kTokens, kTime };

// The name of a run in this directory: its last part or, if `whole`, the path as given.
std::string run_name(const std::filesystem::path& path, bool whole = false);

struct PlotRun {
  std::string name;
  const RunHistory* history;
};

struct PlotOptions {
  PlotX x = PlotX::kSteps;
  bool logarithmic = false;
};

// The names that `moiety plot --which` takes: loss, throughput, balance, ...
std::vector<std::string> plot_names();

// A chart; `which` is one of plot_names(). One run gives raw and smooth curves, and validation as
// points; several runs have a color each.
Chart run_chart(const std::string& which, std::span<const PlotRun> runs,
                const PlotOptions& options);

}  // namespace moiety::app
