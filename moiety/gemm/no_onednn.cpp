// Products by oneDNN in builds without oneDNN: there are none.
#include "moiety/base/error.h"
#include "moiety/gemm/gemm_block.h"

namespace moiety::gemm {

bool onednn_available(DType) { return false; }
std::string onednn_version() { return {}; }

void block_gemm_onednn(const Product&) {
  fail(ErrorKind::kUnsupported, "gemm: this build has no oneDNN");
}

}  // namespace moiety::gemm
