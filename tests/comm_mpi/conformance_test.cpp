// Ranks as processes: the conformance suite of communicators.
#include "tests/comm/conformance.h"

#include "tests/support/mpi/world.h"

namespace moiety::comm::conformance {
INSTANTIATE_TYPED_TEST_SUITE_P(Mpi, Conformance, testing::MpiBackend);
}  // namespace moiety::comm::conformance
