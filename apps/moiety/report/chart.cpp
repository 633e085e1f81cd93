#include "apps/moiety/report/chart.h"

#include <algorithm>
#include <cmath>

#include "apps/moiety/report/axis.h"
#include "apps/moiety/report/svg.h"
#include "moiety/base/format.h"
#include "moiety/train/metrics.h"

namespace moiety::app {
namespace {

constexpr double kWidth = 960, kHeight = 540;
constexpr double kMargin = 24;
// The area of the curves, if the legend has one row.
constexpr double kLeft = 76, kRight = kWidth - 76, kTop = 114, kBottom = kHeight - 62;
constexpr double kLegendTop = 62, kLegendRow = 20;
constexpr double kCharacter = 6.7;  // width of a letter of 12 px, rather more than less
constexpr int kColumns = int(kRight - kLeft);

int color_class(const Series& series) { return series.color % kSvgColors; }

const char* mark_class(const Series& series) {
  switch (series.mark) {
    case Mark::kThin:
      return "thin";
    case Mark::kDashed:
      return "thick dashed";
    default:
      return "thick";
  }
}

int letters(std::string_view s) {
  return int(std::count_if(s.begin(), s.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

// Shortens text to at most `most` letters by leaving out the middle.
std::string shortened(const std::string& s, int most) {
  if (letters(s) <= most) return s;
  const auto byte_of = [&](int letter) {
    size_t i = 0;
    for (int n = -1; i < s.size(); ++i) {
      if ((s[i] & 0xc0) != 0x80 && ++n == letter) break;
    }
    return i;
  };
  const int half = (most - 1) / 2;
  return s.substr(0, byte_of(half)) + "…" + s.substr(byte_of(letters(s) - half));
}

std::string value_label(double v) {
  if (std::fabs(v) >= 1000) return train::si_text(v);
  if (v == 0 || std::fabs(v) >= 1e-3) return text("{:#.4g}", v);
  return std::fabs(v) >= 1e-4 ? text("{:.2g}", v) : text("{:.1e}", v);
}

class Drawing {
 public:
  explicit Drawing(const Chart& chart)
      : chart_(chart),
        rows_(lay_out_legend()),
        top_(kTop + kLegendRow * double(std::max(0, rows_ - 1))),
        x_(x_axis()),
        y_(y_axis()) {}

  std::string svg();

 private:
  struct LegendItem {
    const Series* series;  // null for lost values
    std::string label;
    double x;
    int row;
  };

  int lay_out_legend();
  Axis x_axis() const;
  Axis y_axis() const;
  // Whether the point can be shown on the y axis.
  bool visible(double y) const { return std::isfinite(y) && (!chart_.logarithmic || y > 0); }

  void write(std::string_view s) { out_ += s; }
  void label(double x, double y, const char* css, const char* anchor, std::string_view s);
  void line(const char* css, double x1, double y1, double x2, double y2);
  void head();
  void legend();
  void axes();
  void reference();
  void curve(const Series& series);
  void dots(const Series& series);
  void lost_values(const Series& series);
  void end_labels();

  const Chart& chart_;
  std::vector<LegendItem> items_;
  int rows_;
  double top_;
  Axis x_, y_;
  std::string out_;
};

int Drawing::lay_out_legend() {
  double x = kMargin;
  int row = 0;
  const auto add = [&](const Series* series, const std::string& label) {
    const double width = 28 + letters(label) * kCharacter + 18;
    if (x > kMargin && x + width > kWidth - kMargin) {
      x = kMargin;
      ++row;
    }
    items_.push_back({series, label, x, row});
    x += width;
  };
  bool lost = false;
  for (const Series& series : chart_.series) {
    if (!series.label.empty()) add(&series, shortened(series.label, 42));
    lost |= std::any_of(series.points.begin(), series.points.end(),
                        [](const ChartPoint& p) { return std::isinf(p.y) || std::isnan(p.y); });
  }
  if (lost) add(nullptr, "nan or inf");
  return items_.empty() ? 0 : row + 1;
}

Axis Drawing::x_axis() const {
  Extent extent;
  for (const Series& series : chart_.series) {
    for (const ChartPoint& p : series.points) extent.add(p.x);
  }
  Range range = extent.empty() ? Range{0, 1} : extent.range();
  // An axis whose values begin near zero, or that has a single value, begins at zero.
  if (range.low > 0 && (range.low < 0.1 * range.high || range.low == range.high)) range.low = 0;
  return {range, kLeft, kRight, false};
}

Axis Drawing::y_axis() const {
  Extent extent;
  for (const Series& series : chart_.series) {
    for (const ChartPoint& p : series.points) {
      if (visible(p.y)) extent.add(p.y);
    }
  }
  if (extent.empty())
    return {chart_.logarithmic ? Range{1, 10} : Range{0, 1}, kBottom, top_, chart_.logarithmic};
  if (chart_.reference && visible(*chart_.reference)) extent.add(*chart_.reference);
  Range range = padded(extent.range(), 0.05, chart_.logarithmic);
  if (chart_.from_zero && !chart_.logarithmic && extent.range().low >= 0) range.low = 0;
  return {range, kBottom, top_, chart_.logarithmic};
}

void Drawing::label(double x, double y, const char* css, const char* anchor, std::string_view s) {
  write(svg_label(x, y, css, anchor, s));
}

void Drawing::line(const char* css, double x1, double y1, double x2, double y2) {
  write(svg_line(css, x1, y1, x2, y2));
}

void Drawing::head() {
  write(svg_head(kWidth, kHeight, chart_.title,
                 ".thin{stroke-width:1;opacity:.45;stroke-linejoin:round}"
                 ".thick{stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}"
                 ".dashed{stroke-dasharray:5 5;stroke-width:1.8}"
                 ".reference{stroke-dasharray:2 4}"
                 ".leader,.lost,.halo{stroke-width:1.5}"));
  label(kMargin, 38, "title ink", "", chart_.title);
  label(kWidth - kMargin, 38, "quiet", "end", chart_.note);
}

void Drawing::legend() {
  for (const LegendItem& item : items_) {
    const double y = kLegendTop + kLegendRow * item.row;
    const int color = item.series ? color_class(*item.series) : 0;
    if (!item.series) {
      line("lost", item.x + 9, y - 5, item.x + 9, y + 5);
    } else if (item.series->mark == Mark::kDot) {
      write(text("<circle class=\"f{} halo\" cx=\"{}\" cy=\"{}\" r=\"4.5\"/>\n", color,
                 svg_number(item.x + 9), svg_number(y)));
    } else {
      const std::string css = text("{} s{}", mark_class(*item.series), color);
      line(css.c_str(), item.x, y, item.x + 18, y);
    }
    label(item.x + 25, y + 4, "ink", "", item.label);
  }
}

void Drawing::axes() {
  label(kMargin, top_ - 20, "quiet", "", chart_.y_title);
  for (const Tick& tick : y_.ticks(8)) {
    const double y = y_.position(tick.value);
    line("grid", kLeft, y, kRight, y);
    label(kLeft - 10, y + 4, "quiet", "end", tick.label);
  }
  line("axis", kLeft, kBottom, kRight, kBottom);
  for (const Tick& tick : x_.ticks(10)) {
    const double x = x_.position(tick.value);
    line("axis", x, kBottom, x, kBottom + 5);
    label(x, kBottom + 20, "quiet", "middle", tick.label);
  }
  label((kLeft + kRight) / 2, kBottom + 44, "quiet", "middle", chart_.x_title);
}

void Drawing::reference() {
  if (!chart_.reference || !visible(*chart_.reference)) return;
  const double y = y_.position(*chart_.reference);
  line("axis reference", kLeft, y, kRight, y);
}

void Drawing::curve(const Series& series) {
  std::string path;
  bool pen_down = false;
  size_t since_move = 0;
  const char* lone = series.mark == Mark::kThin ? "h.1" : "m-1 0h2";
  const auto end_piece = [&] {
    if (pen_down && since_move == 1) path += lone;
    pen_down = false;
  };
  for (const ChartPoint& p : thin_out(series.points, kColumns)) {
    if (!visible(p.y)) {
      end_piece();
      continue;
    }
    path += pen_down ? 'L' : 'M';
    path += svg_number(x_.position(p.x)) + " " + svg_number(y_.position(p.y));
    since_move = pen_down ? since_move + 1 : 1;
    pen_down = true;
  }
  end_piece();
  if (path.empty()) return;
  write(text("<path class=\"{} s{}\" d=\"{}\"/>\n", mark_class(series), color_class(series), path));
}

void Drawing::dots(const Series& series) {
  for (const ChartPoint& p : thin_out(series.points, kColumns / 4)) {
    if (!visible(p.y)) continue;
    write(
        text("<circle class=\"f{} halo\" cx=\"{}\" cy=\"{}\" r=\"4.5\"><title>{}: {}</title>"
             "</circle>\n",
             color_class(series), svg_number(x_.position(p.x)), svg_number(y_.position(p.y)),
             value_label(p.x), value_label(p.y)));
  }
}

// Draws marks along the x axis for values that are nan or inf, at most one per pixel.
void Drawing::lost_values(const Series& series) {
  std::string path, last;
  int64_t count = 0;
  for (const ChartPoint& p : series.points) {
    if (std::isfinite(p.y)) continue;
    ++count;
    const std::string x = text("{}", std::llround(x_.position(p.x)));
    if (x == last) continue;
    path += text("M{} {}v-9", x, svg_number(kBottom - 1));
    last = x;
  }
  if (count == 0) return;
  write(text("<path class=\"lost\" d=\"{}\"><title>nan or inf: {} values</title></path>\n", path,
             count));
}

// Draws the last values of the smooth curves and the reference beside their ends; at the right edge
// they are pushed apart where they are close.
void Drawing::end_labels() {
  struct End {
    double curve, y;
    int color;  // negative for the reference
    std::string text;
  };
  std::vector<End> ends;
  for (const Series& series : chart_.series) {
    if (series.mark != Mark::kThick && series.mark != Mark::kDashed) continue;
    if (series.points.empty() || !visible(series.points.back().y)) continue;
    const double x = x_.position(series.points.back().x);
    const double y = y_.position(series.points.back().y);
    const std::string value = value_label(series.points.back().y);
    if (x < kRight - 2) {
      label(x + 6, y + 4, "ink", "", value);  // it ends before others do
    } else {
      ends.push_back({y, y, color_class(series), value});
    }
  }
  if (chart_.reference && visible(*chart_.reference)) {
    const double y = y_.position(*chart_.reference);
    ends.push_back({y, y, -1, chart_.reference_label});
  }
  std::sort(ends.begin(), ends.end(), [](const End& a, const End& b) { return a.y < b.y; });
  if (ends.size() > 2 * kSvgColors) return;
  constexpr double kApart = 15;
  for (size_t i = 1; i < ends.size(); ++i) ends[i].y = std::max(ends[i].y, ends[i - 1].y + kApart);
  double limit = kBottom;
  for (auto end = ends.rbegin(); end != ends.rend(); ++end) {
    end->y = std::min(end->y, limit);
    limit = end->y - kApart;
    const std::string css = end->color < 0 ? "axis" : text("leader s{}", end->color);
    line(css.c_str(), kRight + 2, end->curve, kRight + 13, end->y);
    label(kRight + 18, end->y + 4, end->color < 0 ? "quiet" : "ink", "", end->text);
  }
}

std::string Drawing::svg() {
  head();
  legend();
  axes();
  const bool empty = std::all_of(chart_.series.begin(), chart_.series.end(),
                                 [](const Series& s) { return s.points.empty(); });
  if (empty) {
    label((kLeft + kRight) / 2, (top_ + kBottom) / 2, "quiet", "middle", "nothing recorded yet");
  }
  reference();
  // Thin curves lie below thick ones, dots on top.
  for (const Series& series : chart_.series) {
    if (series.mark != Mark::kThin) continue;
    curve(series);
    lost_values(series);
  }
  for (const Series& series : chart_.series) {
    if (series.mark == Mark::kThick || series.mark == Mark::kDashed) curve(series);
  }
  for (const Series& series : chart_.series) {
    if (series.mark == Mark::kDot) dots(series);
  }
  end_labels();
  write("</svg>\n");
  return std::move(out_);
}

}  // namespace

std::string draw(const Chart& chart) { return Drawing(chart).svg(); }

}  // namespace moiety::app
