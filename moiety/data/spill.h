// Bytes that are collected in order and read back once, at the end, in bounded memory: those that
// do not fit a buffer lie in a file without a name, which is gone with the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace moiety::data {

class Spill {
 public:
  // `path` is the name that the file has while it is made. Failures of the disk are IoErrors with it.
  explicit Spill(std::string path) : path_(std::move(path)) {}
  ~Spill();
  Spill(const Spill&) = delete;
  Spill& operator=(const Spill&) = delete;

  void append(const void* data, size_t bytes);
  // The checksum of all bytes so far.
  uint32_t crc32c() const;
  // Hands over all bytes, part by part.
  void read(const std::function<void(const void*, size_t)>& take);

 private:
  void flush();

  std::string path_;
  int fd_ = -1;
  uint64_t in_file_ = 0;
  uint32_t file_crc32c_ = 0;
  std::vector<unsigned char> buffer_;
};

}  // namespace moiety::data
