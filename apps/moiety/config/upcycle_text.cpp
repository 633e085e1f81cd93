#include "apps/moiety/config/upcycle_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <sstream>

#include "moiety/base/error.h"
#include "moiety/base/printable.h"

namespace moiety::app {
namespace {

[[noreturn]] void refuse_word(const std::string& word, const char* expected) {
  throw UsageError("--upcycle {}: expected {}", printable(word), expected);
}

template <class T>
std::optional<T> number_of(std::string_view s) {
  T value{};
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
  if (error != std::errc() || end != s.data() + s.size()) return {};
  return value;
}

int64_t count_of(const std::string& word, std::string_view s, int64_t most) {
  const auto n = number_of<int64_t>(s);
  if (!n || *n < 1 || *n > most) {
    throw UsageError("--upcycle {}: must be in 1..{}", printable(word), most);
  }
  return *n;
}

// Adds "3" or "2-5".
void add_layers(const std::string& word, std::string_view s, std::vector<int64_t>& layers) {
  const size_t dash = s.find('-');
  const auto first = number_of<int64_t>(s.substr(0, dash));
  const auto last = dash == s.npos ? first : number_of<int64_t>(s.substr(dash + 1));
  if (!first || !last || *first < 0 || *last < *first || *last > 1023) {
    refuse_word(word, "layers=all, or numbers and ranges such as layers=0,2-5");
  }
  for (int64_t l = *first; l <= *last; ++l) layers.push_back(l);
}

}  // namespace

hf::Upcycling parse_upcycling(const std::string& words) {
  hf::Upcycling out;
  bool in_layers = false, experts = false, top_k = false;
  std::istringstream stream(words);
  for (std::string word; std::getline(stream, word, ',');) {
    const size_t equal = word.find('=');
    const std::string key = word.substr(0, equal);
    const std::string value = equal == word.npos ? "" : word.substr(equal + 1);
    if (equal == word.npos && in_layers) {
      add_layers(word, word, out.layers);
      continue;
    }
    in_layers = false;
    if (key == "experts") {
      out.experts = count_of(word, value, 4096);
      experts = true;
    } else if (key == "top_k") {
      out.top_k = count_of(word, value, 32);
      top_k = true;
    } else if (key == "noise") {
      const auto x = number_of<float>(value);
      if (!x || !(*x >= 0 && *x <= 1)) refuse_word(word, "a number in 0..1");
      out.noise = *x;
    } else if (key == "layers") {
      in_layers = value != "all";
      if (in_layers) add_layers(word, value, out.layers);
    } else {
      refuse_word(word, "experts=N,top_k=N[,noise=X][,layers=all|LIST]");
    }
  }
  if (!experts || !top_k) refuse_word(words, "both experts=N and top_k=N");
  std::ranges::sort(out.layers);
  out.layers.erase(std::unique(out.layers.begin(), out.layers.end()), out.layers.end());
  return out;
}

}  // namespace moiety::app
