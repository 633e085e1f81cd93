#include "moiety/base/format.h"

#include <cmath>

#include <fmt/args.h>
#include <fmt/format.h>

namespace moiety {

std::string vtext(std::string_view format, std::span<const FormatArg> args) {
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  for (const FormatArg& arg : args) {
    std::visit([&](const auto& v) { store.push_back(v); }, arg.value());
  }
  try {
    return fmt::vformat(fmt::string_view(format.data(), format.size()), store);
  } catch (const fmt::format_error& e) {
    return std::string(format) + " [bad format: " + e.what() + "]";
  }
}

std::string bytes_text(int64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? text("{} B", bytes) : text("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace moiety
