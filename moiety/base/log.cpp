#include "moiety/base/log.h"

#include <atomic>
#include <cstdio>
#include <mutex>

namespace moiety {
namespace {

thread_local int t_rank = -1;
std::atomic<LogLevel> g_level{LogLevel::kInfo};
std::mutex g_mutex;
LogSink g_sink;

}  // namespace

void set_log_rank(int rank) { t_rank = rank; }
int log_rank() { return t_rank; }
void set_log_level(LogLevel level) { g_level = level; }

void set_log_sink(LogSink sink) {
  const std::lock_guard lock(g_mutex);
  g_sink = std::move(sink);
}

void log_line(LogLevel level, std::string_view message) {
  if (level < g_level.load(std::memory_order_relaxed)) return;
  std::string line;
  if (level == LogLevel::kWarning) line = "warning: ";
  if (level == LogLevel::kError) line = "error: ";
  if (t_rank >= 0) line += "[rank " + std::to_string(t_rank) + "] ";
  line += message;
  const std::lock_guard lock(g_mutex);
  if (g_sink) {
    g_sink(level, line);
  } else {
    line += '\n';
    std::fwrite(line.data(), 1, line.size(), stderr);
  }
}

}  // namespace moiety
