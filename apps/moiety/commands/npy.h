// Arrays in NumPy's .npy files (format versions 1.0 to 3.0): C order, little-endian, of the element
// types below. Files are not trusted; this reader accepts only files that NumPy could have written.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/base/buffer.h"

namespace moiety::app {

struct NpyHeader {
  std::string descr;  // '<f4', '<u4', '<u2', '|u1', '<V2' or '|V2' (bfloat16 of ml_dtypes), '|V1'
  std::vector<int64_t> shape;
  int64_t bytes = 0;   // bytes of all elements
  int64_t offset = 0;  // place of the first element in the file

  // The array as text: "'<f4' [4, 128]".
  std::string describe() const;
};
// Parses a header. `start` is the beginning of a file, with at least its header if that is at most
// 64 KiB long. Throws DataError naming `path` if it is no such header.
NpyHeader parse_npy_header(const std::string& path, std::string_view start);

struct NpyArray {
  NpyHeader header;
  Buffer data;
  uint32_t crc32c = 0;  // of the whole file
};
// Reads a file. Throws DataError if it cannot be read, has another header, or another length than
// its header says; and MemoryError if there is no memory for it.
NpyArray read_npy(const std::string& path);

// The bytes before the elements.
std::string npy_header(std::string_view descr, std::span<const int64_t> shape);

}  // namespace moiety::app
