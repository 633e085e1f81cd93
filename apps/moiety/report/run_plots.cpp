#include "apps/moiety/report/run_plots.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include <nlohmann/json.hpp>

#include "moiety/base/error.h"

namespace moiety::app {
namespace {

struct Curve {
  Metric metric;
  const char* label;
};

struct Plot {
  const char* name;
  const char* title;
  const char* y_title;
  std::vector<Curve>
      curves;  // the first is drawn full; where runs are compared a second one is dashed
  double scale = 1;
  bool from_zero = true;
  bool validation = false;
  bool smoothed = true;  // false if the recorded values are smooth already
  std::optional<double> reference = std::nullopt;
  const char* reference_label = "";
};

const std::vector<Plot>& plots() {
  static const std::vector<Plot> list = {
      {.name = "loss",
       .title = "Loss",
       .y_title = "cross-entropy (nats per token)",
       .curves = {{Metric::kLoss, "training"}},
       .from_zero = false,
       .validation = true},
      {.name = "throughput",
       .title = "Throughput",
       .y_title = "tokens per second",
       .curves = {{Metric::kTokensPerSecond, "tokens/s"}}},
      {.name = "balance",
       .title = "Expert balance",
       .y_title = "busiest expert / mean expert (tokens)",
       .curves = {{Metric::kBalanceWorst, "worst layer"},
                  {Metric::kBalanceMean, "mean over layers"}},
       .from_zero = false,
       .reference = 1,
       .reference_label = "even"},
      {.name = "gnorm",
       .title = "Gradient norm",
       .y_title = "L2 norm before clipping",
       .curves = {{Metric::kGradNorm, "gradient norm"}}},
      {.name = "aux",
       .title = "Load-balancing loss",
       .y_title = "auxiliary loss, unweighted, sum over layers",
       .curves = {{Metric::kAux, "auxiliary loss"}},
       .from_zero = false},
      {.name = "lr",
       .title = "Learning rate",
       .y_title = "learning rate",
       .curves = {{Metric::kLr, "learning rate"}},
       .smoothed = false},
      {.name = "mfu",
       .title = "Model FLOPs utilization",
       .y_title = "% of the bf16 peak",
       .curves = {{Metric::kMfu, "MFU"}}},
      {.name = "step",
       .title = "Step time",
       .y_title = "milliseconds",
       .curves = {{Metric::kStepMs, "step"}, {Metric::kDataWaitMs, "waiting for data"}}},
      {.name = "comm",
       .title = "Exposed communication",
       .y_title = "% of the step spent waiting for other ranks",
       .curves = {{Metric::kComm, "waiting"}}},
      {.name = "memory",
       .title = "Memory",
       .y_title = "GiB",
       .curves = {{Metric::kMemory, "memory"}},
       .scale = 1.0 / (1 << 30),
       .smoothed = false},
      {.name = "drop",
       .title = "Dropped pairs",
       .y_title = "(token, expert) pairs per step",
       .curves = {{Metric::kDropped, "dropped"}}},
  };
  return list;
}

const Plot& find_plot(const std::string& name) {
  for (const Plot& plot : plots()) {
    if (plot.name == name) return plot;
  }
  fail(ErrorKind::kInvalidArgument, "no plot is named '{}'", name);
}

struct TimeUnit {
  double seconds;
  const char* name;
};

TimeUnit time_unit(double seconds) {
  if (seconds < 180) return {1, "s"};
  if (seconds < 180 * 60) return {60, "min"};
  if (seconds < 72 * 3600) return {3600, "h"};
  return {86400, "days"};
}

// A text with what is not UTF-8 replaced, which would not be XML.
std::string xml_text(const std::string& s) {
  using nlohmann::json;
  return json::parse(json(s).dump(-1, ' ', false, json::error_handler_t::replace));
}

class RunChart {
 public:
  RunChart(const Plot& plot, std::span<const PlotRun> runs, const PlotOptions& options)
      : plot_(plot), runs_(runs), options_(options) {
    double longest = 0;
    for (const PlotRun& run : runs) {
      if (!run.history->steps().empty()) {
        longest = std::max(longest, run.history->steps().back().time);
      }
    }
    unit_ = time_unit(longest);
  }

  Chart make() {
    chart_.title = plot_.title;
    chart_.y_title = plot_.y_title;
    chart_.x_title = options_.x == PlotX::kSteps    ? "steps"
                     : options_.x == PlotX::kTokens ? "tokens"
                                                    : text("training time ({})", unit_.name);
    chart_.logarithmic = options_.logarithmic;
    chart_.from_zero = plot_.from_zero;
    chart_.reference = plot_.reference;
    chart_.reference_label = plot_.reference_label;
    bool validation = false;
    for (size_t i = 0; i < runs_.size(); ++i) {
      runs_.size() == 1 ? add_alone() : add_compared(runs_[i], int(i));
      validation |= plot_.validation && !runs_[i].history->evaluations().empty();
    }
    if (runs_.size() > 1) {
      chart_.note = "thin: as recorded, thick: smoothed";
      if (plot_.curves.size() > 1) {
        chart_.note += text("; dashed: {}", plot_.curves[1].label);
      }
      if (validation) chart_.note += "; dots: validation";
    } else if (runs_.size() == 1) {
      chart_.note = runs_[0].name;
    }
    return std::move(chart_);
  }

 private:
  double x_of(int64_t step, double tokens, double time) const {
    if (options_.x == PlotX::kSteps) return double(step);
    return options_.x == PlotX::kTokens ? tokens : time / unit_.seconds;
  }

  std::vector<ChartPoint> points_of(const PlotRun& run, Metric metric) const {
    std::vector<ChartPoint> points;
    points.reserve(run.history->steps().size());
    for (const StepPoint& p : run.history->steps()) {
      const double y = p.of(metric);
      if (y != kAbsent) points.push_back({x_of(p.step, p.tokens, p.time), plot_.scale * y});
    }
    return points;
  }

  void add_curves(const Curve& curve, const PlotRun& run, int color, Mark mark,
                  const std::string& raw_label, const std::string& smooth_label) {
    std::vector<ChartPoint> raw = points_of(run, curve.metric);
    if (!plot_.smoothed) {
      const std::string& label = raw_label.empty() ? smooth_label : raw_label;
      chart_.series.push_back(
          {.label = label, .color = color, .mark = mark, .points = std::move(raw)});
      return;
    }
    const double window = std::clamp(double(raw.size()) / 60, 1.0, 1000.0);
    std::vector<ChartPoint> smoothed = smooth(raw, window);
    if (mark == Mark::kThick) {
      chart_.series.push_back(
          {.label = raw_label, .color = color, .mark = Mark::kThin, .points = std::move(raw)});
    }
    chart_.series.push_back(
        {.label = smooth_label, .color = color, .mark = mark, .points = std::move(smoothed)});
  }

  void add_validation(const PlotRun& run, int color, const std::string& label) {
    if (!plot_.validation || run.history->evaluations().empty()) return;
    std::vector<ChartPoint> points;
    for (const EvaluationPoint& e : run.history->evaluations()) {
      points.push_back({x_of(e.step, e.tokens, e.time), e.loss});
    }
    chart_.series.push_back(
        {.label = label, .color = color, .mark = Mark::kDot, .points = std::move(points)});
  }

  // The losses of single validation files, each in a colour of its own.
  void add_files(const PlotRun& run, int first_color) {
    if (!plot_.validation) return;
    std::map<std::string, std::vector<ChartPoint>> files;
    for (const EvaluationPoint& e : run.history->evaluations()) {
      for (const auto& [name, loss] : e.files) {
        files[name].push_back({x_of(e.step, e.tokens, e.time), loss});
      }
    }
    for (auto& [name, points] : files) {
      chart_.series.push_back({.label = xml_text(std::filesystem::path(name).stem().string()),
                               .color = first_color++,
                               .mark = Mark::kDot,
                               .points = std::move(points)});
    }
  }

  void add_alone() {
    for (size_t c = 0; c < plot_.curves.size(); ++c) {
      const Curve& curve = plot_.curves[c];
      // With one curve the legend explains thin and thick lines; with several it explains the
      // colors.
      const bool single = plot_.curves.size() == 1;
      add_curves(curve, runs_[0], int(c), Mark::kThick, single ? curve.label : "",
                 single ? text("{}, smoothed", curve.label) : curve.label);
    }
    add_validation(runs_[0], 1, "validation");
    add_files(runs_[0], 2);
  }

  void add_compared(const PlotRun& run, int color) {
    add_curves(plot_.curves[0], run, color, Mark::kThick, "", run.name);
    if (plot_.curves.size() > 1) add_curves(plot_.curves[1], run, color, Mark::kDashed, "", "");
    add_validation(run, color, "");
  }

  const Plot& plot_;
  std::span<const PlotRun> runs_;
  const PlotOptions& options_;
  TimeUnit unit_;
  Chart chart_;
};

}  // namespace

std::string run_name(const std::filesystem::path& path, bool whole) {
  std::filesystem::path p = std::filesystem::absolute(path).lexically_normal();
  if (!p.has_filename()) p = p.parent_path();
  if (p.filename() == "metrics.jsonl") p = p.parent_path();
  const std::string name = whole ? path.string() : p.filename().string();
  return xml_text(name);
}

std::vector<std::string> plot_names() {
  std::vector<std::string> names;
  for (const Plot& plot : plots()) names.push_back(plot.name);
  return names;
}

Chart run_chart(const std::string& which, std::span<const PlotRun> runs,
                const PlotOptions& options) {
  return RunChart(find_plot(which), runs, options).make();
}

}  // namespace moiety::app
