// The life of groups of threads.
#include "tests/moe/ep_lifecycle.h"

namespace moiety::moe::lifecycle {

using Transports = testing::Types<Threads, ThreadCollectives>;
INSTANTIATE_TYPED_TEST_SUITE_P(OnThreads, EpLifecycle, Transports);

}  // namespace moiety::moe::lifecycle
