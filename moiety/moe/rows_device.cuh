// Parts that the kernels that move rows share: a warp and the slots of its token, and rows of
// zeros.
#pragma once

#include <cstdint>

#include "moiety/moe/prepare.h"

namespace moiety::moe::device {

constexpr uint32_t kWarp = 0xFFFFFFFFu;
constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / 32;

// The slots of one token; lane k has that of its choice k.
class TokenSlots {
 public:
  __device__ TokenSlots(const int32_t* slot_TK, int64_t t, int topk) {
    const int lane = threadIdx.x % 32;
    slot_ = lane < topk ? slot_TK[t * topk + lane] : -1;
    alive_ = __ballot_sync(kWarp, slot_ >= 0);
  }
  // The slot of the lane's own choice; -1 if it is not alive.
  __device__ int32_t own() const { return slot_; }
  __device__ int count() const { return __popc(alive_); }
  __device__ bool more() const { return alive_ != 0; }
  // The lane of the next live choice, in ascending order. There must be one.
  __device__ int next() {
    const int lane = __ffs(static_cast<int>(alive_)) - 1;
    alive_ &= alive_ - 1;
    return lane;
  }
  __device__ int32_t slot(int lane) const { return __shfl_sync(kWarp, slot_, lane); }

 private:
  int32_t slot_;
  uint32_t alive_;
};

// A piece of a row: rows of a batch are cut into pieces, and a warp has one of them. There are
// fewer than 2^32, since the rows of more would not fit into a memory.
struct Piece {
  int64_t row;
  uint32_t piece;  // number of the piece in the row

  __device__ Piece(uint32_t block, uint32_t pieces) {
    const uint32_t warp = block * kRowWarps + threadIdx.x / 32;
    row = warp / pieces;
    piece = warp - static_cast<uint32_t>(row) * pieces;
  }
};

// The rows and values of slots without a token: padding, and the tail if asked.
struct ZeroRows {
  std::byte* data;
  int64_t stride, bytes;
  std::byte* values;  // float32; may be null
  int64_t value_stride;
  const int32_t* slot_row;
  const int64_t* info;
  int64_t capacity;
  bool tail;

  // Zeroes rows, which are whole Units at multiples of their size. A warp looks after 32 slots.
  template <class Unit>
  __device__ void run(int64_t warp) const {
    const int lane = threadIdx.x % 32;
    const int64_t first = warp * 32, slot = first + lane;
    const bool empty = slot < (tail ? capacity : info[kInfoPadded]) && slot_row[slot] < 0;
    if (empty && values) *reinterpret_cast<uint32_t*>(values + slot * value_stride) = 0;
    for (uint32_t rows = __ballot_sync(kWarp, empty); rows != 0; rows &= rows - 1) {
      auto* row =
          reinterpret_cast<Unit*>(data + (first + __ffs(static_cast<int>(rows)) - 1) * stride);
      for (int64_t i = lane; i < bytes / int64_t{sizeof(Unit)}; i += 32) row[i] = Unit{};
    }
  }
  // The zero rows of a plan, without memory yet.
  static ZeroRows of(const EpPlan& plan, bool tail) {
    ZeroRows out{};
    out.slot_row = plan.slot_row.data<int32_t>();
    out.info = plan.info.data<int64_t>();
    out.capacity = plan.capacity;
    out.tail = tail;
    return out;
  }
  static constexpr int64_t blocks(int64_t capacity) {
    return (capacity + 32 * kRowWarps - 1) / (32 * kRowWarps);
  }
};

}  // namespace moiety::moe::device
