#include "moiety/base/arena.h"

#include <algorithm>

#include "moiety/base/integer.h"

namespace moiety {

Arena::Arena(std::string name, const TensorView& memory) : Arena(std::move(name), memory.device()) {
  check_tensor("arena", name_.c_str(), memory, DType::kUInt8, {-1});
  MOIETY_CHECK(reinterpret_cast<uintptr_t>(memory.raw()) % uintptr_t(alignment()) == 0,
               "arena {}: memory at {} is not aligned to {}", name_, memory.raw(), alignment());
  given_ = true;
  memory_ = {static_cast<std::byte*>(memory.raw()), static_cast<size_t>(memory.bytes())};
}

std::byte* Arena::allocate(int64_t bytes) {
  MOIETY_CHECK(bytes >= 0, "arena {}: {} bytes", name_, bytes);
  const int64_t unit = alignment();
  const int64_t rounded = std::max(unit, round_up(bytes, unit));
  MOIETY_CHECK(!given_ || used_ + rounded <= std::ssize(memory_),
               "arena {}: {} of {} bytes are in use, and {} more are asked for", name_, used_,
               memory_.size(), rounded);
  while (!given_ && chunk_ < chunks_.size() && used_ + rounded > chunks_[chunk_].bytes()) {
    ++chunk_;
    used_ = 0;
  }
  if (!given_ && chunk_ == chunks_.size()) {
    chunks_.push_back(chunk(std::max(rounded, chunk_bytes_)));
    used_ = 0;
  }
  std::byte* out = (given_ ? memory_.data() : chunks_[chunk_].data()) + used_;
  used_ += rounded;
  in_use_ += rounded;
  peak_ = std::max(peak_, in_use_);
  return out;
}

TensorView Arena::tensor(DType dtype, std::initializer_list<int64_t> sizes) {
  const TensorView shape(nullptr, dtype, sizes);
  return TensorView(allocate(shape.bytes()), dtype, sizes, device_);
}

void Arena::lend(std::span<std::byte> memory) {
  MOIETY_CHECK(lent_used_ == 0, "arena {}: lend with {} bytes in use", name_, lent_used_);
  lent_ = memory;
}

TensorView Arena::lent_tensor(DType dtype, std::initializer_list<int64_t> sizes) {
  const int64_t bytes = TensorView(nullptr, dtype, sizes).bytes();
  const int64_t rounded = std::max(alignment(), round_up(bytes, alignment()));
  if (lent_used_ + rounded > std::ssize(lent_)) return tensor(dtype, sizes);
  std::byte* const here = lent_.data() + lent_used_;
  lent_used_ += rounded;
  return TensorView(here, dtype, sizes, device_);
}

Arena::Mark Arena::mark() const { return {chunk_, used_, in_use_, lent_used_}; }

void Arena::release(const Mark& mark) {
  chunk_ = mark.chunk;
  used_ = mark.used;
  in_use_ = mark.in_use;
  lent_used_ = mark.lent;
}

bool Arena::settle() {
  MOIETY_CHECK(in_use_ == 0, "arena {}: settle with {} bytes in use", name_, in_use_);
  const bool folds = chunks_.size() > 1;
  if (folds) {
    chunks_.clear();
    chunks_.push_back(chunk(peak_));
  }
  chunk_ = 0;
  used_ = 0;
  return folds;
}

int64_t Arena::reserved() const {
  int64_t total = 0;
  for (const Buffer& chunk : chunks_) total += chunk.bytes();
  return total;
}

}  // namespace moiety
