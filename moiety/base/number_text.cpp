#include "moiety/base/number_text.h"

#include <array>
#include <charconv>

namespace moiety {
namespace {

template <class T>
std::string shortest(T value) {
  std::array<char, 32> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return {buffer.data(), end.ptr};
}

}  // namespace

std::string number_text(double value) { return shortest(value); }
std::string number_text(float value) { return shortest(value); }

}  // namespace moiety
