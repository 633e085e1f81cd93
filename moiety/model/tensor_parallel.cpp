#include "moiety/model/tensor_parallel.h"

#include <algorithm>
#include <array>
#include <vector>

#include "moiety/base/copy.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/base/trace.h"
#include "moiety/model/tensor_parallel_sum.h"
#include "moiety/model/tp_window.h"
#include "moiety/nn/element.h"
#include "moiety/nn/scratch.h"

namespace moiety::model {
namespace {

enum class Order { kByRank, kBySequence };

// Copies the rows of all tokens, which lie in order `order` in `from`, to the other order.
void reorder(const Pass& pass, TensorView from, Order order, TensorView to) {
  const int64_t ranks = pass.tp_ranks(), sequences = pass.sequences;
  const int64_t run = pass.seq_len / ranks * from.size(1);  // elements of a rank in a sequence
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto by_rank = [&](const TensorView& x) {
      return x.slice(0, rank * pass.own_tokens(), (rank + 1) * pass.own_tokens())
          .reshape({sequences, run});
    };
    const auto by_sequence = [&](const TensorView& x) {
      return TensorView(static_cast<std::byte*>(x.raw()) + byte_size(x.dtype(), rank * run),
                        x.dtype(), std::array{sequences, run}, std::array{ranks * run, int64_t{1}},
                        x.device());
    };
    if (order == Order::kByRank) {
      copy(by_sequence(to), by_rank(from), pass.stream);
    } else {
      copy(by_rank(to), by_sequence(from), pass.stream);
    }
  }
}

// sum[i] (+)= element first + i of x.
void add_elements(const TensorView& x, int64_t first, int64_t n, bool overwrite, float* sum) {
  nn::with_element(x.dtype(), [&](auto element) {
    using T = decltype(element);
    const T* from = x.data<T>() + first;
    if (overwrite) {
      for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<float>(from[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<float>(from[i]);
    }
  });
}

// out = round(the parts of `ranks` ranks, added in order, + addend).
void add_parts(const TensorView& parts, int64_t ranks, const TensorView& addend,
               const TensorView& out) {
  constexpr int64_t kBlock = 2048;
  const int64_t n = out.numel();
  parallel_for(ceil_div(n, kBlock), 16, [&](int64_t begin, int64_t end) {
    float* sum = nn::thread_scratch<float>(kBlock);
    for (int64_t at = begin * kBlock; at < std::min(end * kBlock, n); at += kBlock) {
      const int64_t count = std::min(kBlock, n - at);
      for (int64_t r = 0; r < ranks; ++r) add_elements(parts, r * n + at, count, r == 0, sum);
      if (addend.defined()) add_elements(addend, at, count, false, sum);
      nn::with_element(out.dtype(), [&](auto element) {
        using T = decltype(element);
        for (int64_t i = 0; i < count; ++i) out.data<T>()[at + i] = static_cast<T>(sum[i]);
      });
    }
  });
}

void check_own(const char* operation, const Pass& pass, const TensorView& all,
               const TensorView& own) {
  MOIETY_CHECK(all.dims() == 2 && own.dims() == 2 && all.size(1) == own.size(1) &&
                   all.size(0) == pass.tp_ranks() * own.size(0) && all.contiguous() &&
                   own.contiguous(),
               "{}: {} of all tokens and {} of own ones, of {} ranks", operation, all.describe(),
               own.describe(), pass.tp_ranks());
}

// ---- the window of ranks on GPUs

bool through_window(const Pass& pass, int64_t part_bytes) {
  return pass.window && pass.window->takes(part_bytes, part_bytes * pass.tp_ranks());
}

bool in_window(const Pass& pass, const TensorView& x) {
  return pass.window && pass.window->holds(x.raw());
}

// The rows of `all` tokens, or parts of as many rows with one sequence, of which the one that `mine`
// belongs to lies in the window at `mine`.
WindowRows rows_of(const Pass& pass, const void* mine, int64_t sequences, const TensorView& all) {
  WindowRows out{.at = {},
                 .ranks = pass.tp_ranks(),
                 .rank = pass.tp_rank(),
                 .sequences = sequences,
                 .run = all.numel() / sequences / pass.tp_ranks()};
  for (int r = 0; r < out.ranks; ++r) out.at[r] = pass.window->at_rank(r, mine);
  return out;
}

void gather_through_window(const Pass& pass, const TensorView& own, int64_t sequences,
                           const TensorView& all) {
  if constexpr (kCudaBuilt) {
    std::byte* const mine = pass.window->take();
    const WindowRows rows = rows_of(pass, mine, sequences, all);
    show_rows_cuda(own, mine, rows, all, pass.stream);
    pass.window->meet(pass.stream);
    return fetch_rows_cuda(rows, all, pass.stream);
  }
  fail_without_cuda("gather_tokens");
}

void sum_in_window(const Pass& pass, const TensorView& partial, int64_t sequences,
                   const TensorView& addend, const TensorView& out) {
  check_own("sum_to_own", pass, partial, out);
  if constexpr (kCudaBuilt) {
    pass.window->meet(pass.stream);
    return sum_rows_cuda(rows_of(pass, partial.raw(), sequences, partial), partial.dtype(), addend,
                         out, pass.stream);
  }
  fail_without_cuda("sum_to_own");
}

}  // namespace

TensorView partial_tensor(const Pass& pass, int64_t rows, int64_t width) {
  if (through_window(pass, byte_size(pass.storage, rows * width) / pass.tp_ranks())) {
    return {pass.window->take(), pass.storage, {rows, width}, pass.stream.device()};
  }
  return pass.tensor({rows, width});
}

TensorView gather_tokens(const Pass& pass, TensorView own) {
  if (!pass.tp) return own;
  const TensorView all = pass.arena.tensor(own.dtype(), {pass.tokens(), own.size(1)});
  check_own("gather_tokens", pass, all, own);
  if (through_window(pass, own.bytes())) {
    gather_through_window(pass, own, pass.sequences, all);
    return all;
  }
  if (pass.sequences == 1) {
    gather_parts(pass, own, all);
    return all;
  }
  ArenaScope staging(pass.arena);
  const TensorView parts = pass.arena.tensor(own.dtype(), {pass.tokens(), own.size(1)});
  gather_parts(pass, own, parts);
  reorder(pass, parts, Order::kByRank, all);
  return all;
}

void gather_parts(const Pass& pass, TensorView own, TensorView parts) {
  if (through_window(pass, own.bytes())) return gather_through_window(pass, own, 1, parts);
  const WaitSpan wait(TraceLane::kTp, "gather", {{"bytes", parts.bytes()}});
  pass.tp->all_gather(own, parts, pass.stream).wait();
}

void sum_to_own(const Pass& pass, TensorView partial, TensorView addend, TensorView out) {
  if (in_window(pass, partial)) {
    return sum_in_window(pass, partial, pass.sequences, addend, out);
  }
  if (pass.sequences == 1) return sum_parts_to_own(pass, partial, addend, out);
  ArenaScope staging(pass.arena);
  const TensorView parts = pass.arena.tensor(partial.dtype(), {partial.size(0), partial.size(1)});
  reorder(pass, partial, Order::kBySequence, parts);
  sum_parts_to_own(pass, parts, addend, out);
}

void sum_parts_to_own(const Pass& pass, TensorView partial, TensorView addend, TensorView out) {
  if (in_window(pass, partial)) return sum_in_window(pass, partial, 1, addend, out);
  check_own("sum_to_own", pass, partial, out);
  ArenaScope staging(pass.arena);
  const TensorView parts = pass.arena.tensor(partial.dtype(), {partial.size(0), partial.size(1)});
  const std::vector<int64_t> rows(pass.tp_ranks(), out.size(0));
  {
    const WaitSpan wait(TraceLane::kTp, "scatter", {{"bytes", parts.bytes()}});
    pass.tp->all_to_all(partial, rows, parts, rows, pass.stream).wait();
  }
  if (pass.stream.device().type == DeviceType::kCuda) {
    if constexpr (kCudaBuilt) {
      return add_parts_cuda(parts, pass.tp_ranks(), addend, out, pass.stream);
    }
    fail_without_cuda("sum_to_own");
  }
  pass.stream.run([=, ranks = pass.tp_ranks()] { add_parts(parts, ranks, addend, out); });
}

void forward_to_own(const Pass& pass, const LinearLayer& layer, TensorView x, TensorView y,
                    TensorView residual) {
  if (!pass.tp) return layer.forward(pass, x, y, residual);
  ArenaScope temporaries(pass.arena);
  const TensorView partial = partial_tensor(pass, pass.tokens(), y.size(1));
  layer.forward(pass, x, partial, {});
  sum_to_own(pass, partial, residual, y);
}

void input_gradient_to_own(const Pass& pass, const LinearLayer& layer, TensorView dy,
                           TensorView dx) {
  if (!pass.tp) return layer.input_gradient(pass, dy, dx);
  ArenaScope temporaries(pass.arena);
  const TensorView partial = partial_tensor(pass, pass.tokens(), dx.size(1));
  layer.input_gradient(pass, dy, partial);
  sum_to_own(pass, partial, {}, dx);
}

}  // namespace moiety::model
