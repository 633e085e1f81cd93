#include "moiety/base/buffer.h"

#include <cstdlib>
#include <cstring>

#include "moiety/base/gpu.h"
#include "moiety/base/gpu_runtime.h"
#include "moiety/base/integer.h"

namespace moiety {

void Buffer::Free::operator()(std::byte* p) const {
  if (device.type == DeviceType::kCuda) {
    gpu::free(device.index, p);
  } else if (pinned) {
    gpu::free_pinned(p);
  } else {
    std::free(p);
  }
}

Buffer::Buffer(int64_t bytes, const char* what, int64_t alignment) : bytes_(bytes) {
  MOIETY_CHECK(bytes >= 0, "{}: {} bytes", what, bytes);
  if (bytes == 0) return;
  const int64_t rounded = round_up(bytes, alignment);
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, rounded)));
  if (!data_) fail(ErrorKind::kOutOfMemory, "{}: out of memory for {}", what, bytes_text(bytes));
  std::memset(data_.get(), 0, rounded);
}

Buffer::Buffer(int64_t bytes, Device device, const char* what) {
  if (device.type == DeviceType::kCpu) {
    *this = Buffer(bytes, what);
    return;
  }
  MOIETY_CHECK(bytes >= 0, "{}: {} bytes", what, bytes);
  require_device(what, device);
  bytes_ = bytes;
  void* data = bytes == 0 ? nullptr : gpu::allocate(device.index, bytes, what);
  data_ = {static_cast<std::byte*>(data), Free{device, false}};
}

Buffer Buffer::pinned(int64_t bytes, const char* what) {
  MOIETY_CHECK(bytes >= 0, "{}: {} bytes", what, bytes);
  require_device(what, {DeviceType::kCuda, 0});
  Buffer out;
  out.bytes_ = bytes;
  void* data = bytes == 0 ? nullptr : gpu::allocate_pinned(bytes, what);
  out.data_ = {static_cast<std::byte*>(data), Free{{}, true}};
  return out;
}

Buffer Buffer::host_for(Device device, int64_t bytes, const char* what) {
  return device.type == DeviceType::kCuda ? pinned(bytes, what) : Buffer(bytes, what);
}

TensorView Buffer::view(DType dtype, std::span<const int64_t> sizes) const {
  TensorView out(data_.get(), dtype, sizes, device());
  MOIETY_CHECK(out.bytes() <= bytes_, "buffer: {} needs {} bytes, the buffer has {}",
               out.describe(), out.bytes(), bytes_);
  return out;
}

Tensor::Tensor(DType dtype, std::span<const int64_t> sizes, Device device, const char* what) {
  const TensorView shape(nullptr, dtype, sizes);
  buffer_ = Buffer(shape.bytes(), device, what);
  view_ = buffer_.view(dtype, sizes);
}

Tensor Tensor::pinned(DType dtype, std::span<const int64_t> sizes, const char* what) {
  Tensor out;
  out.buffer_ = Buffer::pinned(TensorView(nullptr, dtype, sizes).bytes(), what);
  out.view_ = out.buffer_.view(dtype, sizes);
  return out;
}

}  // namespace moiety
