#include "moiety/base/arena.h"

#include <algorithm>

namespace moiety {

std::byte* Arena::allocate(int64_t bytes) {
  MOIETY_CHECK(bytes >= 0, "arena {}: {} bytes", name_, bytes);
  const int64_t rounded = std::max<int64_t>(64, (bytes + 63) / 64 * 64);
  while (chunk_ < chunks_.size() && used_ + rounded > chunks_[chunk_].bytes()) {
    ++chunk_;
    used_ = 0;
  }
  if (chunk_ == chunks_.size()) {
    chunks_.emplace_back(std::max(rounded, chunk_bytes_), name_.c_str());
    used_ = 0;
  }
  std::byte* out = chunks_[chunk_].data() + used_;
  used_ += rounded;
  in_use_ += rounded;
  peak_ = std::max(peak_, in_use_);
  return out;
}

TensorView Arena::tensor(DType dtype, std::initializer_list<int64_t> sizes) {
  const TensorView shape(nullptr, dtype, sizes);
  return TensorView(allocate(shape.bytes()), dtype, sizes);
}

Arena::Mark Arena::mark() const { return {chunk_, used_, in_use_}; }

void Arena::release(const Mark& mark) {
  chunk_ = mark.chunk;
  used_ = mark.used;
  in_use_ = mark.in_use;
}

void Arena::settle() {
  MOIETY_CHECK(in_use_ == 0, "arena {}: settle with {} bytes in use", name_, in_use_);
  if (chunks_.size() > 1) {
    chunks_.clear();
    chunks_.emplace_back(peak_, name_.c_str());
  }
  chunk_ = 0;
  used_ = 0;
}

int64_t Arena::reserved() const {
  int64_t total = 0;
  for (const Buffer& chunk : chunks_) total += chunk.bytes();
  return total;
}

}  // namespace moiety
