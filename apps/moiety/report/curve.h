// Curves before they are drawn: smoothing and thinning.
#pragma once

#include <vector>

namespace moiety::app {

struct ChartPoint {
  double x, y;
};

// The exponentially weighted mean of the finite values over about `window` of them, forwards and
// backwards, so that the curve does not lag. Values that are not finite stay.
std::vector<ChartPoint> smooth(const std::vector<ChartPoint>& points, double window);

// `points` thinned so that a column of 1 / `columns` of the width keeps its smallest and its
// largest value, in their order. Values that are not finite are left out, but one stays for a gap.
std::vector<ChartPoint> thin_out(const std::vector<ChartPoint>& points, int columns);

}  // namespace moiety::app
