// The bytes of an input of `prepare`: a file or standard input, decompressed if it is gzip (.gz,
// .dz) or zstd (.zst), which are recognized by their first bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace moiety::data {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Reads up to `bytes` bytes; returns 0 only at the end. DataError names the file.
  virtual size_t read(char* to, size_t bytes) = 0;
};

// Opens an input; "-" is standard input. A file that cannot be opened is a DataError.
std::unique_ptr<ByteSource> open_bytes(const std::string& path);

// Decompresses all members of a file one after the other; a cut or damaged stream is a DataError.
// It is in gzip.cpp (zlib), or in no_gzip.cpp where zlib was not found: a DataError that says so.
std::unique_ptr<ByteSource> open_gzip(std::unique_ptr<ByteSource> compressed, std::string path);

// The same of the frames of a zstd file: zstd.cpp or no_zstd.cpp.
std::unique_ptr<ByteSource> open_zstd(std::unique_ptr<ByteSource> compressed, std::string path);

// The libraries that decompress, with their versions; empty in a build without them.
std::string gzip_library();
std::string zstd_library();

}  // namespace moiety::data
