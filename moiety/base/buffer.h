// Owned memory, aligned to 64 bytes and zeroed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "moiety/base/tensor_view.h"

namespace moiety {

class Buffer {
 public:
  Buffer() = default;
  // `alignment` is a power of two, at least 64. Throws Error naming `what` and the bytes if memory
  // is short.
  explicit Buffer(int64_t bytes, const char* what = "buffer", int64_t alignment = 64);

  std::byte* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  // The first elements of the buffer as a row-major tensor.
  TensorView view(DType dtype, std::initializer_list<int64_t> sizes) const {
    return view(dtype, std::span(sizes.begin(), sizes.size()));
  }
  TensorView view(DType dtype, std::span<const int64_t> sizes) const;

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  int64_t bytes_ = 0;
};

// A buffer of exactly one tensor.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::initializer_list<int64_t> sizes, const char* what = "tensor")
      : Tensor(dtype, std::span(sizes.begin(), sizes.size()), what) {}
  Tensor(DType dtype, std::span<const int64_t> sizes, const char* what = "tensor");

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
