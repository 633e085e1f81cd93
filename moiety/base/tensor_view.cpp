#include "moiety/base/tensor_view.h"

namespace moiety {
namespace {

std::string shape_text(std::span<const int64_t> sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    out += (i ? ", " : "") + (sizes[i] < 0 ? std::string("*") : std::to_string(sizes[i]));
  }
  return out + "]";
}

}  // namespace

TensorView::TensorView(void* data, DType dtype, std::span<const int64_t> sizes, Device device)
    : data_(data), dims_(static_cast<int>(sizes.size())), dtype_(dtype), device_(device) {
  MOIETY_CHECK(dims_ <= kMaxDims, "tensor: {} dimensions, at most {}", dims_, kMaxDims);
  int64_t stride = 1;
  for (int d = dims_ - 1; d >= 0; --d) {
    MOIETY_CHECK(sizes[d] >= 0, "tensor: size {} of dimension {} is negative", sizes[d], d);
    sizes_[d] = sizes[d];
    strides_[d] = stride;
    stride *= sizes[d];
  }
}

TensorView::TensorView(void* data, DType dtype, std::span<const int64_t> sizes,
                       std::span<const int64_t> strides, Device device)
    : TensorView(data, dtype, sizes, device) {
  MOIETY_CHECK(strides.size() == sizes.size(), "tensor: {} strides for {} sizes", strides.size(),
               sizes.size());
  for (int d = 0; d < dims_; ++d) strides_[d] = strides[d];
}

int64_t TensorView::numel() const {
  if (!defined()) return 0;
  int64_t n = 1;
  for (int64_t s : sizes()) n *= s;
  return n;
}

bool TensorView::contiguous() const {
  int64_t expected = 1;
  for (int d = dims() - 1; d >= 0; --d) {
    if (sizes_[d] != 1 && strides_[d] != expected) return false;
    expected *= sizes_[d];
  }
  return true;
}

TensorView TensorView::slice(int dim, int64_t begin, int64_t end) const {
  MOIETY_CHECK(dim >= 0 && dim < dims(), "slice: dimension {} of {}", dim, describe());
  MOIETY_CHECK(begin >= 0 && begin <= end && end <= sizes_[dim], "slice: [{}, {}) of {}", begin,
               end, describe());
  TensorView out = *this;
  out.sizes_[dim] = end - begin;
  if (data_) out.data_ = static_cast<std::byte*>(data_) + byte_size(dtype_, begin * strides_[dim]);
  return out;
}

TensorView TensorView::select(int64_t i) const {
  const TensorView part = slice(0, i, i + 1);
  return TensorView(part.data_, dtype_, sizes().subspan(1), strides().subspan(1), device_);
}

TensorView TensorView::reshape(std::initializer_list<int64_t> sizes) const {
  TensorView out(data_, dtype_, sizes, device_);
  MOIETY_CHECK(contiguous(), "reshape: {} is not contiguous", describe());
  MOIETY_CHECK(out.numel() == numel(), "reshape: {} has {} elements, the new shape {} has {}",
               describe(), numel(), shape_text(out.sizes()), out.numel());
  return out;
}

TensorView TensorView::as(DType dtype) const {
  MOIETY_CHECK(bits(dtype) == bits(dtype_), "as: {} seen as {}", describe(), name(dtype));
  TensorView out = *this;
  out.dtype_ = dtype;
  return out;
}

std::string TensorView::describe() const {
  if (!defined()) return "no tensor";
  std::string out = name(dtype_) + shape_text(sizes());
  if (!contiguous()) out += " with strides " + shape_text(strides());
  return device_.type == DeviceType::kCpu ? out : out + " on " + name(device_);
}

void check_tensor(const char* operation, const char* argument, const TensorView& x, DType dtype,
                  std::initializer_list<int64_t> sizes) {
  bool ok = x.defined() && x.dtype() == dtype && x.dims() == static_cast<int>(sizes.size());
  int d = 0;
  for (int64_t s : sizes) {
    ok = ok && (s < 0 || x.size(d) == s);
    ++d;
  }
  MOIETY_CHECK(ok, "{}: {} is {}, expected {}{}", operation, argument, x.describe(), name(dtype),
               shape_text(std::span(sizes.begin(), sizes.size())));
}

}  // namespace moiety
