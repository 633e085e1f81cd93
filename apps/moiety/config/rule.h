// The values that a key of the configuration or an option of a command may have: its rule, which
// also says itself in messages and in help.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace moiety::app {

struct Rule {
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double min = -kInfinity;
  double max = kInfinity;
  bool open_min = false;  // min itself is excluded
  bool open_max = false;
  bool zero = false;  // 0 is legal even if the range excludes it
  bool none = false;  // of an optional number: "" is legal and means that none is given
  int64_t multiple = 1;
  std::vector<std::string_view> choices;  // for a string; empty: any text

  Rule or_zero() const;
  Rule or_none() const;
  Rule multiple_of(int64_t m) const;
  Rule without_min() const;
  Rule without_max() const;

  // Whether a number is finite and in the range.
  bool allows(double v) const;
  bool allows(int64_t v) const { return allows(double(v)) && v % multiple == 0; }
  bool allows(std::string_view word) const;
};

Rule any();
Rule between(double min, double max);
Rule at_least(double min);
template <class... Names>
Rule one_of(Names... names) {
  Rule rule;
  rule.choices = {names...};
  return rule;
}

// The values that the rule allows: "1..1024", "> 0", "auto | cpu". Empty if it allows all.
std::string range_text(const Rule& rule);

}  // namespace moiety::app
