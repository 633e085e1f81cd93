#include "apps/moiety/report/people.h"

#include <cmath>
#include <iterator>

#include "moiety/base/format.h"

namespace moiety::app {
std::string counted(int64_t n, std::string_view noun) {
  const char* ending = n == 1 ? "" : noun.ends_with("ch") ? "es" : "s";
  return text("{} {}{}", n, noun, ending);
}

std::string amount_text(double value) {
  static constexpr const char* kUnits[] = {"", " k", " M", " B", " T"};
  size_t unit = 0;
  while (std::fabs(value) >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  const double a = std::fabs(value);
  const int behind = unit == 0 || a >= 99.95 ? 0 : a >= 9.995 ? 1 : 2;
  return text("{:.{}f}{}", value, behind, kUnits[unit]);
}

}  // namespace moiety::app
