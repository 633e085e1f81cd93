#include "apps/moiety/report/run_directory.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <set>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "apps/moiety/input_file.h"
#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/base/replace_file.h"

namespace moiety::app {
namespace fs = std::filesystem;
namespace {

// Makes the directory and those above it; returns those that were not there, deepest first.
std::vector<fs::path> create(const fs::path& path) {
  std::vector<fs::path> made;
  std::error_code error;
  for (fs::path p = path; !p.empty() && !fs::exists(p, error); p = p.parent_path()) {
    if (p.has_filename()) made.push_back(p);
  }
  fs::create_directories(path, error);
  if (error) throw IoError("{}: cannot create the directory: {}", path.string(), error.message());
  return made;
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
  // A FIFO that nobody reads is an error, not a wait.
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0644);
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

void RecordFile::cut_last_line() {
  struct stat info {};
  if (::fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) return;
  const InputFile file(path_, ErrorKind::kIo);
  int64_t end = file.bytes();
  std::array<char, 4096> part;
  while (end > 0) {
    const int64_t begin = std::max<int64_t>(0, end - int64_t(part.size()));
    file.read(begin, std::as_writable_bytes(std::span(part.data(), size_t(end - begin))));
    const size_t at = std::string_view(part.data(), size_t(end - begin)).rfind('\n');
    end = at == std::string_view::npos ? begin : begin + int64_t(at) + 1;
    if (at != std::string_view::npos) break;
  }
  if (end < file.bytes() && ::ftruncate(fd_, end) != 0) {
    throw IoError("{}: cannot be cut to {} bytes: {}", path_, end, std::strerror(errno));
  }
}

LineFile::LineFile(const fs::path& path) : file_(path) { file_.cut_last_line(); }

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
    : path_(path),
      made_(create(path)),
      lock_(path_),
      log_(path_ / "log.txt"),
      metrics_(path_ / "metrics.jsonl") {}

RunDirectory::~RunDirectory() {
  static constexpr std::array<std::string_view, 3> kOwn{"lock", "log.txt", "metrics.jsonl"};
  std::error_code error;
  // A run that has begun has left a record.
  if (made_.empty() || fs::file_size(path_ / kOwn[2], error) > 0) return;
  for (fs::directory_iterator it(path_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const bool own = std::find(kOwn.begin(), kOwn.end(), name) != kOwn.end();
    if (!own && !(it->path() == checkpoints() && fs::is_empty(it->path(), error))) return;
  }
  for (const std::string_view name : kOwn) fs::remove(path_ / name, error);
  fs::remove(checkpoints(), error);
  for (const fs::path& directory : made_) fs::remove(directory, error);  // if it is empty
}

std::string kept_tokenizer_folder(const std::string& run) {
  return (fs::path(run) / "tokenizer").string();
}

void RunDirectory::keep_tokenizer(std::span<const data::TokenizerFile> files) {
  tokenizer_.assign(files.begin(), files.end());
}

void RunDirectory::write_tokenizer() {
  if (tokenizer_.empty()) return;
  const fs::path folder = kept_tokenizer_folder(path_);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw IoError("{}: cannot create: {}", folder.string(), error.message());
  std::set<std::string> names;
  for (const data::TokenizerFile& file : tokenizer_) {
    replace_file(folder / file.name, file.bytes);
    names.insert(file.name);
  }
  // What an earlier tokenizer left would be taken for a part of this one.
  std::vector<fs::path> old;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (!names.contains(entry.path().filename().string())) old.push_back(entry.path());
  }
  for (const fs::path& path : old) fs::remove(path, error);
}

void RunDirectory::write_config(const Config& config) {
  write_tokenizer();
  int number = 1;
  std::error_code none;
  while (fs::exists(config_path(path_, number), none)) ++number;
  if (number > 1 && same_values(config_path(path_, number - 1), config.options)) return;
  replace_file(config_path(path_, number), print_config(config));
}

}  // namespace moiety::app
