// safetensors files (https://github.com/huggingface/safetensors): a u64 length, a JSON header with
// type, shape and position of every tensor, and the tensors' bytes.
//
// Files are not trusted. A CheckpointError with file, byte offset and values refuses: a header that
// does not fit the file, is over 100,000,000 bytes, not UTF-8, not an object, nested deeper than 8,
// or followed by text; duplicate keys; missing or unknown fields; unknown types; more than 8
// dimensions; numbers that are negative, fractional or beyond 2^63-1; sizes that overflow, are not
// whole bytes or differ from the position; overlaps, holes, bytes behind the last tensor; names
// that are empty, over 4096 bytes or hold control characters. Files are read with pread, never
// mmap: a file that is cut while it is mapped would kill the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/base/dtype.h"
#include "moiety/checkpoint/file_system.h"

namespace moiety::checkpoint {

// An element type of the format; some have no counterpart in DType.
struct StoredType {
  const char* name;
  int bits;
  std::optional<DType> dtype;
};
const StoredType* find_stored_type(std::string_view name);
// Throws Error(InvalidArgument) if the format has no such type.
const StoredType& stored_type(DType dtype);

struct Entry {
  std::string name;
  const StoredType* type = nullptr;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes, relative to the data
};

using Metadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<Entry> entries;  // in the order of the data
  Metadata metadata;
};

// The header in a JSON text, whose file (named in errors) holds `data_bytes` bytes of data.
SafetensorsHeader parse_header(const std::string& file, std::string_view json, uint64_t data_bytes);

// The first bytes of a file whose tensors follow in the order of `entries`: length, JSON, and
// spaces up to a multiple of 64.
std::string encode_header(std::span<const Entry> entries, const Metadata& metadata);

class SafetensorsReader {
 public:
  static SafetensorsReader open(const std::string& path, FileSystem& files = posix());

  std::span<const Entry> entries() const { return header_.entries; }
  const Metadata& metadata() const { return header_.metadata; }
  const std::string& path() const { return file_.path(); }
  uint64_t bytes() const { return data_begin_ + data_bytes_; }
  uint32_t header_crc32c() const { return header_crc32c_; }  // of all bytes before the data

  // Reads bytes [begin, begin + out.size()) of the data.
  void read(uint64_t begin, std::span<std::byte> out) const;
  // A hint that these bytes of the data will be read.
  void read_ahead(uint64_t begin, uint64_t bytes) const {
    file_.read_ahead(data_begin_ + begin, bytes);
  }

 private:
  SafetensorsReader(File file, SafetensorsHeader header, uint32_t header_crc32c,
                    uint64_t data_begin, uint64_t data_bytes);

  File file_;
  SafetensorsHeader header_;
  uint32_t header_crc32c_;
  uint64_t data_begin_, data_bytes_;
};

}  // namespace moiety::checkpoint
