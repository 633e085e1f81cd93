#include "apps/moiety/commands/npy.h"

#include <algorithm>
#include <charconv>

#include "apps/moiety/exit_code.h"
#include "apps/moiety/input_file.h"
#include "moiety/base/crc32c.h"

namespace moiety::app {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kLongestHeader = 64 << 10;

struct Element {
  std::string_view descr;
  int64_t bytes;
};
constexpr Element kElements[] = {{"<f4", 4}, {"<u4", 4}, {"<u2", 2}, {"|u1", 1},
                                 {"<V2", 2}, {"|V2", 2}, {"|V1", 1}};

int64_t element_bytes(const std::string& path, std::string_view descr) {
  std::string known;
  for (const Element& e : kElements) {
    if (e.descr == descr) return e.bytes;
    known += text("{}{}", known.empty() ? "" : ", ", e.descr);
  }
  throw DataError("{}: its elements are '{}'; known are {}", path, descr, known);
}

// The dictionary of a header, a literal of Python: {'descr': '<f4', 'fortran_order': False,
// 'shape': (3, 4), }.
class Literal {
 public:
  Literal(const std::string& path, std::string_view rest) : path_(path), rest_(rest) {}

  NpyHeader header() {
    NpyHeader out;
    bool seen[3] = {};
    expect('{');
    while (!take('}')) {
      const std::string_view key = string();
      const size_t which = key == "descr" ? 0 : key == "fortran_order" ? 1 : 2;
      if ((which == 2 && key != "shape") || seen[which]) fail();
      seen[which] = true;
      expect(':');
      if (which == 0) out.descr = string();
      if (which == 1) c_order();
      if (which == 2) out.shape = tuple();
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (!rest_.empty() || !seen[0] || !seen[1] || !seen[2]) fail();
    return out;
  }

 private:
  [[noreturn]] void fail() const { throw DataError("{}: its .npy header is damaged", path_); }

  void skip_space() { rest_.remove_prefix(std::min(rest_.find_first_not_of(" \n"), rest_.size())); }
  bool take(char c) {
    skip_space();
    if (rest_.empty() || rest_[0] != c) return false;
    rest_.remove_prefix(1);
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail();
  }
  std::string_view string() {
    const char quote = take('\'') ? '\'' : '"';
    if (quote == '"') expect('"');
    const size_t end = rest_.find(quote);
    if (end == rest_.npos) fail();
    const std::string_view out = rest_.substr(0, end);
    if (out.find_first_of("\\\n") != out.npos) fail();
    rest_.remove_prefix(end + 1);
    return out;
  }
  void c_order() {
    skip_space();
    if (rest_.starts_with("True")) {
      throw DataError("{}: is in Fortran order; numpy.ascontiguousarray() first", path_);
    }
    if (!rest_.starts_with("False")) fail();
    rest_.remove_prefix(5);
  }
  // A tuple: (), (3,), (3, 4).
  std::vector<int64_t> tuple() {
    std::vector<int64_t> out;
    expect('(');
    while (!take(')')) {
      skip_space();
      int64_t n = -1;
      const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), n);
      if (error != std::errc() || n < 0 || rest_[0] == '-') fail();
      rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
      out.push_back(n);
      if (take(',')) continue;
      if (out.size() == 1) fail();  // (3) is a number
      expect(')');
      break;
    }
    return out;
  }

  const std::string& path_;
  std::string_view rest_;
};

}  // namespace

std::string NpyHeader::describe() const {
  std::string sizes;
  for (const int64_t n : shape) sizes += text("{}{}", sizes.empty() ? "" : ", ", n);
  return text("'{}' [{}]", descr, sizes);
}

NpyHeader parse_npy_header(const std::string& path, std::string_view start) {
  if (!start.starts_with(kMagic) || start.size() < 10) {
    throw DataError("{}: is no .npy file", path);
  }
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(start[i]); };
  const int major = byte(6), minor = byte(7);
  if (major < 1 || major > 3 || minor != 0) {
    throw DataError("{}: is of .npy version {}.{}; known are 1.0 to 3.0", path, major, minor);
  }
  // Version 1 has a length of two bytes, the other versions of four.
  const size_t from = major == 1 ? 10 : 12;
  size_t length = byte(8) | size_t{byte(9)} << 8;
  if (major > 1 && start.size() >= 12) length |= size_t{byte(10)} << 16 | size_t{byte(11)} << 24;
  if (start.size() < from || length > std::min(start.size() - from, kLongestHeader)) {
    throw DataError("{}: its .npy header is cut or longer than {} bytes", path, kLongestHeader);
  }
  NpyHeader out = Literal(path, start.substr(from, length)).header();
  out.offset = static_cast<int64_t>(from + length);
  out.bytes = element_bytes(path, out.descr);
  bool fits = true;
  int64_t sizes = 1;  // product of the non-empty dimensions, so that no partial product overflows
  for (const int64_t n : out.shape) {
    fits = fits && !__builtin_mul_overflow(sizes, std::max<int64_t>(n, 1), &sizes);
  }
  if (!fits || sizes > INT64_MAX / 16) throw DataError("{}: has too many elements", path);
  for (const int64_t n : out.shape) out.bytes *= n;
  return out;
}

NpyArray read_npy(const std::string& path) {
  const InputFile file(path, ErrorKind::kData);
  const int64_t bytes = file.bytes();
  std::string start(std::min<size_t>(static_cast<size_t>(bytes), 12 + kLongestHeader), '\0');
  file.read(0, std::as_writable_bytes(std::span(start)));
  NpyArray out{parse_npy_header(path, start), {}, 0};
  if (out.header.bytes != bytes - out.header.offset) {
    throw DataError("{}: is {} bytes long, but {} take {}", path, bytes, out.header.describe(),
                    out.header.offset + out.header.bytes);
  }
  out.data = Buffer(out.header.bytes, path.c_str());
  file.read(out.header.offset, {out.data.data(), static_cast<size_t>(out.header.bytes)});
  out.crc32c = crc32c(start.data(), static_cast<size_t>(out.header.offset));
  out.crc32c = crc32c(out.data.data(), static_cast<size_t>(out.header.bytes), out.crc32c);
  return out;
}

std::string npy_header(std::string_view descr, std::span<const int64_t> shape) {
  std::string sizes;
  for (const int64_t n : shape) sizes += text("{}, ", n);
  if (shape.size() > 1) sizes.resize(sizes.size() - 2);
  if (shape.size() == 1) sizes.pop_back();
  std::string out =
      text("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", descr, sizes);
  // Elements begin at a multiple of 64 bytes.
  out.resize((10 + out.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');
  out += '\n';
  const char length[] = {static_cast<char>(out.size() & 255), static_cast<char>(out.size() >> 8)};
  return std::string(kMagic) + std::string("\1\0", 2) + std::string(length, 2) + out;
}

}  // namespace moiety::app
