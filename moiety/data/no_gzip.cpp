#include "moiety/base/error.h"
#include "moiety/data/byte_source.h"

namespace moiety::data {

std::unique_ptr<ByteSource> open_gzip(std::unique_ptr<ByteSource>, std::string path) {
  throw DataError("{}: gzip input needs a build with zlib (Debian: zlib1g-dev); or use gunzip",
                  path);
}

std::string gzip_library() { return {}; }

}  // namespace moiety::data
