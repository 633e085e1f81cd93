// A view of memory as a tensor: pointer, dtype, sizes, strides (in elements) and device. It owns
// nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "moiety/base/device.h"
#include "moiety/base/dtype.h"
#include "moiety/base/error.h"

namespace moiety {

inline constexpr int kMaxDims = 6;

class TensorView {
 public:
  // An absent tensor: optional arguments are views for which `defined()` is false.
  TensorView() = default;
  // A row-major tensor without gaps.
  TensorView(void* data, DType dtype, std::span<const int64_t> sizes, Device device = {});
  TensorView(void* data, DType dtype, std::initializer_list<int64_t> sizes, Device device = {})
      : TensorView(data, dtype, std::span(sizes.begin(), sizes.size()), device) {}
  TensorView(void* data, DType dtype, std::span<const int64_t> sizes,
             std::span<const int64_t> strides, Device device = {});

  bool defined() const { return dims_ >= 0; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  int dims() const { return dims_ < 0 ? 0 : dims_; }
  int64_t size(int dim) const { return sizes_[dim < 0 ? dim + dims_ : dim]; }
  int64_t stride(int dim) const { return strides_[dim < 0 ? dim + dims_ : dim]; }
  std::span<const int64_t> sizes() const { return {sizes_.data(), size_t(dims())}; }
  std::span<const int64_t> strides() const { return {strides_.data(), size_t(dims())}; }
  // Number of elements; 1 for a scalar, 0 for an absent tensor.
  int64_t numel() const;
  int64_t bytes() const { return byte_size(dtype_, numel()); }
  bool contiguous() const;

  void* raw() const { return data_; }
  // Typed pointer to the first element; throws if T is not the view's dtype.
  template <class T>
  T* data() const {
    MOIETY_CHECK(dtype_of<T> == dtype_ || !defined(), "tensor is {}, accessed as {}", name(dtype_),
                 name(dtype_of<T>));
    return static_cast<T*>(data_);
  }

  // The part [begin, end) of one dimension.
  TensorView slice(int dim, int64_t begin, int64_t end) const;
  // Index `i` of the first dimension, which disappears.
  TensorView select(int64_t i) const;
  // Another shape over the same elements; the view must be contiguous.
  TensorView reshape(std::initializer_list<int64_t> sizes) const;
  // The same bytes as another dtype of the same width.
  TensorView as(DType dtype) const;

  // A description for errors: "bfloat16[4, 128]", with strides if the tensor is not contiguous, and
  // with the device if that is a GPU.
  std::string describe() const;

 private:
  void* data_ = nullptr;
  std::array<int64_t, kMaxDims> sizes_{};
  std::array<int64_t, kMaxDims> strides_{};
  int dims_ = -1;
  DType dtype_ = DType::kFloat32;
  Device device_;
};

// Throws Error(kInvalidArgument) unless `x` is defined and has this dtype and these sizes (-1:
// any). The text names the operation and the argument: "gemm: b is float32[3, 4], expected
// float32[*, 8]".
void check_tensor(const char* operation, const char* argument, const TensorView& x, DType dtype,
                  std::initializer_list<int64_t> sizes);

}  // namespace moiety
