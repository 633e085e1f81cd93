// Arrays in NumPy's .npy files (format versions 1.0 to 3.0): C order, little-endian, of the element
// types below. Files are not trusted; a reader of ours takes nothing that NumPy would not write.
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
  int64_t bytes = 0;   // of the elements
  int64_t offset = 0;  // of the first element in the file

  // "'<f4' [4, 128]"
  std::string describe() const;
};
// `start` is the beginning of a file, with at least its header if that is at most 64 KiB long.
// Throws DataError naming `path` for what is no such header.
NpyHeader parse_npy_header(const std::string& path, std::string_view start);

struct NpyArray {
  NpyHeader header;
  Buffer data;
};
// Throws DataError if the file cannot be read, has another header or another length than its header
// says, and an Error if there is no memory for it.
NpyArray read_npy(const std::string& path);

// What stands before the elements.
std::string npy_header(std::string_view descr, std::span<const int64_t> shape);

}  // namespace moiety::app
