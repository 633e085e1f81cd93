#include "apps/moiety/report/curve.h"

#include <algorithm>
#include <cmath>

namespace moiety::app {
namespace {

// The part of the mean that stays from one value to the next. Near the beginning, where curves fall
// steeply, the window is as short as the distance from there.
double keep(size_t i, double window) {
  return std::exp(-1 / std::min(window, 2 + 0.5 * double(i)));
}

// One pass of the weighted mean: adds the values before i to sum[i] and weight[i].
template <class Index>
void accumulate(const std::vector<ChartPoint>& points, double window, Index index,
                std::vector<double>& sum, std::vector<double>& weight) {
  double s = 0, w = 0;
  for (size_t n = 0; n < points.size(); ++n) {
    const size_t i = index(n);
    const double k = keep(i, window);
    s *= k;
    w *= k;
    sum[i] += s;
    weight[i] += w;
    if (!std::isfinite(points[i].y)) continue;
    s += points[i].y;
    w += 1;
  }
}

}  // namespace

std::vector<ChartPoint> smooth(const std::vector<ChartPoint>& points, double window) {
  if (window <= 1) return points;
  const size_t n = points.size();
  std::vector<double> sum(n), weight(n);
  accumulate(
      points, window, [](size_t i) { return i; }, sum, weight);
  accumulate(
      points, window, [n](size_t i) { return n - 1 - i; }, sum, weight);
  std::vector<ChartPoint> out(points);
  for (size_t i = 0; i < n; ++i) {
    if (std::isfinite(out[i].y)) out[i].y = (sum[i] + out[i].y) / (weight[i] + 1);
  }
  return out;
}

std::vector<ChartPoint> thin_out(const std::vector<ChartPoint>& points, int columns) {
  if (points.size() <= 2 * size_t(columns)) return points;
  const double first = points.front().x, width = (points.back().x - first) / columns;
  std::vector<ChartPoint> out;
  for (size_t begin = 0; begin < points.size();) {
    const double limit = first + width * (std::floor((points[begin].x - first) / width) + 1);
    size_t end = begin, low = points.size(), high = points.size();
    for (; end < points.size() && (end == begin || points[end].x < limit); ++end) {
      const double y = points[end].y;
      if (!std::isfinite(y)) continue;
      if (low == points.size() || y < points[low].y) low = end;
      if (high == points.size() || y > points[high].y) high = end;
    }
    if (low == points.size()) {
      out.push_back(points[begin]);  // a gap: a column without a finite value
    } else {
      out.push_back(points[std::min(low, high)]);
      if (low != high) out.push_back(points[std::max(low, high)]);
    }
    begin = end;
  }
  return out;
}

}  // namespace moiety::app
