#include "apps/moiety/commands/plan_timeline.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "apps/moiety/report/axis.h"
#include "apps/moiety/report/svg.h"
#include "moiety/base/error.h"
#include "moiety/base/format.h"

namespace moiety::app {
namespace {

using gtp::Kind;

constexpr double kWidth = 1600, kLeft = 130, kRight = kWidth - 24, kMargin = 24;
constexpr double kTop = 104;  // top of the first row
constexpr double kComputeHeight = 44, kLaneHeight = 26, kGap = 26;
constexpr double kLetter = 5.6;  // width of a letter of 10 px
enum Color {
  kForward = 0,
  kReduce = 1,
  kRecompute = 2,
  kBackward = 3,
  kWait = kSvgWarning,
  kGather = 5,
  kGradient = 7
};
constexpr std::array<std::pair<Color, const char*>, 7> kLegend{{{kForward, "forward"},
                                                                {kBackward, "backward"},
                                                                {kRecompute, "recomputed"},
                                                                {kGradient, "weight gradient"},
                                                                {kWait, "waiting"},
                                                                {kGather, "gather"},
                                                                {kReduce, "reduce"}}};

std::string time_text(double ns) {
  if (ns >= 1e9) return text("{:.3g} s", ns / 1e9);
  if (ns >= 1e6) return text("{:.3g} ms", ns / 1e6);
  return text("{:.3g} us", ns / 1e3);
}

// The short form of a weight's name: "layers.3.attn.qkv.weight" is "3 attn.qkv",
// "layers.3.moe.experts.fc1.weight" is "3 experts.fc1".
std::string short_name(std::string name) {
  if (name.ends_with(".weight")) name.resize(name.size() - 7);
  if (!name.starts_with("layers.")) return name;
  name.erase(0, 7);
  if (const size_t dot = name.find('.'); dot != std::string::npos) name[dot] = ' ';
  if (const size_t moe = name.find(" moe."); moe != std::string::npos) name.erase(moe + 1, 4);
  return name;
}

// A call of the trace.
struct Call {
  Kind kind = Kind::kBegin;
  std::string bundles;
};

std::vector<Call> calls_of(const PlannedStep& step) {
  std::vector<Call> calls;
  for (const gtp::TraceEvent& e : step.trace) {
    if (!e.same_call) calls.push_back({e.kind, {}});
    if (e.bundle == gtp::kNoBundle) continue;
    std::string& names = calls.back().bundles;
    const std::string name = short_name(step.bundles[e.bundle].name);
    const size_t tail = name.rfind('.') + 1;  // 0: there is no dot
    const bool related = !names.empty() && names.starts_with(name.substr(0, tail));
    names += (names.empty() ? "" : " + ") + (related ? name.substr(tail) : name);
  }
  return calls;
}

Color color_of(Kind kind) {
  switch (kind) {
    case Kind::kRecompute:
      return kRecompute;
    case Kind::kGradBuffer:
    case Kind::kRowsGrad:
      return kGradient;
    case Kind::kBwd:
    case Kind::kGrad:  // the work that follows it: attention's backward pass
      return kBackward;
    default:
      return kForward;
  }
}

std::string lane_name(const gtp::LaneSpec& lane) {
  return text("{} {}", lane.reduces ? "reduce" : "gather", lane.expert ? "experts" : "dense");
}

double end_of(const PlannedStep& step) {
  return (step.schedule.work.empty() ? 0 : step.schedule.work.back().end) +
         step.schedule.flush_wait;
}

class Timeline {
 public:
  Timeline(const PlannedStep& step, const TimelineOptions& options)
      : step_(step),
        options_(options),
        calls_(calls_of(step)),
        begin_(std::max(0.0, options.begin_ns)),
        end_(std::max(begin_ + 1, std::min(options.end_ns, end_of(step)))),
        unit_(end_ - begin_ >= 2e9   ? 1e9
              : end_ - begin_ >= 2e6 ? 1e6
                                     : 1e3),
        axis_({begin_ / unit_, end_ / unit_}, kLeft, kRight, false) {}

  std::string svg() {
    head();
    axis();
    arcs();
    compute();
    for (size_t l = 0; l < step_.plan.lanes.size(); ++l) lane(l);
    return std::move(out_ += "</svg>\n");
  }

 private:
  struct Bar {
    double begin, end;  // pixels
    Color color;
    std::string label, tip;
  };

  double lane_top(size_t lane) const {
    return kTop + kComputeHeight + kGap + double(lane) * (kLaneHeight + kGap / 2);
  }
  double bottom() const { return lane_top(step_.plan.lanes.size()) - kGap / 2 + 8; }
  bool visible(const gtp::Schedule::Span& s) const {
    return s.end > s.begin && s.end > begin_ && s.begin < end_;
  }
  double x_of(double ns) const { return axis_.position(std::clamp(ns, begin_, end_) / unit_); }
  Bar bar(const gtp::Schedule::Span& s, Color color, std::string label, const std::string& what) {
    return {x_of(s.begin), x_of(s.end), color, std::move(label),
            text("{}: {}", what, time_text(s.end - s.begin))};
  }

  void head() {
    out_ += svg_head(kWidth, bottom() + 56, options_.title,
                     ".on{fill:#fff;font-size:10px}.arc{stroke-width:.7;opacity:.5}");
    out_ += svg_label(kMargin, 38, "title ink", "", options_.title);
    out_ += svg_label(kRight, 38, "quiet", "end", options_.note);
    double x = kMargin;
    for (const auto& [color, label] : kLegend) {
      out_ += text("<rect class=\"f{}\" x=\"{}\" y=\"57\" width=\"12\" height=\"12\" rx=\"2\"/>\n",
                   int(color), svg_number(x));
      out_ += svg_label(x + 18, 67, "ink", "", label);
      x += 46 + 6.7 * double(std::string_view(label).size());
    }
  }

  void axis() {
    const double y = bottom();
    for (const Tick& tick : axis_.ticks(14)) {
      const double x = axis_.position(tick.value);
      out_ += svg_line("grid", x, kTop - 12, x, y);
      out_ += svg_label(x, y + 20, "quiet", "middle", tick.label);
    }
    out_ += svg_line("axis", kLeft, y, kRight, y);
    out_ += svg_label((kLeft + kRight) / 2, y + 44, "quiet", "middle",
                      unit_ == 1e9   ? "s"
                      : unit_ == 1e6 ? "ms"
                                     : "us");
  }

  void compute() {
    const std::vector<gtp::Schedule::Span>& work = step_.schedule.work;
    std::vector<Bar> bars;
    double before = 0;
    for (size_t p = 0; p < work.size(); ++p) {
      const gtp::Schedule::Span wait{before, work[p].begin};
      if (visible(wait)) bars.push_back(bar(wait, kWait, "", "waits for " + waited_for(p)));
      const Call& call = calls_[p];
      if (visible(work[p])) {
        // Work that follows a kGrad is not its bundle's; it may be the backward pass of attention.
        const bool after = call.kind == Kind::kGrad;
        bars.push_back(
            bar(work[p], color_of(call.kind), after ? "" : call.bundles,
                text("{}{} {}", after ? "after " : "", gtp::name(call.kind), call.bundles)));
      }
      before = work[p].end;
    }
    const gtp::Schedule::Span flush{before, before + step_.schedule.flush_wait};
    if (visible(flush)) bars.push_back(bar(flush, kWait, "", "waits for the last reduces"));
    row("compute", kTop, kComputeHeight, bars);
  }

  std::string waited_for(size_t p) const {
    std::string names;
    for (const int32_t g : step_.plan.waits[static_cast<int32_t>(p)]) {
      names += (names.empty() ? "gather of " : ", ") +
               short_name(step_.bundles[step_.plan.gathers[g].bundle].name);
    }
    if (calls_[p].kind == Kind::kRows) return "rows of " + calls_[p].bundles;
    return names.empty() ? "a send slot" : names;
  }

  void lane(size_t l) {
    const gtp::LaneSpec& spec = step_.plan.lanes[l];
    std::vector<Bar> bars;
    const auto add = [&](const auto& operations, const std::vector<gtp::Schedule::Span>& spans,
                         Color color) {
      for (size_t i = 0; i < operations.size(); ++i) {
        if (operations[i].lane != static_cast<int32_t>(l) || !visible(spans[i])) continue;
        const std::string name = short_name(step_.bundles[operations[i].bundle].name);
        bars.push_back(bar(spans[i], color, name, lane_name(spec) + " " + name));
      }
    };
    if (spec.reduces) {
      add(step_.plan.reduces, step_.schedule.reduces, kReduce);
    } else {
      add(step_.plan.gathers, step_.schedule.gathers, kGather);
    }
    row(lane_name(spec), lane_top(l), kLaneHeight, bars);
  }

  // Bars of less than a pixel join their neighbour of the same color, so that a long step stays a
  // small file.
  void row(const std::string& name, double top, double height, std::vector<Bar> bars) {
    out_ += svg_label(kMargin, top + height / 2 + 4, "ink", "", name);
    std::stable_sort(bars.begin(), bars.end(),
                     [](const Bar& a, const Bar& b) { return a.begin < b.begin; });
    std::vector<Bar> joined;
    std::array<int64_t, kSvgColors> last;
    last.fill(-1);
    for (Bar& b : bars) {
      if (int64_t& i = last[b.color]; i >= 0 && b.end - joined[i].begin < 1) {
        joined[i].end = b.end;
        joined[i].tip = "several";
      } else {
        i = int64_t(joined.size());
        joined.push_back(std::move(b));
      }
    }
    for (const Bar& b : joined) {
      const double width = std::max(0.6, b.end - b.begin - (b.end - b.begin > 3 ? 0.6 : 0));
      out_ += text(
          "<rect class=\"f{}\" x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\"><title>{}"
          "</title></rect>\n",
          int(b.color), b.begin, top, width, height, xml_escape(b.tip));
      if (!b.label.empty() && width > kLetter * double(b.label.size()) + 6) {
        out_ += svg_label((b.begin + b.end) / 2, top + height / 2 + 3.5, "on", "middle", b.label);
      }
    }
  }

  void arcs() {
    std::string path;
    std::pair<int64_t, int64_t> before{-1, -1};
    for (size_t i = 0; i < step_.plan.gathers.size(); ++i) {
      const gtp::Gather& g = step_.plan.gathers[i];
      const double from = step_.schedule.gathers[i].end;
      const double to = step_.schedule.work[g.first_use].begin;
      if (to < begin_ || from > end_) continue;
      const std::pair<int64_t, int64_t> here{std::llround(x_of(from)), std::llround(x_of(to))};
      if (here == before) continue;
      before = here;
      path += text("M{} {}L{} {}", svg_number(x_of(from)), svg_number(lane_top(g.lane)),
                   svg_number(x_of(to)), svg_number(kTop + kComputeHeight));
    }
    if (!path.empty()) out_ += text("<path class=\"arc s{}\" d=\"{}\"/>\n", int(kGather), path);
  }

  const PlannedStep& step_;
  const TimelineOptions& options_;
  std::vector<Call> calls_;
  double begin_, end_, unit_;  // ns; ns in a unit of the axis
  Axis axis_;
  std::string out_;
};

}  // namespace

std::string draw_timeline(const PlannedStep& step, const TimelineOptions& options) {
  return Timeline(step, options).svg();
}

std::string plan_report(const PlannedStep& step) {
  const gtp::Plan& plan = step.plan;
  const gtp::Report& r = plan.report;
  const double exposed = r.gather_wait_ns + r.send_wait_ns + r.flush_wait_ns;
  const auto moved = std::count_if(plan.reduces.begin(), plan.reduces.end(),
                                   [](const gtp::Reduce& x) { return x.lane != gtp::kNone; });
  std::string out;
  out += text("calls      {}, work {}\n", plan.positions, time_text(r.work_ns));
  out += text("transfers  {} gathers, {} reduces, {} received\n", plan.gathers.size(), moved,
              bytes_text(r.received));
  out += text("merges     {}, {} given up for memory; {} sends cut short\n", r.merges, r.undone,
              r.shortened);
  out += text("exposed    {} ({:.2f} % of the step): gathers {}, send slots {}, flush {}\n",
              time_text(exposed), 100 * exposed / std::max(1.0, r.work_ns + exposed),
              time_text(r.gather_wait_ns), time_text(r.send_wait_ns), time_text(r.flush_wait_ns));
  out += text("crossings  {}\n", r.crossings);
  out += text("slots      {}\n", bytes_text(r.bytes));
  for (const gtp::Report::Class& c : r.classes) {
    out += text("  {:<13} {:<8} {:>4} x {:>10} = {:>10}{}\n", gtp::name(c.slot.use),
                c.slot.expert ? "experts" : "dense", c.count, bytes_text(c.slot.bytes),
                bytes_text(c.bytes()), c.slot.crosses ? ", crosses cuts" : "");
  }
  out += text("hash       {:016x}\n", plan.hash);
  return out;
}

}  // namespace moiety::app
