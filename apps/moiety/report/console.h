// The program's display on stderr. On a terminal it is one status line with a bar, redrawn at most
// ten times a second, cut to the terminal's width, with log lines scrolling above it. Otherwise it
// is plain lines, without carriage returns or escape codes.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

#include "moiety/base/log.h"

namespace moiety::app {

enum class ProgressMode { kOff, kLines, kBar };

class Console {
 public:
  struct Target {
    std::function<void(std::string_view)> write;
    std::function<int()> width;  // width of the terminal in columns
    ProgressMode progress = ProgressMode::kLines;
    bool color = false;
  };
  explicit Console(Target target) : target_(std::move(target)) {}
  ~Console() { close(); }
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  // The target stderr. `progress` and `color` are as in [log]; auto looks at the terminal, TERM and
  // NO_COLOR.
  static Target standard_error(std::string_view progress, std::string_view color);

  // Writes a line that stays. Warnings and errors are coloured where colour is on.
  void line(LogLevel level, std::string_view text);
  // Shows the progress: `done` in [0, 1] and text behind the bar. Does nothing where there is no
  // bar.
  void status(double done, std::string_view text);
  // Removes the status line; the end of the program's last line belongs to the shell.
  void close();
  ProgressMode progress() const { return target_.progress; }
  bool has_bar() const { return progress() == ProgressMode::kBar; }

 private:
  using Clock = std::chrono::steady_clock;
  void draw(double done, std::string_view text);

  Target target_;
  std::mutex mutex_;
  std::string status_;  // as drawn, cut to the width; empty if there is none
  Clock::time_point drawn_{};
};

// A bar of `width` columns: "[=====> ]".
std::string progress_bar(double done, int width);

}  // namespace moiety::app
