#include "apps/moiety/report/run_directory.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <sys/file.h>
#include <unistd.h>

#include "moiety/base/error.h"
#include "moiety/base/log.h"

namespace moiety::app {
namespace fs = std::filesystem;
namespace {

fs::path created(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) throw IoError("{}: cannot create the directory: {}", path.string(), error.message());
  return path;
}

fs::path config_path(const fs::path& directory, int number) {
  return directory / (number == 1 ? "config.toml" : text("config.{}.toml", number));
}

bool same_values(const fs::path& file, const Options& options) {
  try {
    const Config saved = load_config(std::vector{file.string()}, {});
    for (const Key& key : option_keys()) {
      if (value_text(key, saved.options) != value_text(key, options)) return false;
    }
    return true;
  } catch (const UsageError&) {
    return false;  // another version wrote it
  }
}

}  // namespace

RecordFile::RecordFile(const fs::path& path) : path_(path.string()) {
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) throw IoError("{}: cannot open: {}", path_, std::strerror(errno));
}

RecordFile::~RecordFile() {
  ::close(fd_);
  if (lost_ > 1) log(LogLevel::kWarning, "{}: {} records could not be written", path_, lost_);
}

void RecordFile::add(std::string_view record) {
  const std::lock_guard lock(mutex_);
  const ssize_t written = ::write(fd_, record.data(), record.size());
  if (written == ssize_t(record.size())) return;
  std::string why = written < 0 ? std::strerror(errno) : "no space left";
  if (written > 0 && ::ftruncate(fd_, ::lseek(fd_, 0, SEEK_END) - written) != 0) {
    why += "; a part of it stays";
  }
  if (lost_++ > 0) return;
  // The log is not used, since it may be this file.
  std::fprintf(stderr, "warning: %s: a record could not be written: %s\n", path_.c_str(),
               why.c_str());
}

LineFile::LineFile(const fs::path& path) : file_(path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (in.tellg() <= 0) return;
  in.seekg(-1, std::ios::end);
  if (in.get() != '\n') file_.add("\n");  // the machine stopped while a line was written
}

DirectoryLock::DirectoryLock(const fs::path& directory) {
  const std::string path = (directory / "lock").string();
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) throw IoError("{}: cannot open: {}", path, std::strerror(errno));
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    char pid[32] = "";
    const ssize_t n = ::pread(fd_, pid, sizeof(pid) - 1, 0);
    ::close(fd_);
    if (error != EWOULDBLOCK) throw IoError("{}: cannot lock: {}", path, std::strerror(error));
    throw UsageError("{}: another `moiety train` uses this run directory (process {})",
                     directory.string(), n > 0 ? std::string(pid, n) : "unknown");
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, pid.data(), pid.size(), 0) < 0) {
    log(LogLevel::kWarning, "{}: cannot write: {}", path, std::strerror(errno));
  }
}

DirectoryLock::~DirectoryLock() { ::close(fd_); }

RunDirectory::RunDirectory(const fs::path& path)
    : path_(created(path)),
      lock_(path_),
      log_(path_ / "log.txt"),
      metrics_(path_ / "metrics.jsonl") {}

void RunDirectory::write_config(const Config& config) {
  int number = 1;
  while (fs::exists(config_path(path_, number))) ++number;
  if (number > 1 && same_values(config_path(path_, number - 1), config.options)) return;
  std::ofstream file(config_path(path_, number));
  file << print_config(config) << std::flush;
  if (!file) throw IoError("{}: cannot be written", config_path(path_, number).string());
}

}  // namespace moiety::app
