// The system calls under a checkpoint, as a seam: the tests let the n-th call fail, or every call
// from the n-th on, as after a kill.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

namespace moiety::checkpoint {

// One call each, as POSIX defines it; a failure is returned as the negative errno.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual int open(const std::string& path, int flags) = 0;
  virtual int close(int fd) = 0;
  virtual ssize_t pread(int fd, void* data, size_t bytes, off_t offset) = 0;
  virtual ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) = 0;
  virtual int fallocate(int fd, off_t bytes) = 0;
  virtual int fdatasync(int fd) = 0;
  virtual int fsync(int fd) = 0;
  virtual int mkdir(const std::string& path) = 0;
  virtual int rename(const std::string& from, const std::string& to) = 0;
  virtual int unlink(const std::string& path) = 0;
  virtual int rmdir(const std::string& path) = 0;
  // Bytes of a file, links followed.
  virtual int size(const std::string& path, uint64_t& bytes) = 0;
  // Names in a directory, without "." and "..".
  virtual int list(const std::string& path, std::vector<std::string>& names) = 0;
  // Hints, so that the disk works while the caller computes: what was written shall go to it, what
  // will be read shall come.
  virtual void write_back(int /*fd*/, off_t /*offset*/, off_t /*bytes*/) {}
  virtual void read_ahead(int /*fd*/, off_t /*offset*/, off_t /*bytes*/) {}
};

// The operating system's.
FileSystem& posix();

// Below, failures are Error(Io) with the call, the path, the offset and the system's words.

class File {
 public:
  // O_DIRECT among the flags is a wish.
  File(FileSystem& files, std::string path, int flags);
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;

  // All of `out`, in as many calls as it takes. A file that ends earlier is an Error(Io) with the
  // bytes expected and got.
  void read(uint64_t offset, std::span<std::byte> out) const;
  // One call's worth; 0 at the end of the file.
  size_t read_some(uint64_t offset, std::span<std::byte> out) const;
  void write(uint64_t offset, std::string_view bytes) const;
  // Hints.
  void write_back(uint64_t offset, uint64_t bytes) const;
  void read_ahead(uint64_t offset, uint64_t bytes) const;
  void allocate(uint64_t bytes) const;
  void sync_data() const;
  void sync() const;
  void close();

  const std::string& path() const { return path_; }

 private:
  FileSystem* files_;
  std::string path_;
  int fd_ = -1;
};

std::optional<uint64_t> size_of(FileSystem& files, const std::string& path);  // empty: no such file
// Names in a directory in order; none if there is no such directory.
std::vector<std::string> list(FileSystem& files, const std::string& path);
void make_directory(FileSystem& files, const std::string& path);
void rename(FileSystem& files, const std::string& from, const std::string& to);
// A file, or a directory of files. Nothing there is no error.
void remove(FileSystem& files, const std::string& path);
void sync_directory(FileSystem& files, const std::string& path);
// crc32c of a file, read from the disk and not from the system's cache where that can be had.
uint32_t checksum(FileSystem& files, const std::string& path);
// A file of at most `limit` bytes. Longer ones are a CheckpointError.
std::string read_text(FileSystem& files, const std::string& path, uint64_t limit);
// Written, fsync, closed.
void write_text(FileSystem& files, const std::string& path, std::string_view bytes);

}  // namespace moiety::checkpoint
