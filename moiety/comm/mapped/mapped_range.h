// A range of addresses in which the memory of several GPUs lies side by side, each part mapped for
// all of them: what ranks share. Parts are made with the driver's functions for virtual memory; no
// multicast object is ever created or asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moiety::comm::mapped {

// The multiple that parts on this GPU have to be of.
int64_t part_granularity(int device);

class MappedRange {
 public:
  // Reserves addresses for `parts` parts of `stride` bytes, a multiple of every granularity. Nothing
  // is allocated. Errors are Error(kCuda) that name the driver's function.
  MappedRange(int parts, int64_t stride);
  // Unmaps and frees. Nobody uses the memory any more.
  ~MappedRange();
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;

  // Allocates part i on `device`. Error(kOutOfMemory) says how much is free. Several threads may
  // fill different parts.
  void allocate(int i, int device);
  // Lets the GPUs read and write part i, then zeroes it. Error(kUnsupported) names two GPUs that
  // cannot reach each other.
  void open(int i, std::span<const int> devices);
  // A descriptor of part i, which another process may take as a part of its own range; the caller
  // closes it.
  int descriptor_of(int i) const;
  // Takes another process's memory as part i, of the same stride, and lets `device` read and write
  // it. The descriptor stays the caller's.
  void take(int i, int descriptor, int device);

  std::byte* part(int i) const { return base_ + i * stride_; }
  int64_t stride() const { return stride_; }

 private:
  struct Part {
    unsigned long long handle = 0;
    int device = 0;
    bool allocated = false, mapped = false;
  };
  int64_t stride_;
  std::byte* base_ = nullptr;
  std::vector<Part> parts_;
};

}  // namespace moiety::comm::mapped
