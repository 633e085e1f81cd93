#include "moiety/base/buffer.h"

#include <cstdlib>
#include <cstring>

namespace moiety {

void Buffer::Free::operator()(std::byte* p) const { std::free(p); }

Buffer::Buffer(int64_t bytes, const char* what, int64_t alignment) : bytes_(bytes) {
  MOIETY_CHECK(bytes >= 0, "{}: {} bytes", what, bytes);
  if (bytes == 0) return;
  const int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, rounded)));
  if (!data_) fail(ErrorKind::kOutOfMemory, "{}: out of memory for {}", what, bytes_text(bytes));
  std::memset(data_.get(), 0, rounded);
}

TensorView Buffer::view(DType dtype, std::span<const int64_t> sizes) const {
  TensorView out(data_.get(), dtype, sizes);
  MOIETY_CHECK(out.bytes() <= bytes_, "buffer: {} needs {} bytes, the buffer has {}",
               out.describe(), out.bytes(), bytes_);
  return out;
}

Tensor::Tensor(DType dtype, std::span<const int64_t> sizes, const char* what) {
  const TensorView shape(nullptr, dtype, sizes);
  buffer_ = Buffer(shape.bytes(), what);
  view_ = buffer_.view(dtype, sizes);
}

}  // namespace moiety
