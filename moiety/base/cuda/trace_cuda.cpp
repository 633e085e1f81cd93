#include <nvtx3/nvToolsExt.h>

#include "moiety/base/trace.h"

namespace moiety::detail {
namespace {

// The NVTX domain; null where nobody listens.
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("moiety");
  return handle;
}

}  // namespace

bool find_range_listener() { return domain() != nullptr; }

void push_range(const char* name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &attributes);
}

void pop_range() { nvtxDomainRangePop(domain()); }

}  // namespace moiety::detail
