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

// Makes rank 0's range that of all ranks, which are threads.
Range share_range(Bootstrap& bootstrap, Part mine, Range range) {
  // Peers copy the pointer out of this box. It is deleted when all have, and leaked if that cannot
  // be known.
  const auto box = bootstrap.rank() == 0 ? new Range(std::move(range)) : nullptr;
  mine.range = box;
  Range out = *exchange(bootstrap, mine)[0].range;
  agree(bootstrap, "");
  delete box;
  return out;
}

// Brings the memory of other processes into this one's range.
void take_parts(Bootstrap& bootstrap, const std::string& what, MappedRange& range, int device,
                const std::vector<Nonce>& nonces) {
  const int me = bootstrap.rank();
  Descriptor own;
  agree_on(bootstrap, what, "export its memory", ErrorKind::kUnsupported,
           [&] { own = Descriptor(range.descriptor_of(me)); });
  const std::vector<Descriptor> parts = exchange_descriptors(bootstrap, what, own, nonces);
  for (int r = 0; r < bootstrap.size(); ++r) {
    agree_on(bootstrap, what, text("map rank {}'s memory for cuda:{}", r, device),
             ErrorKind::kUnsupported, [&] {
               if (r != me) range.take(r, parts[r].get(), device);
             });
  }
}

}  // namespace

std::vector<Memory> share_gpu_memory(Bootstrap& bootstrap, const std::string& what, int64_t bytes,
                                     int device, const std::vector<Nonce>& nonces) {
  const int me = bootstrap.rank(), ranks = bootstrap.size();
  const bool threads = nonces.empty();
  const auto step = [&](const std::string& doing, ErrorKind kind, auto&& run) {
    agree_on(bootstrap, what, doing, kind, run);
  };
  Part mine;
  mine.device = device;
  step(text("use cuda:{}", device), ErrorKind::kUnsupported,
       [&] { mine.granularity = part_granularity(device); });
  std::vector<int> devices{device};
  int64_t granularity = 1;
  for (const Part& part : exchange(bootstrap, mine)) {
    granularity = std::max(granularity, part.granularity);
    // The numbers of another process's GPUs mean nothing here.
    if (threads && std::find(devices.begin(), devices.end(), part.device) == devices.end()) {
      devices.push_back(part.device);
    }
  }
  const int64_t stride = round_up(std::max<int64_t>(bytes, 1), granularity);
  Range range;
  step("reserve addresses", ErrorKind::kUnsupported, [&] {
    if (me == 0 || !threads) range = std::make_shared<MappedRange>(ranks, stride);
  });
  if (threads) range = share_range(bootstrap, mine, std::move(range));
  step(text("allocate {} on cuda:{}", bytes_text(stride), device), ErrorKind::kOutOfMemory,
       [&] { range->allocate(me, device); });
  step("map its memory", ErrorKind::kUnsupported, [&] { range->open(me, devices); });
  if (!threads) take_parts(bootstrap, what, *range, device, nonces);
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
