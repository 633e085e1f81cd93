// A chart of curves as SVG text: 960 x 540, light and dark by prefers-color-scheme, without scripts
// and without fonts of its own, so any browser shows it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "apps/moiety/report/curve.h"

namespace moiety::app {

// The looks of a series.
enum class Mark {
  // every value; each pixel column keeps its smallest and its largest, so that spikes survive
  kThin,
  kThick,   // a smooth curve
  kDashed,  // a second smooth curve of the same color
  kDot,     // single points
};

struct Series {
  std::string label;  // its text in the legend; empty: not in the legend
  int color = 0;      // number in the palette
  Mark mark = Mark::kThick;
  std::vector<ChartPoint> points{};  // x ascends; a y that is not finite leaves a gap
};

struct Chart {
  std::string title;
  std::string note{};  // beside the title
  std::string x_title, y_title;
  bool logarithmic = false;           // the y axis is logarithmic
  bool from_zero = false;             // the y axis begins at zero
  std::optional<double> reference{};  // a line across at this y
  std::string reference_label{};
  std::vector<Series> series{};
};

std::string draw(const Chart& chart);

}  // namespace moiety::app
