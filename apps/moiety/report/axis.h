// Axes of a chart: which part of the numbers is shown, where the ticks stand and what they say.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

struct Range {
  double low, high;
};

// Empty until something is added; non-finite values are not.
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

// A scale from numbers to positions. Ticks stand at 1, 2 and 5 times powers of ten, about `wanted`
// of them; on a logarithmic scale of many decades at powers of ten alone.
class Axis {
 public:
  // A range without width is widened. A logarithmic range is positive.
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
