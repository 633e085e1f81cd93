// The tests' own `main` is GoogleTest's, so the environment is set before it.
#include "moiety/comm/gpu_environment.h"

namespace {

[[maybe_unused]] const bool prepared = [] {
  moiety::comm::prepare_gpu_environment();
  return true;
}();

}  // namespace
