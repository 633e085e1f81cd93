#include "apps/moiety/options.h"

namespace moiety::app {
namespace {

Rule any() { return {}; }
Rule between(double min, double max) {
  Rule rule;
  rule.min = min;
  rule.max = max;
  return rule;
}
Rule at_least(double min) { return between(min, Rule::kInfinity); }
Rule above(double min) {
  Rule rule = at_least(min);
  rule.open_min = true;
  return rule;
}
template <class... Names>
Rule one_of(Names... names) {
  Rule rule;
  rule.choices = {names...};
  return rule;
}

constexpr Resume kMust = Resume::kMust, kMay = Resume::kMay, kFree = Resume::kFree,
                 kContent = Resume::kContent;

const std::vector<Key>& table() {
#define SECTION(section, help)
#define KEY(section, name, type, value, resume, rule, unit, help) \
  {#section, #name, [](Options& o) { return Key::Field(&o.section.name); }, resume, rule,             \
   unit,     help},
#define END_SECTION(section)
  static const std::vector<Key> keys{
#include "apps/moiety/option_table.inc"
  };
  return keys;
}

}  // namespace

Rule Rule::or_zero() const {
  Rule rule = *this;
  rule.zero = true;
  return rule;
}
Rule Rule::multiple_of(int64_t m) const {
  Rule rule = *this;
  rule.multiple = m;
  return rule;
}
Rule Rule::without_max() const {
  Rule rule = *this;
  rule.open_max = true;
  return rule;
}

std::span<const Key> option_keys() { return table(); }

const std::vector<Section>& option_sections() {
#define SECTION(section, help) {#section, help, {}},
#define KEY(...)
#define END_SECTION(section)
  static const std::vector<Section> sections = [] {
    std::vector<Section> list{
#include "apps/moiety/option_table.inc"
    };
    const std::span<const Key> keys = option_keys();
    size_t begin = 0;
    for (Section& section : list) {
      size_t end = begin;
      while (end < keys.size() && keys[end].section == section.name) ++end;
      section.keys = keys.subspan(begin, end - begin);
      begin = end;
    }
    return list;
  }();
  return sections;
}

}  // namespace moiety::app
