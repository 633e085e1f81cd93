#include "moiety/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fcntl.h>
#include <utility>

#include "moiety/base/crc32c.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/json.h"

namespace moiety::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little endian");

constexpr uint64_t kLongestHeader = 100'000'000;
constexpr int kDeepest = 8;
constexpr size_t kMostDimensions = 8;
constexpr const char* kMetadata = "__metadata__";

constexpr std::array<StoredType, 17> kTypes{{
    {"F64", 64, DType::kFloat64},
    {"I64", 64, DType::kInt64},
    {"U64", 64, DType::kUInt64},
    {"F32", 32, DType::kFloat32},
    {"I32", 32, DType::kInt32},
    {"U32", 32, DType::kUInt32},
    {"F16", 16, DType::kFloat16},
    {"BF16", 16, DType::kBFloat16},
    {"I16", 16, std::nullopt},
    {"U16", 16, std::nullopt},
    {"I8", 8, std::nullopt},
    {"U8", 8, DType::kUInt8},
    {"BOOL", 8, std::nullopt},
    {"F8_E4M3", 8, DType::kE4M3},
    {"F8_E5M2", 8, DType::kE5M2},
    {"F8_E8M0", 8, DType::kUE8M0},
    {"F4", 4, DType::kE2M1},
}};

// The bytes of a tensor, with every multiplication checked.
uint64_t checked_bytes(const JsonDocument& json, const JsonValue& at, const Entry& entry) {
  int64_t n = entry.type->bits;
  for (const int64_t size : entry.shape) {
    if (__builtin_mul_overflow(n, size, &n)) json.refuse(at, "the size of the shape overflows");
  }
  if (n % 8 != 0) json.refuse(at, text("{} bits are not whole bytes", n));
  return static_cast<uint64_t>(n / 8);
}

Entry parse_entry(const JsonDocument& json, const std::string& name, const JsonValue& v,
                  uint64_t data_bytes) {
  Entry entry;
  entry.name = name;
  if (const char* fault = name_fault(name)) json.refuse(v, fault);
  for (const auto& [field, value] : json.object(v)) {
    if (field != "dtype" && field != "shape" && field != "data_offsets") {
      json.refuse(value, text("{}: unknown field {}", json_string(name), json_string(field)));
    }
  }
  const JsonValue& type = json.member(v, "dtype");
  entry.type = find_stored_type(json.string(type));
  if (!entry.type) json.refuse(type, "unknown dtype " + json_string(json.string(type)));

  const JsonValue& shape = json.member(v, "shape");
  for (const JsonValue& size : json.array(shape)) entry.shape.push_back(json.integer(size));
  if (entry.shape.size() > kMostDimensions) {
    json.refuse(shape, text("{} dimensions, at most 8 are allowed", entry.shape.size()));
  }
  const JsonValue& offsets = json.member(v, "data_offsets");
  if (json.array(offsets).size() != 2) json.refuse(offsets, "data_offsets are not two numbers");
  entry.begin = static_cast<uint64_t>(json.integer(json.array(offsets)[0]));
  entry.end = static_cast<uint64_t>(json.integer(json.array(offsets)[1]));
  if (entry.begin > entry.end || entry.end > data_bytes) {
    json.refuse(offsets, text("{}: data_offsets [{}, {}) do not fit {} bytes of data",
                              json_string(name), entry.begin, entry.end, data_bytes));
  }
  const uint64_t bytes = checked_bytes(json, shape, entry);
  if (bytes != entry.end - entry.begin) {
    json.refuse(offsets,
                text("{}: data_offsets [{}, {}) hold {} bytes, the shape needs {}",
                     json_string(name), entry.begin, entry.end, entry.end - entry.begin, bytes));
  }
  return entry;
}

// Checks that the entries, in the order of their data, fill it without overlap or hole.
void check_layout(const std::string& file, std::span<const Entry> entries, uint64_t data_bytes) {
  uint64_t at = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != at) {
      refuse("{}: {} begins at byte {} of the data, {} byte {}", file, json_string(entry.name),
             entry.begin, entry.begin < at ? "overlapping what ends at" : "leaving a hole from",
             at);
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    refuse("{}: the tensors end at byte {} of the data, which has {}", file, at, data_bytes);
  }
}

}  // namespace

const StoredType* find_stored_type(std::string_view name) {
  for (const StoredType& t : kTypes) {
    if (name == t.name) return &t;
  }
  return nullptr;
}

const StoredType& stored_type(DType dtype) {
  for (const StoredType& t : kTypes) {
    if (t.dtype == dtype) return t;
  }
  fail(ErrorKind::kInvalidArgument, "safetensors: no type for {}", name(dtype));
}

SafetensorsHeader parse_header(const std::string& file, std::string_view text,
                               uint64_t data_bytes) {
  const JsonDocument json(file, text, kDeepest, sizeof(uint64_t));
  if (!text.starts_with('{')) json.refuse(size_t{0}, "the header does not begin with {");
  SafetensorsHeader header;
  for (const auto& [name, value] : json.object(json.root())) {
    if (name == kMetadata) {
      for (const auto& [key, word] : json.object(value)) header.metadata[key] = json.string(word);
    } else {
      header.entries.push_back(parse_entry(json, name, value, data_bytes));
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  check_layout(file, header.entries, data_bytes);
  return header;
}

std::string encode_header(std::span<const Entry> entries, const Metadata& metadata) {
  std::string json = "{";
  const auto separate = [&](char open) {
    if (json.back() != open) json += ',';
  };
  if (!metadata.empty()) {
    json += text("\"{}\":{{", kMetadata);
    for (const auto& [key, word] : metadata) {
      separate('{');
      json += json_string(key) + ":" + json_string(word);
    }
    json += '}';
  }
  for (const Entry& entry : entries) {
    separate('{');
    json += text("{}:{{\"dtype\":\"{}\",\"shape\":[", json_string(entry.name), entry.type->name);
    for (const int64_t size : entry.shape) {
      separate('[');
      json += text("{}", size);
    }
    json += text("],\"data_offsets\":[{},{}]}}", entry.begin, entry.end);
  }
  json += '}';
  const uint64_t length = (json.size() + 8 + 63) / 64 * 64 - 8;
  MOIETY_CHECK(length <= kLongestHeader,
               "safetensors: a header of {} bytes, at most {} are allowed", length, kLongestHeader);
  json.resize(length, ' ');
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + json;
}

SafetensorsReader::SafetensorsReader(File file, SafetensorsHeader header, uint32_t header_crc32c,
                                     uint64_t data_begin, uint64_t data_bytes)
    : file_(std::move(file)),
      header_(std::move(header)),
      header_crc32c_(header_crc32c),
      data_begin_(data_begin),
      data_bytes_(data_bytes) {}

SafetensorsReader SafetensorsReader::open(const std::string& path, FileSystem& files) {
  const auto bytes = size_of(files, path);
  if (!bytes) refuse("{} is missing", path);
  uint64_t length = 0;
  if (*bytes < sizeof length) refuse("{}: byte 0: {} bytes are no safetensors file", path, *bytes);
  File file(files, path, O_RDONLY);
  file.read(0, std::as_writable_bytes(std::span(&length, 1)));
  const uint64_t rest = *bytes - sizeof length;
  if (length > kLongestHeader || length > rest) {
    refuse("{}: byte 0: a header of {} bytes does not fit (at most {}, and {} follow)", path,
           length, kLongestHeader, rest);
  }
  std::string json(length, '\0');
  file.read(sizeof length, std::as_writable_bytes(std::span(json)));
  SafetensorsHeader header = parse_header(path, json, rest - length);
  const uint32_t crc = crc32c(json.data(), json.size(), crc32c(&length, sizeof length));
  return SafetensorsReader(std::move(file), std::move(header), crc, sizeof length + length,
                           rest - length);
}

void SafetensorsReader::read(uint64_t begin, std::span<std::byte> out) const {
  MOIETY_CHECK(begin <= data_bytes_ && out.size() <= data_bytes_ - begin,
               "safetensors: bytes {} + {} are outside of the {} of {}", begin, out.size(),
               data_bytes_, path());
  file_.read(data_begin_ + begin, out);
}

}  // namespace moiety::checkpoint
