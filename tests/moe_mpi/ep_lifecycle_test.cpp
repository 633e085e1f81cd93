// The life of groups of processes.
#include "tests/moe/ep_lifecycle.h"

#include "tests/moe_mpi/processes.h"

namespace moiety::moe::lifecycle {

using Transports = testing::Types<MappedProcesses, CollectiveProcesses>;
INSTANTIATE_TYPED_TEST_SUITE_P(OnProcesses, EpLifecycle, Transports);

}  // namespace moiety::moe::lifecycle
