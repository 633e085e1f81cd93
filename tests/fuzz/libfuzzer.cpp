// The entry of libFuzzer, for the target MOIETY_FUZZ_TARGET (see CMakeLists.txt).
#ifdef MOIETY_FUZZ_TARGET
#include <cstddef>
#include <cstdint>

#include "moiety/moe/router.h"
#include "tests/fuzz/targets.h"

// The router's own check is left out with what it would bring along: the model's has the same
// bounds.
void moiety::moe::check(const RouterConfig&) {}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moiety::fuzz::MOIETY_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}
#endif
