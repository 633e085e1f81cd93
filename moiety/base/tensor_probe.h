// Sees every tensor that the passes of a model store, in the order in which they are stored: to
// find the first one that is wrong. Whoever runs a pass may be given one; without it nothing is
// called, and no argument of a call is computed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety {

// Which rows of a tensor belong to which expert of a rank: local expert l has count[l] rows from
// begin[l] on. Nothing lies in the other rows.
struct ExpertRows {
  TensorView begin_L1;               // int64 [L + 1]
  TensorView count_L;                // int64 [L]
  std::span<const int32_t> experts;  // their numbers, [L]
};

struct StoredTensor {
  std::string_view operation;  // "attention", or the parameter that it is of: "final_norm.weight"
  std::string_view name;       // of what it stored: "o", "gradient"
  TensorView view;             // absent: this pass has none
  std::initializer_list<TensorView> inputs;
  const ExpertRows* rows = nullptr;  // null: every row counts. A view [L, ...] has no such rows
};

class TensorProbe {
 public:
  virtual ~TensorProbe() = default;
  // What is stored next belongs to this layer (-1: embedding, head and loss).
  virtual void enter(int64_t layer, bool backward) = 0;
  // On the thread that runs the pass, with the data in place, before anything overwrites it.
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
