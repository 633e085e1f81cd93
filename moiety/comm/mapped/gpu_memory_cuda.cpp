#include <algorithm>
#include <cstring>

#include "moiety/base/cuda_check.cuh"
#include "moiety/base/integer.h"
#include "moiety/comm/agree.h"
#include "moiety/comm/mapped/gpu_memory.h"
#include "moiety/comm/mapped/mapped_range.h"

namespace moiety::comm::mapped {
namespace {

using Range = std::shared_ptr<MappedRange>;

// What a rank tells its peers, which share its addresses.
struct Part {
  int device = 0;
  int64_t granularity = 1;
  Range* range = nullptr;  // of rank 0
};

std::vector<Part> exchange(Bootstrap& bootstrap, const Part& mine) {
  std::vector<Part> out(bootstrap.size());
  const auto all = bootstrap.all_gather({reinterpret_cast<const char*>(&mine), sizeof(mine)});
  for (size_t r = 0; r < out.size(); ++r) std::memcpy(&out[r], all[r].data(), sizeof(Part));
  return out;
}

}  // namespace

std::vector<Memory> share_gpu_memory(Bootstrap& bootstrap, const std::string& what, int64_t bytes,
                                     int device) {
  const int me = bootstrap.rank(), ranks = bootstrap.size();
  const auto step = [&](const std::string& doing, ErrorKind kind, auto&& run) {
    std::string error;
    try {
      run();
    } catch (const Error& e) {
      error = text("{}: rank {} could not {}: {}", what, me, doing, e.what());
    }
    agree(bootstrap, error, kind);
  };
  Part mine;
  mine.device = device;
  step(text("use cuda:{}", device), ErrorKind::kUnsupported,
       [&] { mine.granularity = part_granularity(device); });
  std::vector<int> devices;
  int64_t granularity = 1;
  for (const Part& part : exchange(bootstrap, mine)) {
    granularity = std::max(granularity, part.granularity);
    if (std::find(devices.begin(), devices.end(), part.device) == devices.end()) {
      devices.push_back(part.device);
    }
  }
  const int64_t stride = round_up(std::max<int64_t>(bytes, 1), granularity);
  Range range;
  step("reserve addresses", ErrorKind::kUnsupported, [&] {
    if (me == 0) range = std::make_shared<MappedRange>(ranks, stride);
  });
  // Peers copy the pointer out of this box. It is deleted when all have, and leaked if that cannot
  // be known.
  const auto box = me == 0 ? new Range(range) : nullptr;
  mine.range = box;
  range = *exchange(bootstrap, mine)[0].range;
  agree(bootstrap, "");
  delete box;
  step(text("allocate {} on cuda:{}", bytes_text(stride), device), ErrorKind::kOutOfMemory,
       [&] { range->allocate(me, device); });
  step("map its memory", ErrorKind::kUnsupported, [&] { range->open(me, devices); });
  std::vector<Memory> out;
  for (int r = 0; r < ranks; ++r) out.emplace_back(range, range->part(r));
  return out;
}

std::vector<uint64_t> load_words(int device, const uint64_t* words, int count) {
  const CudaDeviceGuard guard(device);
  std::vector<uint64_t> out(count);
  MOIETY_CUDA_CHECK(cudaMemcpyAsync(out.data(), words, 8 * size_t(count), cudaMemcpyDefault,
                                    cudaStreamPerThread));
  MOIETY_CUDA_CHECK(cudaStreamSynchronize(cudaStreamPerThread));
  return out;
}

void wait_for_gpu(int device) {
  const CudaDeviceGuard guard(device);
  MOIETY_CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace moiety::comm::mapped
