// Axes of a chart: the part of the numbers that is shown, and the places and texts of the ticks.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

struct Range {
  double low, high;
};

// A range of the finite values added so far; empty at first.
class Extent {
 public:
  void add(double x);
  bool empty() const { return low_ > high_; }
  Range range() const { return {low_, high_}; }

 private:
  double low_ = 1, high_ = 0;
};

struct Tick {
  double value;
  std::string label;
};

// A scale from numbers to positions. It has about `wanted` ticks, at 1, 2 and 5 times powers of
// ten; on a logarithmic scale of many decades only at powers of ten.
class Axis {
 public:
  // A range without width is widened. A logarithmic range must be positive.
  Axis(Range range, double begin, double end, bool logarithmic);

  // The position of x; positions increase or decrease with x, as begin and end say.
  double position(double x) const;
  std::vector<Tick> ticks(int wanted) const;
  const Range& range() const { return range_; }

 private:
  double scaled(double x) const;

  Range range_;
  double begin_, end_;
  bool logarithmic_;
};

// `range` with room at both ends.
Range padded(Range range, double share, bool logarithmic);

}  // namespace moiety::app
