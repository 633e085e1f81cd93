// Names of an enum's values, as the table of keys has them.
#pragma once

#include <array>
#include <string_view>
#include <utility>

#include "moiety/base/error.h"

namespace moiety::app {

template <class E, size_t kCount>
using Names = std::array<std::pair<std::string_view, E>, kCount>;

template <class E, size_t kCount>
E value_of(const Names<E, kCount>& names, std::string_view name) {
  for (const auto& [text, value] : names) {
    if (text == name) return value;
  }
  throw UsageError("unknown value '{}'", name);  // the table has refused it already
}

template <class E, size_t kCount>
std::string_view name_of(const Names<E, kCount>& names, E value) {
  for (const auto& [text, v] : names) {
    if (v == value) return text;
  }
  return "";
}

}  // namespace moiety::app
