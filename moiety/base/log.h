// Log lines for people, on stderr, each with the rank of the thread that writes it. Results never
// go this way.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "moiety/base/format.h"

namespace moiety {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

// Sets the rank that is named in lines of the calling thread; -1 (the default) names none.
void set_log_rank(int rank);
int log_rank();
// Sets the level below which lines are dropped; at first kInfo.
void set_log_level(LogLevel level);
// The receiver of log lines, which come without a newline; an empty function means stderr. Calls
// are serialized.
using LogSink = std::function<void(LogLevel, std::string_view line)>;
void set_log_sink(LogSink sink);

void log_line(LogLevel level, std::string_view message);

template <class... Args>
void log(LogLevel level, std::string_view format, const Args&... args) {
  log_line(level, text(format, args...));
}

}  // namespace moiety
