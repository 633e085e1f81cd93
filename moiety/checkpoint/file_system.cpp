#include "moiety/checkpoint/file_system.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <memory>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "moiety/base/buffer.h"
#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/checkpoint/checkpoint_error.h"

namespace moiety::checkpoint {
namespace {

template <class Call>
auto without_interrupts(Call&& call) {
  for (;;) {
    const auto result = call();
    if (result >= 0) return result;
    if (errno != EINTR) return static_cast<decltype(result)>(-errno);
  }
}

constexpr int kNoFile = -ENOTSUP;  // what is opened is no file

class Posix : public FileSystem {
 public:
  int open(const std::string& path, int flags) override {
    // Opening a FIFO would wait for its other end.
    const int fd = without_interrupts(
        [&] { return ::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0666); });
    struct stat status {};
    if (fd < 0 ||
        (::fstat(fd, &status) == 0 && (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode)))) {
      return fd;
    }
    ::close(fd);
    return kNoFile;
  }
  // The descriptor is gone whatever close says, so an interrupted call is not repeated.
  int close(int fd) override { return ::close(fd) < 0 && errno != EINTR ? -errno : 0; }
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    return without_interrupts([&] { return ::pread(fd, data, bytes, offset); });
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    return without_interrupts([&] { return ::pwrite(fd, data, bytes, offset); });
  }
  int fallocate(int fd, off_t bytes) override {
    int result = EINTR;
    while (result == EINTR) result = ::posix_fallocate(fd, 0, bytes);
    return -result;
  }
  int fdatasync(int fd) override {
    return without_interrupts([&] { return ::fdatasync(fd); });
  }
  int fsync(int fd) override {
    return without_interrupts([&] { return ::fsync(fd); });
  }
  int mkdir(const std::string& path) override {
    return without_interrupts([&] { return ::mkdir(path.c_str(), 0777); });
  }
  int rename(const std::string& from, const std::string& to) override {
    return without_interrupts([&] { return ::rename(from.c_str(), to.c_str()); });
  }
  int unlink(const std::string& path) override {
    return without_interrupts([&] { return ::unlink(path.c_str()); });
  }
  int rmdir(const std::string& path) override {
    return without_interrupts([&] { return ::rmdir(path.c_str()); });
  }
  int size(const std::string& path, uint64_t& bytes) override {
    struct stat status;
    if (::stat(path.c_str(), &status) < 0) return -errno;
    bytes = static_cast<uint64_t>(status.st_size);
    return 0;
  }
  int list(const std::string& path, std::vector<std::string>& names) override {
    struct Close {
      void operator()(DIR* d) const { ::closedir(d); }
    };
    const std::unique_ptr<DIR, Close> directory(::opendir(path.c_str()));
    if (!directory) return -errno;
    for (;;) {
      errno = 0;
      const dirent* entry = ::readdir(directory.get());
      if (!entry) return -errno;
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
  }
  void write_back(int fd, off_t offset, off_t bytes) override {
    ::sync_file_range(fd, offset, bytes, SYNC_FILE_RANGE_WRITE);
  }
  void read_ahead(int fd, off_t offset, off_t bytes) override {
    ::posix_fadvise(fd, offset, bytes, POSIX_FADV_WILLNEED);
  }
};

[[noreturn]] void io_error(const char* call, const std::string& path, int64_t negative_errno) {
  fail(ErrorKind::kIo, "{} {}: {}", call, path, std::strerror(static_cast<int>(-negative_errno)));
}

void check(int result, const char* call, const std::string& path) {
  if (result < 0) io_error(call, path, result);
}

// Bytes of one call.
constexpr size_t kTransfer = size_t{16} << 20;

}  // namespace

FileSystem& posix() {
  static Posix files;
  return files;
}

File::File(FileSystem& files, std::string path, int flags)
    : files_(&files), path_(std::move(path)), fd_(files.open(path_, flags)) {
  // Not every file system can bypass its cache.
  if (fd_ == -EINVAL && (flags & O_DIRECT)) fd_ = files.open(path_, flags & ~O_DIRECT);
  if (fd_ == kNoFile) refuse("{} is not a regular file", path_);
  check(fd_, "open", path_);
}

File::~File() {
  if (fd_ >= 0) files_->close(fd_);
}

File::File(File&& other) noexcept
    : files_(other.files_), path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

size_t File::read_some(uint64_t offset, std::span<std::byte> out) const {
  const ssize_t n =
      files_->pread(fd_, out.data(), std::min(out.size(), kTransfer), static_cast<off_t>(offset));
  if (n < 0) io_error("read", path_, n);
  return static_cast<size_t>(n);
}

void File::read(uint64_t offset, std::span<std::byte> out) const {
  for (size_t done = 0; done < out.size();) {
    const size_t n = read_some(offset + done, out.subspan(done));
    if (n == 0) {
      fail(ErrorKind::kIo, "read {}: expected {} bytes at byte {}, got {}", path_, out.size(),
           offset, done);
    }
    done += n;
  }
}

void File::write(uint64_t offset, std::string_view bytes) const {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n =
        files_->pwrite(fd_, bytes.data() + done, std::min(bytes.size() - done, kTransfer),
                       static_cast<off_t>(offset + done));
    if (n <= 0) io_error("write", path_, n < 0 ? n : -EIO);
    done += static_cast<size_t>(n);
  }
}

void File::write_back(uint64_t offset, uint64_t bytes) const {
  files_->write_back(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}
void File::read_ahead(uint64_t offset, uint64_t bytes) const {
  files_->read_ahead(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

void File::allocate(uint64_t bytes) const {
  check(files_->fallocate(fd_, static_cast<off_t>(bytes)), "allocate", path_);
}
void File::sync_data() const { check(files_->fdatasync(fd_), "fdatasync", path_); }
void File::sync() const { check(files_->fsync(fd_), "fsync", path_); }
void File::close() { check(files_->close(std::exchange(fd_, -1)), "close", path_); }

std::optional<uint64_t> size_of(FileSystem& files, const std::string& path) {
  uint64_t bytes = 0;
  const int result = files.size(path, bytes);
  if (result == -ENOENT) return std::nullopt;
  check(result, "stat", path);
  return bytes;
}

std::vector<std::string> list(FileSystem& files, const std::string& path) {
  std::vector<std::string> names;
  const int result = files.list(path, names);
  if (result != -ENOENT) check(result, "list", path);
  std::sort(names.begin(), names.end());
  return names;
}

void make_directory(FileSystem& files, const std::string& path) {
  check(files.mkdir(path), "mkdir", path);
}

void rename(FileSystem& files, const std::string& from, const std::string& to) {
  check(files.rename(from, to), "rename", from + " to " + to);
}

void remove(FileSystem& files, const std::string& path) {
  const int result = files.unlink(path);
  if (result == 0 || result == -ENOENT) return;
  if (result != -EISDIR) io_error("unlink", path, result);
  for (const std::string& name : list(files, path)) {
    check(files.unlink(path + "/" + name), "unlink", path + "/" + name);
  }
  check(files.rmdir(path), "rmdir", path);
}

void sync_directory(FileSystem& files, const std::string& path) {
  File directory(files, path, O_RDONLY | O_DIRECTORY);
  directory.sync();
  directory.close();
}

uint32_t checksum(FileSystem& files, const std::string& path) {
  File file(files, path, O_RDONLY | O_DIRECT);  // needs memory, offset and length aligned
  const uint64_t bytes = size_of(files, path).value_or(0);
  const size_t part = std::min<uint64_t>(kTransfer, (bytes + 4095) / 4096 * 4096);
  const Buffer buffer(static_cast<int64_t>(part), "read-back of a file", 4096);
  uint32_t crc = 0;
  for (uint64_t at = 0; at < bytes;) {
    const size_t n = file.read_some(at, {buffer.data(), part});
    if (n == 0) fail(ErrorKind::kIo, "read {}: expected {} bytes, got {}", path, bytes, at);
    crc = crc32c(buffer.data(), n, crc);
    at += n;
  }
  file.close();
  return crc;
}

std::string read_text(FileSystem& files, const std::string& path, uint64_t limit) {
  const auto bytes = size_of(files, path);
  if (!bytes) refuse("{} is missing", path);
  if (*bytes > limit) refuse("{} has {} bytes, at most {} are read", path, *bytes, limit);
  std::string out(*bytes, '\0');
  File(files, path, O_RDONLY).read(0, std::as_writable_bytes(std::span(out)));
  return out;
}

void write_text(FileSystem& files, const std::string& path, std::string_view bytes) {
  File file(files, path, O_WRONLY | O_CREAT | O_TRUNC);
  file.write(0, bytes);
  file.sync();
  file.close();
}

}  // namespace moiety::checkpoint
