#include "moiety/model/parallel_loss.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "moiety/base/copy.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/math.h"
#include "moiety/base/parallel.h"
#include "moiety/base/trace.h"
#include "moiety/model/parallel_loss_rows.h"
#include "moiety/model/tensor_parallel.h"
#include "moiety/nn/linear.h"
#include "moiety/nn/loss.h"
#include "moiety/nn/loss_rows.h"

namespace moiety::model {
namespace {

// A chunk of tokens, ordered by rank: own tokens of rank 0, of rank 1, ...
struct Chunk {
  TensorView x_ND, logits_NV, target_N, loss_N;
  TensorView own_WN, all_RWN;  // LossRows' own and all
  nn::VocabularySlice slice;

  int64_t rows() const { return target_N.size(0); }
  int64_t columns() const { return logits_NV.size(1); }
  LossRows data() const {
    return {.rows = rows(),
            .columns = columns(),
            .first = slice.first,
            .tokens_of = slice.vocabulary,
            .ranks = static_cast<int>(all_RWN.size(0) / kRowWords),
            .logits = logits_NV.data<float>(),
            .target = target_N.data<int32_t>(),
            .own = own_WN.data<float>(),
            .all = all_RWN.data<float>(),
            .loss = loss_N.data<float>()};
  }
};

// Runs cuda(rows) on a GPU's pass, and on a CPU f(n) for each row.
template <class Cuda, class F>
void for_rows(const Pass& pass, const Chunk& chunk, Cuda&& cuda, F f) {
  const LossRows rows = chunk.data();
  if (pass.stream.device().type == DeviceType::kCuda) {
    if constexpr (kCudaBuilt) return cuda(rows);
    fail_without_cuda("parallel_cross_entropy");
  }
  pass.stream.run([=] {
    parallel_for(rows.rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) f(rows, n);
    });
  });
}

// The column of the row's target; outside [0, columns) if another rank has it or there is none.
int64_t column_of(const LossRows& c, int64_t n) {
  return c.target[n] == nn::kIgnoredTarget ? -1 : c.target[n] - c.first;
}
float* row(const LossRows& c, int64_t n) { return c.logits + n * c.columns; }

// The targets of own tokens [begin, end) of every rank; masked ones become kIgnoredTarget.
void chunk_targets(const Pass& pass, const ParallelCrossEntropyArgs& a, int64_t begin, int64_t end,
                   TensorView out) {
  const TargetChunk chunk{.target = a.target_T.data<int32_t>(),
                          .mask = a.mask_T.data<uint8_t>(),
                          .ranks = pass.tp_ranks(),
                          .run = pass.seq_len / pass.tp_ranks(),
                          .begin = begin,
                          .end = end,
                          .out = out.data<int32_t>()};
  if (pass.stream.device().type == DeviceType::kCuda) {
    if constexpr (kCudaBuilt) return pick_targets_cuda(chunk, pass.stream);
    fail_without_cuda("parallel_cross_entropy");
  }
  pass.stream.run([chunk, rows = out.size(0), vocabulary = a.slice.vocabulary] {
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t t = chunk.token(n);
      const int32_t target = chunk.target[t];
      MOIETY_CHECK(target == nn::kIgnoredTarget || (target >= 0 && target < vocabulary),
                   "cross_entropy: target {} at position {} is outside the vocabulary of {}",
                   target, t, vocabulary);
      chunk.out[n] = chunk.at(t);
    }
  });
}

// Fetches what all ranks say of the rows. On a CPU logits become exp(logit - own maximum).
void exchange_rows(const Pass& pass, const Chunk& chunk) {
  for_rows(
      pass, chunk, [&](const LossRows& c) { row_words_cuda(c, pass.stream); },
      [](const LossRows& c, int64_t n) {
        float* z = row(c, n);
        const int64_t y = column_of(c, n);
        const float max = nn::row_max(z, c.columns);
        c.own[kRowMax * c.rows + n] = max;
        c.own[kRowTarget * c.rows + n] = y >= 0 && y < c.columns ? z[y] : 0;
        c.own[kRowSum * c.rows + n] = nn::row_exponentials(z, c.columns, max, z);
      });
  gather_parts(pass, chunk.own_WN, chunk.all_RWN);
}

// Writes losses and puts the gradient in the place of the logits: rows of elements of `storage`
// that begin where the rows of logits did.
void finish_rows(const Pass& pass, const Chunk& chunk, float z_coef, bool gradient) {
  for_rows(
      pass, chunk,
      [&](const LossRows& c) { finish_rows_cuda(c, z_coef, gradient, pass.storage, pass.stream); },
      [=, storage = pass.storage](const LossRows& c, int64_t n) {
        const bool counts = c.target[n] != nn::kIgnoredTarget;
        const RowTotal total = total_of(c, n);
        const float lse = total.max + log(total.sum);
        c.loss[n] = counts ? lse - total.target : 0;
        if (!gradient) return;
        if (counts) {
          nn::row_gradient(row(c, n), c.columns, gradient_factor(c, n, total, lse, z_coef),
                           column_of(c, n), row(c, n), storage);
        } else {
          std::memset(row(c, n), 0, byte_size(storage, c.columns));
        }
      });
}

// Computes dx of own tokens, and adds to main_grad, each if it is defined.
void chunk_gradients(const Pass& pass, const ParallelCrossEntropyArgs& a, const Chunk& c,
                     TensorView dx, bool accumulate) {
  ArenaScope temporaries(pass.arena);
  const int64_t rows = c.rows(), columns = c.columns();
  const int64_t stride = columns * bits(DType::kFloat32) / bits(pass.storage);
  const TensorView dlogits(c.logits_NV.raw(), pass.storage, std::array{rows, columns},
                           std::array{stride, int64_t{1}}, c.logits_NV.device());
  if (a.grad_VD.defined() && columns > 0) {
    nn::linear_weight_gradient(dlogits, c.x_ND, a.grad_VD, accumulate, pass.stream);
  }
  if (!dx.defined()) return;
  const TensorView partial = partial_tensor(pass, rows, dx.size(1));
  if (columns == 0) {
    fill_bytes(partial, 0, pass.stream);
  } else {
    nn::linear_input_gradient(dlogits, a.head_VD, partial, {}, pass.stream);
  }
  sum_parts_to_own(pass, partial, {}, dx);
}

void chunk_loss(const Pass& pass, const ParallelCrossEntropyArgs& a, int64_t begin, int64_t end) {
  ArenaScope temporaries(pass.arena);
  const int64_t rows = pass.tp_ranks() * (end - begin);
  const auto floats = [&](std::initializer_list<int64_t> sizes) {
    return pass.arena.tensor(DType::kFloat32, sizes);
  };
  const Chunk c{.x_ND = pass.tensor({rows, a.x_TD.size(1)}),
                .logits_NV = floats({rows, a.head_VD.size(0)}),
                .target_N = pass.arena.tensor(DType::kInt32, {rows}),
                .loss_N = a.loss_T.slice(0, pass.tp_ranks() * begin, pass.tp_ranks() * end),
                .own_WN = floats({kRowWords, rows}),
                .all_RWN = floats({pass.tp_ranks() * kRowWords, rows}),
                .slice = a.slice};
  chunk_targets(pass, a, begin, end, c.target_N);
  gather_parts(pass, a.x_TD.slice(0, begin, end), c.x_ND);
  if (c.columns() > 0) nn::linear(c.x_ND, a.head_VD, c.logits_NV, {}, pass.stream);
  exchange_rows(pass, c);
  finish_rows(pass, c, a.z_coef, a.gradients());
  if (!a.gradients()) return;
  const TensorView dx = a.dx_TD.defined() ? a.dx_TD.slice(0, begin, end) : TensorView();
  chunk_gradients(pass, a, c, dx, a.accumulate || begin > 0);
}

}  // namespace

void parallel_cross_entropy(const Pass& pass, const ParallelCrossEntropyArgs& a) {
  const char* operation = "parallel_cross_entropy";
  const int64_t own = pass.own_tokens(), d_model = a.x_TD.size(-1), columns = a.head_VD.size(0);
  MOIETY_CHECK(a.chunk >= 1, "{}: chunk is {}", operation, a.chunk);
  check_tensor(operation, "x", a.x_TD, pass.storage, {own, d_model});
  check_tensor(operation, "head", a.head_VD, pass.storage, {columns, d_model});
  check_tensor(operation, "target", a.target_T, DType::kInt32, {pass.tokens()});
  if (a.mask_T.defined()) {
    check_tensor(operation, "mask", a.mask_T, DType::kUInt8, {pass.tokens()});
  }
  check_tensor(operation, "loss", a.loss_T, DType::kFloat32, {pass.tokens()});
  if (a.dx_TD.defined()) check_tensor(operation, "dx", a.dx_TD, pass.storage, {own, d_model});
  if (a.grad_VD.defined()) {
    check_tensor(operation, "grad", a.grad_VD, DType::kFloat32, {columns, d_model});
  }
  const TraceSpan span(TraceLane::kCompute, operation,
                       {{"tokens", pass.tokens()}, {"vocabulary", columns}});
  for (int64_t begin = 0; begin < own; begin += a.chunk) {
    chunk_loss(pass, a, begin, std::min(begin + a.chunk, own));
  }
}

}  // namespace moiety::model
