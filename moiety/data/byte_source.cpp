#include "moiety/data/byte_source.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>

#include "moiety/base/error.h"

namespace moiety::data {
namespace {

class FileSource : public ByteSource {
 public:
  explicit FileSource(const std::string& path)
      : path_(path == "-" ? "standard input" : path), fd_(path == "-" ? STDIN_FILENO : open(path)) {
    try {
      for (size_t n = 1; n > 0 && head_bytes_ < sizeof(head_); head_bytes_ += n) {
        n = read_file(head_ + head_bytes_, sizeof(head_) - head_bytes_);
      }
    } catch (...) {
      close();
      throw;
    }
  }
  ~FileSource() override { close(); }

  bool is_gzip() const { return head().starts_with("\x1f\x8b"); }
  // A frame, or one that is skipped.
  bool is_zstd() const {
    if (head_bytes_ < 4) return false;
    return head() == "\x28\xb5\x2f\xfd" ||
           (head().substr(1) == "\x2a\x4d\x18" && (head_[0] & 0xf0) == 0x50);
  }

  size_t read(char* to, size_t bytes) override {
    if (head_taken_ == head_bytes_) return read_file(to, bytes);
    const size_t n = std::min(bytes, head_bytes_ - head_taken_);
    std::memcpy(to, head_ + head_taken_, n);
    head_taken_ += n;
    return n;
  }

 private:
  std::string_view head() const { return {head_, head_bytes_}; }
  // A FIFO is read, since a shell's <(...) is one, but no writer is waited for: one without is empty.
  static int open(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) throw DataError("{}: cannot open: {}", path, std::strerror(errno));
    ::fcntl(fd, F_SETFL, 0);
    return fd;
  }
  size_t read_file(char* to, size_t bytes) {
    while (true) {
      const ssize_t n = ::read(fd_, to, bytes);
      if (n >= 0) return static_cast<size_t>(n);
      if (errno != EINTR) throw DataError("{}: cannot read: {}", path_, std::strerror(errno));
    }
  }
  void close() {
    if (fd_ != STDIN_FILENO) ::close(fd_);
  }

  std::string path_;
  int fd_ = -1;
  char head_[4];  // read ahead to recognize gzip and zstd
  size_t head_bytes_ = 0, head_taken_ = 0;
};

}  // namespace

std::unique_ptr<ByteSource> open_bytes(const std::string& path) {
  auto file = std::make_unique<FileSource>(path);
  const std::string name = path == "-" ? "standard input" : path;
  if (file->is_gzip()) return open_gzip(std::move(file), name);
  if (file->is_zstd()) return open_zstd(std::move(file), name);
  return file;
}

}  // namespace moiety::data
