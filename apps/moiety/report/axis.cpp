#include "apps/moiety/report/axis.h"

#include <algorithm>
#include <cmath>

#include "moiety/base/format.h"

namespace moiety::app {
namespace {

// The smallest of 1, 2, 5 x 10^k that is at least x.
double step_at_least(double x) {
  const double power = std::pow(10, std::floor(std::log10(x)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= x * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

struct Unit {
  double value;
  const char* suffix;
};

// The number of decimals that multiples of `step` need.
int decimals(double step) { return std::max(0, -int(std::floor(std::log10(step) + 1e-9))); }

// The text for a multiple of `step` on an axis whose largest number is `most`.
std::string tick_text(double value, double step, double most) {
  static constexpr Unit kUnits[] = {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}};
  if (std::fabs(value) < step * 1e-6) return "0";
  if (most < 1e-2) {
    const double power = std::floor(std::log10(most) + 1e-9);
    return text("{:.{}f}e{}", value / std::pow(10, power), decimals(step / std::pow(10, power)),
                int64_t(power));
  }
  if (most < 1e4) return text("{:.{}f}", value, decimals(step));
  for (const Unit& unit : kUnits) {
    if (most >= unit.value) {
      return text("{:.{}f}{}", value / unit.value, decimals(step / unit.value), unit.suffix);
    }
  }
  return text("{}", value);
}

std::vector<Tick> linear_ticks(Range range, int wanted) {
  const double step = step_at_least((range.high - range.low) / wanted);
  const double most = std::max(std::fabs(range.low), std::fabs(range.high));
  std::vector<Tick> ticks;
  for (double n = std::ceil(range.low / step - 1e-6); n <= range.high / step + 1e-6; ++n) {
    ticks.push_back({n * step, tick_text(n * step, step, most)});
  }
  return ticks;
}

std::vector<Tick> logarithmic_ticks(Range range, int wanted) {
  const double decades = std::log10(range.high / range.low);
  // Ticks are 1, 2, 5 of every decade, or powers of ten, or every n-th of them.
  const bool fine = 3 * decades <= 1.5 * wanted;
  const int every = std::max(1, int(std::ceil(decades / wanted)));
  std::vector<Tick> ticks;
  const int first = int(std::floor(std::log10(range.low)));
  const int last = int(std::ceil(std::log10(range.high)));
  for (int k = first; k <= last; ++k) {
    for (double factor : {1.0, 2.0, 5.0}) {
      const double value = factor * std::pow(10, k);
      const bool shown = fine || (factor == 1 && k % every == 0);
      if (shown && value >= range.low * (1 - 1e-9) && value <= range.high * (1 + 1e-9)) {
        ticks.push_back({value, tick_text(value, std::pow(10, k), value)});
      }
    }
  }
  return ticks;
}

}  // namespace

void Extent::add(double x) {
  if (!std::isfinite(x)) return;
  if (empty()) {
    low_ = high_ = x;
  } else {
    low_ = std::min(low_, x);
    high_ = std::max(high_, x);
  }
}

Axis::Axis(Range range, double begin, double end, bool logarithmic)
    : range_(range), begin_(begin), end_(end), logarithmic_(logarithmic) {
  // A smaller value is noise of the arithmetic.
  const double least = 1e-9 * std::max(std::fabs(range.low), std::fabs(range.high));
  if (range_.high - range_.low > least) return;
  const double room = 0.1 * std::fabs(range.high);
  range_ = range.high == 0 ? Range{0, 1} : Range{range.low - room, range.high + room};
}

double Axis::scaled(double x) const { return logarithmic_ ? std::log10(x) : x; }

double Axis::position(double x) const {
  const double low = scaled(range_.low), high = scaled(range_.high);
  return begin_ + (end_ - begin_) * (scaled(x) - low) / (high - low);
}

std::vector<Tick> Axis::ticks(int wanted) const {
  if (!logarithmic_) return linear_ticks(range_, wanted);
  std::vector<Tick> ticks = logarithmic_ticks(range_, wanted);
  return ticks.size() >= 3 ? ticks : linear_ticks(range_, wanted);  // less than a decade
}

Range padded(Range range, double share, bool logarithmic) {
  if (logarithmic) {
    const double factor = std::pow(range.high / range.low, share);
    return {range.low / factor, range.high * factor};
  }
  const double room = share * (range.high - range.low);
  return {range.low - room, range.high + room};
}

}  // namespace moiety::app
