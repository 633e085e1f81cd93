// The place of a suite's tensors (OnHost of tests/moe/ep_helpers.h) that is a GPU.
#pragma once

#include <memory>
#include <vector>

#include "moiety/base/copy.h"
#include "tests/moe/ep_helpers.h"

namespace moiety::moe {

class OnGpu {
 public:
  explicit OnGpu(const Stream& s) : stream(s) {}

  TensorView operator()(const TensorView& storage, const TensorView& view) {
    Copy& made = copies_.emplace_back(
        storage, std::make_shared<Tensor>(storage.dtype(), storage.sizes(), stream.device()));
    copy(*made.there, storage, stream);
    const auto at = address(view) - address(storage);
    void* const there =
        view.raw() ? static_cast<std::byte*>(made.there->view().raw()) + at : nullptr;
    return {there, view.dtype(), view.sizes(), view.strides(), stream.device()};
  }
  void back() {
    for (; brought_ < copies_.size(); ++brought_) {
      copy(copies_[brought_].host, *copies_[brought_].there, stream);
    }
    stream.synchronize();
  }
  // The plan with views of the memory that plan memory was copied from and brought back to.
  EpPlan plan(const EpPlan& plan) const {
    EpPlan out = plan;
    for (TensorView* x :
         {&out.info, &out.rows_real, &out.rows_padded, &out.rows_before, &out.offset, &out.slot_TK,
          &out.row_TR, &out.recv_token, &out.recv_slot, &out.slot_row, &out.count_RE, &out.rows_RR,
          &out.tokens_R, &out.row_end_BR, &out.pair_end_BE}) {
      *x = here(*x);
    }
    return out;
  }

  Stream stream;

 private:
  struct Copy {
    TensorView host;
    std::shared_ptr<Tensor> there;
  };
  static intptr_t address(const TensorView& x) { return reinterpret_cast<intptr_t>(x.raw()); }
  TensorView here(const TensorView& x) const {
    for (const Copy& c : copies_) {
      const intptr_t at = address(x) - address(*c.there);
      if (at < 0 || at + x.bytes() > c.host.bytes()) continue;
      return {static_cast<std::byte*>(c.host.raw()) + at, x.dtype(), x.sizes(), x.strides()};
    }
    ADD_FAILURE() << "no copy has " << x.describe();
    return x;
  }

  std::vector<Copy> copies_;
  size_t brought_ = 0;
};

}  // namespace moiety::moe
