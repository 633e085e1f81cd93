// What a build without NCCL's header has of it.
#include "moiety/comm/nccl/functions.h"

namespace moiety::comm::nccl {

const Functions& functions() {
  static const Functions none = [] {
    Functions f;
    f.text = "Moiety was built without NCCL's header (bash setup.sh --gpu)";
    return f;
  }();
  return none;
}

}  // namespace moiety::comm::nccl
