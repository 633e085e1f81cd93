// The end of a generated text at one of several texts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moiety::app {

class StopText {
 public:
  // None of the texts is empty.
  explicit StopText(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Adds bytes, and returns those that may be shown: what could be the beginning of a stop text is
  // held back. Once one is met, nothing behind it comes.
  std::string add(std::string_view bytes);
  // The bytes that are still held back, if no more are added.
  std::string rest();
  bool met() const { return met_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool met_ = false;
};

}  // namespace moiety::app
