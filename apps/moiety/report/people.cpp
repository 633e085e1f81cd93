#include "apps/moiety/report/people.h"

#include <cmath>
#include <iterator>

#include "moiety/base/format.h"

namespace moiety::app {
namespace {

// Three digits, and no more of them behind the point than `most`.
std::string digits_text(double value, int most) {
  const double a = std::fabs(value);
  const int behind = a >= 99.95 ? 0 : a >= 9.995 ? 1 : 2;
  return text("{:.{}f}", value, behind < most ? behind : most);
}

}  // namespace

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
  return digits_text(value, unit == 0 ? 0 : 2) + kUnits[unit];
}

std::string seconds_text(double seconds) {
  const bool milliseconds = std::fabs(seconds) < 0.9995;
  const double value = milliseconds ? 1e3 * seconds : seconds;
  return digits_text(value, std::fabs(value) < 0.995 ? 2 : 1) + (milliseconds ? " ms" : " s");
}

}  // namespace moiety::app
