#include "moiety/base/error.h"
#include "moiety/data/byte_source.h"

namespace moiety::data {

std::unique_ptr<ByteSource> open_zstd(std::unique_ptr<ByteSource>, std::string path) {
  throw DataError("{}: zstd input needs a build with zstd (Debian: libzstd-dev); or use unzstd",
                  path);
}

std::string zstd_library() { return {}; }

}  // namespace moiety::data
