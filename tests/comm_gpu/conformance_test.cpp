// The contract of every transport, among ranks on a GPU: operands in and out of attached buffers,
// sums by reading peers and by copies.
#include "moiety/base/gpu.h"
#include "tests/comm_gpu/gpu_place.h"

namespace moiety::comm::conformance {
namespace {

template <bool shared, bool beside_compute>
struct GpuBackend {
  using Place = GpuPlace;
  static void run(int ranks, Seconds, const std::function<void(Communicator&)>& body) {
    if (gpu_status().count == 0) GTEST_SKIP() << gpu_status().text;
    // So little staging that larger operands take several chunks.
    run_gpu_ranks(ranks, Seconds(10), shared,
                  {.staging_bytes = 1 << 20, .beside_compute = beside_compute}, body);
  }
};

using GpuBackends = ::testing::Types<GpuBackend<false, false>, GpuBackend<true, false>,
                                     GpuBackend<false, true>, GpuBackend<true, true>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Gpu, Conformance, GpuBackends);

}  // namespace
}  // namespace moiety::comm::conformance
