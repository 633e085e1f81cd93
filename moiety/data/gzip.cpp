#include <vector>
#include <zlib.h>

#include "moiety/base/error.h"
#include "moiety/data/byte_source.h"

namespace moiety::data {
namespace {

constexpr int kGzipWindow = 15 + 16;  // zlib's code for the largest window with gzip framing

class GzipSource : public ByteSource {
 public:
  GzipSource(std::unique_ptr<ByteSource> compressed, std::string path)
      : compressed_(std::move(compressed)), path_(std::move(path)), input_(1 << 16) {
    if (inflateInit2(&stream_, kGzipWindow) != Z_OK) {
      throw MemoryError("{}: zlib could not start", path_);
    }
  }
  ~GzipSource() override { inflateEnd(&stream_); }

  size_t read(char* to, size_t bytes) override {
    stream_.next_out = reinterpret_cast<Bytef*>(to);
    stream_.avail_out = static_cast<uInt>(bytes);
    while (stream_.avail_out == bytes) {
      if (stream_.avail_in == 0) {
        stream_.next_in = reinterpret_cast<Bytef*>(input_.data());
        stream_.avail_in = static_cast<uInt>(compressed_->read(input_.data(), input_.size()));
        if (stream_.avail_in == 0) {
          if (in_member_) throw DataError("{}: the gzip stream is cut off", path_);
          return 0;
        }
      }
      if (!in_member_) {
        inflateReset(&stream_);
        in_member_ = true;
      }
      const int status = inflate(&stream_, Z_NO_FLUSH);
      if (status == Z_STREAM_END) {
        in_member_ = false;
      } else if (status != Z_OK && status != Z_BUF_ERROR) {
        throw DataError("{}: the gzip stream is damaged: {}", path_,
                        stream_.msg != nullptr ? stream_.msg : "unknown reason");
      }
    }
    return bytes - stream_.avail_out;
  }

 private:
  std::unique_ptr<ByteSource> compressed_;
  std::string path_;
  std::vector<char> input_;
  z_stream stream_{};
  bool in_member_ = false;
};

}  // namespace

std::unique_ptr<ByteSource> open_gzip(std::unique_ptr<ByteSource> compressed, std::string path) {
  return std::make_unique<GzipSource>(std::move(compressed), std::move(path));
}

std::string gzip_library() { return std::string("zlib ") + zlibVersion(); }

}  // namespace moiety::data
