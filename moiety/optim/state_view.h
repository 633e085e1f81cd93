// The training state that a rank owns, in coordinates that do not depend on the layout: for every
// logical tensor and slot, the boxes of it that lie in this rank's memory. The optimizer makes the
// view; the checkpoint writes from it and reads into it.
//
// A box is a range in every dimension of the uncut, unpadded logical tensor; `data` points to its
// elements, row-major and without gaps. Over all ranks the boxes of a (tensor, slot) tile the
// tensor: every element has one owner. (Where memory rows lie in another order than logical rows,
// or a segment begins inside a row, a parameter gives several boxes.) A rank that owns nothing of a
// tensor leaves it out or lists an empty box.
//
// Slots: "weight" (the fp32 master), "exp_avg", "exp_avg_sq".
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "moiety/base/device.h"
#include "moiety/base/dtype.h"

namespace moiety::optim {

inline constexpr int kMaxBoxRank = 4;

struct Box {
  int rank = 0;                              // dimensions of the tensor; 0 is a scalar
  std::array<int64_t, kMaxBoxRank> start{};  // entries from `rank` on are zero
  std::array<int64_t, kMaxBoxRank> size{};
  friend bool operator==(const Box&, const Box&) = default;
};

struct StatePiece {
  std::string tensor;  // checkpoint name
  std::string slot;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;  // shape of the logical tensor
  Box box;
  void* data = nullptr;
  Device device = {};  // place of `data`
};

using StateView = std::vector<StatePiece>;

}  // namespace moiety::optim
