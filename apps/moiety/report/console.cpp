#include "apps/moiety/report/console.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sys/ioctl.h>
#include <unistd.h>

namespace moiety::app {
namespace {

constexpr int kBarWidth = 24;
constexpr std::chrono::milliseconds kRedraw{100};

bool set_and_not_empty(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value;
}

int terminal_width() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

const char* color_of(LogLevel level) {
  if (level == LogLevel::kError) return "\x1b[31m";
  if (level == LogLevel::kWarning) return "\x1b[33m";
  return "";
}

}  // namespace

Console::Target Console::standard_error(std::string_view progress, std::string_view color) {
  const char* term = std::getenv("TERM");
  const bool terminal = isatty(STDERR_FILENO) && std::string_view(term ? term : "") != "dumb";
  Target target;
  target.write = [](std::string_view s) { std::fwrite(s.data(), 1, s.size(), stderr); };
  target.width = terminal_width;
  target.progress = progress == "off"                                       ? ProgressMode::kOff
                    : progress == "bar" || (progress == "auto" && terminal) ? ProgressMode::kBar
                                                                            : ProgressMode::kLines;
  target.color =
      color == "always" || (color == "auto" && terminal && !set_and_not_empty("NO_COLOR"));
  return target;
}

void Console::line(LogLevel level, std::string_view text) {
  const std::lock_guard lock(mutex_);
  std::string out = status_.empty() ? "" : "\r\x1b[K";
  const std::string color = target_.color ? color_of(level) : "";
  out += color;
  out += text;
  out += color.empty() ? "\n" : "\x1b[0m\n";
  out += status_;
  target_.write(out);
}

void Console::status(double done, std::string_view text) {
  if (!has_bar()) return;
  const std::lock_guard lock(mutex_);
  if (status_.empty() || Clock::now() - drawn_ >= kRedraw || done >= 1) draw(done, text);
}

void Console::draw(double done, std::string_view text) {
  status_ = progress_bar(done, kBarWidth) + " " + std::string(text);
  status_.resize(std::min<size_t>(status_.size(), std::max(1, target_.width() - 1)));
  drawn_ = Clock::now();
  target_.write("\r" + status_ + "\x1b[K");
}

void Console::close() {
  const std::lock_guard lock(mutex_);
  if (!status_.empty()) target_.write("\r\x1b[K");
  status_.clear();
}

std::string progress_bar(double done, int width) {
  const int inner = width - 2;
  const int filled = static_cast<int>(std::floor(std::clamp(done, 0.0, 1.0) * inner));
  std::string bar(filled, '=');
  if (filled < inner) bar += '>';
  bar.resize(inner, ' ');
  return "[" + bar + "]";
}

}  // namespace moiety::app
