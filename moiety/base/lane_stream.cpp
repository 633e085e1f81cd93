#include "moiety/base/lane_stream.h"

#include "moiety/base/gpu.h"
#include "moiety/base/gpu_runtime.h"

namespace moiety {
namespace {

void* create(Device gpu) {
  require_device("lane", gpu);
  return gpu::create_lane(gpu.index);
}

}  // namespace

LaneStream::LaneStream(Device gpu) : stream_(Stream::external(gpu, create(gpu))) {}

LaneStream::~LaneStream() { gpu::destroy_stream(stream_.device().index, stream_.cuda_stream()); }

}  // namespace moiety
