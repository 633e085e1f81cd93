// The system calls under a checkpoint, as a seam: tests let the n-th call fail, or every call from
// the n-th on, as after a kill.
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

// Each function is one call as POSIX defines it; a failure is returned as the negative errno.
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
  // The size of a file in bytes; links are followed.
  virtual int size(const std::string& path, uint64_t& bytes) = 0;
  // The names in a directory, without "." and "..".
  virtual int list(const std::string& path, std::vector<std::string>& names) = 0;
  // Hints that let the disk work while the caller computes: written bytes shall go to it, bytes
  // that will be read shall come.
  virtual void write_back(int /*fd*/, off_t /*offset*/, off_t /*bytes*/) {}
  virtual void read_ahead(int /*fd*/, off_t /*offset*/, off_t /*bytes*/) {}
};

// The file system of the operating system.
FileSystem& posix();

// Failures of the functions and classes below are Error(kIo) with the call, the path, the offset
// and the system's words.

class File {
 public:
  // Opens a regular file or a directory; anything else is a CheckpointError. O_DIRECT among the
  // flags is only a wish.
  File(FileSystem& files, std::string path, int flags);
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;

  // Fills all of `out`, in as many calls as it takes. A file that ends earlier is an Error(kIo)
  // with the bytes expected and got.
  void read(uint64_t offset, std::span<std::byte> out) const;
  // Reads with one call; returns the bytes read, 0 at the end of the file.
  size_t read_some(uint64_t offset, std::span<std::byte> out) const;
  void write(uint64_t offset, std::string_view bytes) const;
  // Hints, as in FileSystem.
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
// The names in a directory in order; none if there is no such directory.
std::vector<std::string> list(FileSystem& files, const std::string& path);
void make_directory(FileSystem& files, const std::string& path);
void rename(FileSystem& files, const std::string& from, const std::string& to);
// Removes a file, or a directory of files. It is no error if nothing is there.
void remove(FileSystem& files, const std::string& path);
void sync_directory(FileSystem& files, const std::string& path);
// The crc32c of a file, read from the disk and not from the system's cache where that is possible.
uint32_t checksum(FileSystem& files, const std::string& path);
// The contents of a file of at most `limit` bytes. A longer one is a CheckpointError.
std::string read_text(FileSystem& files, const std::string& path, uint64_t limit);
// Writes, syncs and closes a file.
void write_text(FileSystem& files, const std::string& path, std::string_view bytes);

}  // namespace moiety::checkpoint
