// An observer of every tensor that the passes of a model store, in the order in which they are
// stored: it finds the first one that is wrong. A pass takes an optional probe; without one nothing
// is called, and no argument of a call is computed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety {

// The rows of a tensor that belong to each of a rank's experts: local expert l has count[l] rows
// from begin[l] on. The other rows hold nothing.
struct ExpertRows {
  TensorView begin_L1;               // int64 [L + 1]
  TensorView count_L;                // int64 [L]
  std::span<const int32_t> experts;  // numbers of the experts, [L]
};

struct StoredTensor {
  std::string_view operation;  // "attention", or the parameter: "final_norm.weight"
  std::string_view name;       // name of the result: "o", "gradient"
  TensorView view;             // absent if this pass has no such tensor
  std::initializer_list<TensorView> inputs;
  const ExpertRows* rows = nullptr;  // null if every row counts, and for views [L, ...]
};

class TensorProbe {
 public:
  virtual ~TensorProbe() = default;
  // Announces that the next tensors belong to this layer (-1: embedding, head and loss).
  virtual void enter(int64_t layer, bool backward) = 0;
  // Called on the thread that runs the pass, with the data in place, before anything overwrites
  // them.
  virtual void stored(const StoredTensor& tensor) = 0;
};

// Shows `probe`, if there is one, what an operation on `stream` has stored.
template <class... Inputs>
void show(TensorProbe* probe, const Stream& stream, std::string_view operation,
          std::string_view name, const TensorView& view, const Inputs&... inputs) {
  if (!probe) [[likely]]
    return;
  stream.synchronize();
  probe->stored({operation, name, view, {inputs...}});
}
template <class... Inputs>
void show_rows(TensorProbe* probe, const Stream& stream, const ExpertRows& rows,
               std::string_view operation, std::string_view name, const TensorView& view,
               const Inputs&... inputs) {
  if (!probe) [[likely]]
    return;
  stream.synchronize();
  probe->stored({operation, name, view, {inputs...}, &rows});
}

}  // namespace moiety
