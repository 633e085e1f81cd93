// NVTX ranges in builds without CUDA: nobody listens.
#include "moiety/base/trace.h"

namespace moiety::detail {

bool find_range_listener() { return false; }
void push_range(const char*) {}
void pop_range() {}

}  // namespace moiety::detail
