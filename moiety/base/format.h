// Text from a format string, without a formatting library in every header.
//  The syntax is that of {fmt}: "{}", "{:.3f}", "{:>8}".
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

namespace moiety {

// One argument of `text`, held by value or as a view of the caller's characters.
class FormatArg {
 public:
  using Value = std::variant<int64_t, uint64_t, double, bool, std::string_view, const void*>;

  FormatArg(bool v) : value_(v) {}
  template <std::integral I>
  requires(!std::same_as<I, bool>) FormatArg(I v)
      : value_(std::in_place_type<std::conditional_t<std::is_signed_v<I>, int64_t, uint64_t>>, v) {}
  template <std::floating_point F>
  FormatArg(F v) : value_(static_cast<double>(v)) {}
  FormatArg(std::string_view v) : value_(v) {}
  FormatArg(const std::string& v) : value_(std::string_view(v)) {}
  FormatArg(const char* v) : value_(std::string_view(v)) {}
  FormatArg(const void* v) : value_(v) {}

  const Value& value() const { return value_; }

 private:
  Value value_;
};

// Formats. A format string that does not fit its arguments gives the format string itself plus a
// note, since error texts are made here and an error about an error helps nobody.
std::string vtext(std::string_view format, std::span<const FormatArg> args);

template <class... Args>
std::string text(std::string_view format, const Args&... args) {
  const std::array<FormatArg, sizeof...(Args)> list{FormatArg(args)...};
  return vtext(format, list);
}

// A size for people, in logs and errors: "1.5 MiB", "640 B".
std::string bytes_text(int64_t bytes);

}  // namespace moiety
