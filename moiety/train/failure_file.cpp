#include "moiety/train/failure_file.h"

#include <chrono>
#include <fstream>
#include <unistd.h>

#include "moiety/base/log.h"

namespace moiety::train {

std::string write_failure(const std::filesystem::path& run_directory, std::string_view kind,
                          int rank, int64_t step, const JsonLine& fields) {
  const std::filesystem::path directory = run_directory / "failures";
  const std::filesystem::path path = directory / text("rank{}-step{}.json", rank, step);
  char host[256] = "";
  ::gethostname(host, sizeof(host) - 1);
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  JsonLine json;
  json.add("v", 1)
      .add("t", now.count())
      .add("kind", kind)
      .add("rank", rank)
      .add("step", step)
      .add("process", int64_t(::getpid()))
      .add("host", host)
      .append(fields);
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  std::ofstream file(path);
  file << json.text() << std::endl;
  if (file) return path.string();
  log(LogLevel::kWarning, "{}: cannot be written", path.string());
  return "";
}

}  // namespace moiety::train
