// Files that are read. Only regular files are: a directory has no bytes, and opening a FIFO would
// wait for a writer that may never come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "moiety/base/error.h"

namespace moiety::app {

// A regular file that is open for reading. Failures are errors of the given kind, which name the
// path and, where bytes are missing, the place.
class InputFile {
 public:
  InputFile(std::string path, ErrorKind kind);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  int64_t bytes() const { return bytes_; }  // when it was opened
  // Fills all of `out` from byte `offset` on.
  void read(int64_t offset, std::span<std::byte> out) const;

 private:
  std::string path_;
  ErrorKind kind_;
  int fd_ = -1;
  int64_t bytes_ = 0;
};

// The contents of a regular file of at most `most` bytes.
std::string read_file(const std::string& path, int64_t most, ErrorKind kind);

}  // namespace moiety::app
