// The objects that the process of rank 0 holds while a run lasts: the locked directory, the
// console, the log that goes to both, and the reporter. The other processes of a run have none of
// them.
#pragma once

#include "apps/moiety/config/options.h"
#include "apps/moiety/report/console.h"
#include "apps/moiety/report/reporter.h"
#include "apps/moiety/report/run_directory.h"

namespace moiety::app {

class RunFiles {
 public:
  // Log lines go to the console and to log.txt during the lifetime of this object.
  RunFiles(const Config& config, int64_t steps, bool quiet)
      : directory(config.options.run.dir),
        console(Console::standard_error(quiet ? "off" : config.options.log.progress,
                                        config.options.log.color)),
        reporter(config, steps, directory, console) {
    set_log_sink([this](LogLevel level, std::string_view line) {
      console.line(level, line);
      directory.log().add(line);
    });
  }
  ~RunFiles() { set_log_sink({}); }
  RunFiles(const RunFiles&) = delete;
  RunFiles& operator=(const RunFiles&) = delete;

  RunDirectory directory;
  Console console;
  Reporter reporter;
};

}  // namespace moiety::app
