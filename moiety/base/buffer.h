// Owned memory, zeroed. It is one of three kinds: host memory (aligned to 64 bytes), memory of a
// GPU (aligned to 256), or pinned host memory, which copies to and from a GPU need in order to run
// beside other work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "moiety/base/tensor_view.h"

namespace moiety {

// Bytes that a part of `bytes` takes in a buffer whose next part begins at a multiple of 64.
constexpr int64_t padded_bytes(int64_t bytes) { return (bytes + 63) / 64 * 64; }

class Buffer {
 public:
  Buffer() = default;
  // Host memory. `alignment` is a power of two, at least 64. Throws Error(kOutOfMemory) naming
  // `what` and the bytes if memory is short.
  explicit Buffer(int64_t bytes, const char* what = "buffer", int64_t alignment = 64);
  // Memory of `device`. Throws also what `require_device` throws. On a GPU this and the destructor
  // wait for the device, so neither belongs into a step.
  Buffer(int64_t bytes, Device device, const char* what = "buffer");
  // Pinned host memory. Throws Error(kUnsupported) in a build or on a machine without a GPU.
  static Buffer pinned(int64_t bytes, const char* what = "buffer");
  // Host memory for data that goes to `device` or comes from it; pinned if that is a GPU.
  static Buffer host_for(Device device, int64_t bytes, const char* what = "buffer");

  std::byte* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  Device device() const { return data_.get_deleter().device; }
  // The first elements of the buffer as a row-major tensor.
  TensorView view(DType dtype, std::initializer_list<int64_t> sizes) const {
    return view(dtype, std::span(sizes.begin(), sizes.size()));
  }
  TensorView view(DType dtype, std::span<const int64_t> sizes) const;

 private:
  struct Free {
    Device device;
    bool pinned;
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  int64_t bytes_ = 0;
};

// A buffer that holds exactly one tensor.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::initializer_list<int64_t> sizes, const char* what = "tensor")
      : Tensor(dtype, std::span(sizes.begin(), sizes.size()), what) {}
  Tensor(DType dtype, std::span<const int64_t> sizes, const char* what = "tensor")
      : Tensor(dtype, sizes, Device{}, what) {}
  Tensor(DType dtype, std::initializer_list<int64_t> sizes, Device device,
         const char* what = "tensor")
      : Tensor(dtype, std::span(sizes.begin(), sizes.size()), device, what) {}
  Tensor(DType dtype, std::span<const int64_t> sizes, Device device, const char* what = "tensor");
  static Tensor pinned(DType dtype, std::span<const int64_t> sizes, const char* what = "tensor");
  static Tensor pinned(DType dtype, std::initializer_list<int64_t> sizes,
                       const char* what = "tensor") {
    return pinned(dtype, std::span(sizes.begin(), sizes.size()), what);
  }

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }
  template <class T>
  T* data() const {
    return view_.data<T>();
  }

 private:
  Buffer buffer_;
  TensorView view_;
};

}  // namespace moiety
