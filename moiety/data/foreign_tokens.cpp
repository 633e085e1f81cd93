#include "moiety/data/foreign_tokens.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "moiety/base/error.h"

namespace moiety::data {
namespace {

namespace fs = std::filesystem;

constexpr size_t kReadIds = size_t{1} << 18;

// A file that is read from its start to its end; `of` names what is missing if it is cut off.
class Input {
 public:
  explicit Input(std::string path) : path_(std::move(path)), file_(path_, std::ios::binary) {
    std::error_code error;
    bytes_ = fs::is_regular_file(path_, error) ? fs::file_size(path_, error) : 0;
    if (!file_ || error || bytes_ == 0) throw DataError("{}: cannot be read", path_);
  }
  const std::string& path() const { return path_; }
  uint64_t bytes() const { return bytes_; }

  void read(void* to, size_t bytes, const char* of) {
    file_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
    if (static_cast<size_t>(file_.gcount()) == bytes) return;
    throw DataError("{}: {} bytes, cut off in {}", path_, bytes_, of);
  }
  template <class T>
  T value(const char* of) {
    T out;
    read(&out, sizeof(T), of);
    return out;
  }
  // `count` values; the file must have them, so that a wrong count takes no memory.
  template <class T>
  std::vector<T> list(uint64_t count, const char* of) {
    if (count > bytes_ / sizeof(T)) {
      throw DataError("{}: {} bytes, cut off in {}: there should be {}", path_, bytes_, of, count);
    }
    std::vector<T> out(count);
    read(out.data(), count * sizeof(T), of);
    return out;
  }
  void seek(uint64_t at) { file_.seekg(static_cast<std::streamoff>(at)); }

 private:
  std::string path_;
  std::ifstream file_;
  uint64_t bytes_ = 0;
};

// Appends `count` ids that are stored as `width` bytes each. Those of one byte are unsigned, and
// negative ones of others are too large.
void read_ids(Input& file, size_t count, size_t width, uint32_t vocab, std::vector<uint32_t>& ids) {
  std::vector<unsigned char> bytes(std::min(count, kReadIds) * width);
  while (count > 0) {
    const size_t n = std::min(count, kReadIds);
    file.read(bytes.data(), n * width, "its tokens");
    for (size_t i = 0; i < n; ++i) {
      uint64_t id = 0;
      std::memcpy(&id, &bytes[i * width], width);
      if (id >= vocab) {
        throw DataError("{}: an id is {}, the vocabulary of --tokenizer has {}", file.path(), id,
                        vocab);
      }
      ids.push_back(static_cast<uint32_t>(id));
    }
    count -= n;
  }
}

void read_llmc(const std::string& path, uint32_t separator, uint32_t vocab,
               const std::function<void(std::span<const uint32_t>)>& add) {
  Input file(path);
  const auto header = file.list<int32_t>(256, "its header");
  const size_t width = header[0] == 20240520 ? 2 : header[0] == 20240801 ? 4 : 0;
  if (width == 0) throw DataError("{}: no token file of llm.c: its magic is {}", path, header[0]);
  const auto count = static_cast<uint64_t>(static_cast<uint32_t>(header[2]));
  const uint64_t expected = 1024 + count * width;
  if (file.bytes() != expected) {
    throw DataError("{}: {} bytes, its header says {}", path, file.bytes(), expected);
  }
  std::vector<uint32_t> document;
  for (uint64_t left = count; left > 0;) {
    const size_t n = std::min<uint64_t>(left, kReadIds), old = document.size();
    read_ids(file, n, width, vocab, document);
    size_t begin = 0;
    for (size_t i = std::max<size_t>(old, 1); i < document.size(); ++i) {
      if (document[i] != separator) continue;
      add(std::span(document).subspan(begin, i - begin));
      begin = i;
    }
    document.erase(document.begin(), document.begin() + static_cast<ptrdiff_t>(begin));
    left -= n;
  }
  if (!document.empty()) add(document);
}

// The files of a data set, of which one is named.
std::pair<std::string, std::string> megatron_files(const std::string& path) {
  const fs::path named(path);
  const bool is_one = named.extension() == ".bin" || named.extension() == ".idx";
  const std::string prefix = is_one ? (named.parent_path() / named.stem()).string() : path;
  return {prefix + ".idx", prefix + ".bin"};
}

void read_megatron(const std::string& path, uint32_t vocab,
                   const std::function<void(std::span<const uint32_t>)>& add) {
  const auto [index_path, bin_path] = megatron_files(path);
  Input index(index_path), bin(bin_path);
  std::array<char, 9> magic{};
  index.read(magic.data(), magic.size(), "its magic");
  if (std::memcmp(magic.data(), "MMIDIDX\0\0", magic.size()) != 0) {
    throw DataError("{}: no index of Megatron-LM: it does not begin with MMIDIDX", index_path);
  }
  const auto version = index.value<uint64_t>("its header");
  const auto type = index.value<uint8_t>("its header");
  constexpr std::array<size_t, 9> kWidths{0, 1, 1, 2, 4, 8, 0, 0, 2};
  const size_t width = type < kWidths.size() ? kWidths[type] : 0;
  if (version != 1 || width == 0) {
    throw DataError("{}: version {} with ids of type {}; read is version 1 with integers",
                    index_path, version, type);
  }
  const auto sequences = index.value<uint64_t>("its header");
  const auto borders = index.value<uint64_t>("its header");
  const auto lengths = index.list<int32_t>(sequences, "its lengths");
  const auto places = index.list<int64_t>(sequences, "its places");
  const auto documents = index.list<int64_t>(borders, "its documents");
  std::vector<uint32_t> ids;
  for (size_t d = 0; d + 1 < documents.size(); ++d) {
    const int64_t begin = documents[d], end = documents[d + 1];
    if (begin < 0 || begin > end || static_cast<uint64_t>(end) > sequences) {
      throw DataError("{}: document {} has sequences {} to {} of {}", index_path, d, begin, end,
                      sequences);
    }
    ids.clear();
    for (int64_t s = begin; s < end; ++s) {
      const int64_t at = places[static_cast<size_t>(s)], n = lengths[static_cast<size_t>(s)];
      const auto room = static_cast<int64_t>(bin.bytes());
      if (n < 0 || at < 0 || at > room || n > (room - at) / static_cast<int64_t>(width)) {
        throw DataError("{}: sequence {} is {} ids at byte {} of {}", index_path, s, n, at, room);
      }
      bin.seek(static_cast<uint64_t>(at));
      read_ids(bin, static_cast<size_t>(n), width, vocab, ids);
    }
    if (!ids.empty()) add(ids);
  }
}

}  // namespace

void read_foreign_tokens(ForeignTokens kind, const std::string& path, uint32_t separator,
                         uint32_t vocab,
                         const std::function<void(std::span<const uint32_t>)>& add) {
  if (kind == ForeignTokens::kLlmc) return read_llmc(path, separator, vocab, add);
  read_megatron(path, vocab, add);
}

}  // namespace moiety::data
