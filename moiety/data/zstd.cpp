#include <vector>
#include <zstd.h>

#include "moiety/base/error.h"
#include "moiety/data/byte_source.h"

namespace moiety::data {
namespace {

class ZstdSource : public ByteSource {
 public:
  ZstdSource(std::unique_ptr<ByteSource> compressed, std::string path)
      : compressed_(std::move(compressed)),
        path_(std::move(path)),
        stream_(ZSTD_createDStream()),
        input_(ZSTD_DStreamInSize()) {
    if (stream_ == nullptr) throw MemoryError("{}: zstd could not start", path_);
  }
  ~ZstdSource() override { ZSTD_freeDStream(stream_); }

  size_t read(char* to, size_t bytes) override {
    ZSTD_outBuffer out{to, bytes, 0};
    while (out.pos == 0) {
      if (in_.pos == in_.size && !is_full_) {
        in_ = {input_.data(), compressed_->read(input_.data(), input_.size()), 0};
        if (in_.size == 0) {
          if (in_frame_) throw DataError("{}: the zstd stream is cut off", path_);
          return 0;
        }
      }
      const size_t left = ZSTD_decompressStream(stream_, &out, &in_);
      if (ZSTD_isError(left)) {
        throw DataError("{}: the zstd stream is damaged: {}", path_, ZSTD_getErrorName(left));
      }
      in_frame_ = left > 0;
      is_full_ = in_frame_ && out.pos == bytes;  // there may be more without more input
    }
    return out.pos;
  }

 private:
  std::unique_ptr<ByteSource> compressed_;
  std::string path_;
  ZSTD_DStream* stream_;
  std::vector<char> input_;
  ZSTD_inBuffer in_{};
  bool in_frame_ = false;
  bool is_full_ = false;  // the last read filled its place
};

}  // namespace

std::unique_ptr<ByteSource> open_zstd(std::unique_ptr<ByteSource> compressed, std::string path) {
  return std::make_unique<ZstdSource>(std::move(compressed), std::move(path));
}

std::string zstd_library() { return std::string("zstd ") + ZSTD_versionString(); }

}  // namespace moiety::data
