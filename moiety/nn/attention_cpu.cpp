// The fast path of attention: blocks of 32 queries by 64 keys in float. A task is one head (in
// backward one group of heads, so that dk and dv are summed in place). Keys and values that are the
// right operand of a product with C as the inner dimension lie in panels: [key / 16][c][key % 16].
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "moiety/base/integer.h"
#include "moiety/base/math.h"
#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/nn/attention.h"
#include "moiety/nn/block_product.h"
#include "moiety/nn/element.h"
#include "moiety/nn/scratch.h"

namespace moiety::nn {
namespace {

constexpr int64_t kQueries = 32, kKeys = 64, kPanel = 16, kMaxHeadDim = 256;
constexpr float kLowest = std::numeric_limits<float>::lowest();

// Rows of one head in storage: row i is at data + i * stride (elements).
struct StoredRows {
  void* data = nullptr;
  int64_t stride = 0;
  bool half = false;  // bf16, else float

  StoredRows(const TensorView& x, int64_t b, int64_t g, int64_t m)
      : stride(x.stride(1)), half(x.dtype() == DType::kBFloat16) {
    const int64_t head = x.dims() == 5 ? m * x.stride(3) : 0;
    data = static_cast<std::byte*>(x.raw()) +
           byte_size(x.dtype(), b * x.stride(0) + g * x.stride(2) + head);
  }
};

template <class T>
MOIETY_INLINE void load_body(const T* x, int64_t stride, int64_t rows, int64_t n, float* out,
                             int64_t out_stride) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < n; ++c) out[i * out_stride + c] = static_cast<float>(x[i * stride + c]);
    for (int64_t c = n; c < out_stride; ++c) out[i * out_stride + c] = 0.0f;
  }
}

// Loads rows [first, first + rows) into float rows of `out_stride`. The rest of a row is zero, and
// so are the rows up to `padded`.
MOIETY_SIMD_CLONES void load(const StoredRows& x, int64_t first, int64_t rows, int64_t n,
                             float* out, int64_t out_stride, int64_t padded) {
  const int64_t offset = first * x.stride;
  if (x.half) {
    load_body(static_cast<const bf16*>(x.data) + offset, x.stride, rows, n, out, out_stride);
  } else {
    load_body(static_cast<const float*>(x.data) + offset, x.stride, rows, n, out, out_stride);
  }
  std::fill(out + rows * out_stride, out + padded * out_stride, 0.0f);
}

// Stores x[i] := factor[i] * rows[i], rounded; without factors x[i] := rows[i].
MOIETY_SIMD_CLONES void store(const float* rows, int64_t row_stride, const float* factor,
                              const StoredRows& x, int64_t first, int64_t count, int64_t n) {
  for (int64_t i = 0; i < count; ++i) {
    const float f = factor ? factor[i] : 1.0f;
    const float* from = rows + i * row_stride;
    const int64_t offset = (first + i) * x.stride;
    if (x.half) {
      bf16* to = static_cast<bf16*>(x.data) + offset;
      for (int64_t c = 0; c < n; ++c) to[c] = static_cast<bf16>(f * from[c]);
    } else {
      float* to = static_cast<float*>(x.data) + offset;
      for (int64_t c = 0; c < n; ++c) to[c] = f * from[c];
    }
  }
}

// Makes panels of the first n columns of float rows [padded][stride].
void make_panels(const float* rows, int64_t stride, int64_t padded, int64_t n, float* panels) {
  for (int64_t p = 0; p < padded; p += kPanel) {
    for (int64_t c = 0; c < n; ++c) {
      float* out = panels + p * n + c * kPanel;
      for (int64_t l = 0; l < kPanel; ++l) out[l] = rows[(p + l) * stride + c];
    }
  }
}

// The sizes of one task, which is a head in forward and a group of heads in backward.
struct Shape {
  explicit Shape(const AttentionArgs& a)
      : queries(a.q_BSGMC.size(1)),
        keys(a.k_BSGC.size(1)),
        n(a.q_BSGMC.size(4)),
        offset(keys - queries),
        padded_keys(round_up(keys, kPanel)),
        padded_n(round_up(n, kPanel)),
        scale(1.0f / std::sqrt(static_cast<float>(n))) {}
  int64_t queries, keys, n;  // n = C
  int64_t offset;            // position of query 0
  int64_t padded_keys, padded_n;
  float scale;
};

const int32_t* document_starts(const AttentionArgs& a, int64_t b) {
  const TensorView& start = a.document_start_BS;
  return start.defined() ? start.data<int32_t>() + b * start.size(1) : nullptr;
}

float* lse_row(const AttentionArgs& a, int64_t b, int64_t g, int64_t m) {
  const TensorView& lse = a.lse_BGMS;
  return lse.data<float>() + ((b * lse.size(1) + g) * lse.size(2) + m) * lse.size(3);
}

// The keys that the queries of a block see: row r sees the sequence's keys [low[r], high[r]);
// padding rows see none.
struct Window {
  Window(const Shape& s, const int32_t* start, int64_t query, int64_t rows_in) : rows(rows_in) {
    for (int64_t r = 0; r < kQueries; ++r) {
      low[r] = start && r < rows ? start[query + r] : 0;
      high[r] = r < rows ? static_cast<int32_t>(s.offset + query + r + 1) : 0;
    }
    begin = low[0] / kPanel * kPanel;
    end = s.offset + query + rows;
    padded_rows = round_up(rows, 4);
  }
  int32_t low[kQueries], high[kQueries];
  int64_t begin, end;  // range of the keys of all rows
  int64_t rows, padded_rows;
};

// Number of columns of the block that starts at `key`.
int64_t block_columns(const Window& w, int64_t key) {
  return std::min(kKeys, round_up(w.end - key, kPanel));
}

// The columns of a block that row r sees: [first, last), both within the block.
struct Seen {
  Seen(const Window& w, int64_t r, int64_t key, int64_t columns)
      : first(std::clamp<int64_t>(w.low[r] - key, 0, columns)),
        last(std::clamp<int64_t>(w.high[r] - key, first, columns)) {}
  int64_t first, last;
};
MOIETY_INLINE void fill_unseen(const Seen& seen, int64_t columns, float value, float* row) {
  if (seen.first > 0) std::fill_n(row, seen.first, value);
  if (seen.last < columns) std::fill(row + seen.last, row + columns, value);
}

// Sums and maxima over columns run in 16 lanes that are folded at the end; the pragma keeps the
// loop over lanes whole, for the vectorizer.
template <class Fold>
MOIETY_INLINE float fold_row(const float* x, int64_t columns, float init, Fold&& fold) {
  float lane[kPanel];
  for (int l = 0; l < kPanel; ++l) lane[l] = init;
  for (int64_t c = 0; c < columns; c += kPanel) {
#pragma GCC unroll 1
    for (int l = 0; l < kPanel; ++l) lane[l] = fold(lane[l], x[c + l]);
  }
  for (int half = kPanel / 2; half >= 1; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] = fold(lane[l], lane[l + half]);
  }
  return lane[0];
}

struct Softmax {
  float max[kQueries];
  float sum[kQueries];
};

// Turns the scores of one block into probabilities relative to the running maximum; o and the sums
// are scaled to the new maximum.
MOIETY_SIMD_CLONES void softmax_block(const Window& w, int64_t key, int64_t columns, float scale,
                                      float* s, Softmax& state, float* o, int64_t n) {
  for (int64_t r = 0; r < w.rows; ++r, s += kKeys, o += n) {
    for (int64_t c = 0; c < columns; ++c) s[c] *= scale;
    fill_unseen(Seen(w, r, key, columns), columns, -std::numeric_limits<float>::infinity(), s);
    const float max = fold_row(
        s, columns, state.max[r],
        [](float a, float b) __attribute__((always_inline)) { return b > a ? b : a; });
    for (int64_t c = 0; c < columns; ++c) s[c] = exp_nonpositive(s[c] - max);
    const float sum = fold_row(
        s, columns, 0.0f, [](float a, float b) __attribute__((always_inline)) { return a + b; });
    const float decay = exp_nonpositive(state.max[r] - max);
    for (int64_t c = 0; c < n; ++c) o[c] *= decay;
    state.sum[r] = state.sum[r] * decay + sum;
    state.max[r] = max;
  }
}

// Writes lse of finished rows and turns their sums into the factors of o.
MOIETY_SIMD_CLONES void finish_rows(int64_t rows, Softmax& state, float* lse) {
  for (int64_t r = 0; r < rows; ++r) {
    lse[r] = state.max[r] + log(state.sum[r]);
    state.sum[r] = 1.0f / state.sum[r];
  }
}

// Turns s from scores to P, and dp to dS = scale P (dP - delta).
MOIETY_SIMD_CLONES void gradient_block(const Window& w, int64_t key, int64_t columns, float scale,
                                       const float* lse, const float* delta, float* s, float* dp) {
  for (int64_t r = 0; r < w.padded_rows; ++r, s += kKeys, dp += kKeys) {
    const Seen seen(w, r, key, columns);
    const float lse_r = lse[r], delta_r = delta[r];
    for (int64_t c = 0; c < columns; ++c) s[c] = exp_nonpositive(s[c] * scale - lse_r);
    fill_unseen(seen, columns, 0.0f, s);
    for (int64_t c = 0; c < columns; ++c) dp[c] = scale * s[c] * (dp[c] - delta_r);
    fill_unseen(seen, columns, 0.0f, dp);
  }
}

MOIETY_SIMD_CLONES void row_dots(const float* a, const float* b, int64_t stride, float* out) {
  for (int64_t r = 0; r < kQueries; ++r, a += stride, b += stride) {
    float product[kMaxHeadDim];
    for (int64_t c = 0; c < stride; ++c) product[c] = a[c] * b[c];
    out[r] = fold_row(
        product, stride, 0.0f,
        [](float x, float y) __attribute__((always_inline)) { return x + y; });
  }
}

// The product of rows [m][stride] and panels, with C as the inner dimension.
BlockProduct scores(const Shape& s, const Window& w, const float* rows, const float* panels,
                    int64_t key, int64_t columns, float* out) {
  return {.m = w.padded_rows,
          .n = columns,
          .k = s.n,
          .a = rows,
          .a_m = s.padded_n,
          .b = panels + key * s.n,
          .b_k = kPanel,
          .b_n = s.n * kPanel,
          .c = out,
          .c_m = kKeys};
}

void forward_head(const AttentionArgs& a, int64_t b, int64_t g, int64_t m) {
  const Shape s(a);
  const StoredRows q(a.q_BSGMC, b, g, m), o(a.o_BSGMC, b, g, m);
  const int32_t* start = document_starts(a, b);
  float* lse = lse_row(a, b, g, m);
  float* v_rows = thread_scratch<float>(2 * s.padded_keys * s.padded_n + 2 * kQueries * s.padded_n +
                                        kQueries * kKeys);
  float* k_panels = v_rows + s.padded_keys * s.padded_n;
  float* q_rows = k_panels + s.padded_keys * s.padded_n;
  float* o_rows = q_rows + kQueries * s.padded_n;
  float* score = o_rows + kQueries * s.padded_n;

  load(StoredRows(a.k_BSGC, b, g, 0), 0, s.keys, s.n, v_rows, s.padded_n, s.padded_keys);
  make_panels(v_rows, s.padded_n, s.padded_keys, s.n, k_panels);
  load(StoredRows(a.v_BSGC, b, g, 0), 0, s.keys, s.n, v_rows, s.padded_n, s.padded_keys);
  for (int64_t query = 0; query < s.queries; query += kQueries) {
    const Window w(s, start, query, std::min(kQueries, s.queries - query));
    load(q, query, w.rows, s.n, q_rows, s.padded_n, kQueries);
    std::fill_n(o_rows, kQueries * s.padded_n, 0.0f);
    Softmax state;
    std::fill_n(state.max, kQueries, kLowest);
    std::fill_n(state.sum, kQueries, 0.0f);
    for (int64_t key = w.begin; key < w.end; key += kKeys) {
      const int64_t columns = block_columns(w, key);
      block_product(scores(s, w, q_rows, k_panels, key, columns, score));
      softmax_block(w, key, columns, s.scale, score, state, o_rows, s.padded_n);
      block_product({.m = w.padded_rows,
                     .n = s.padded_n,
                     .k = columns,
                     .a = score,
                     .a_m = kKeys,
                     .b = v_rows + key * s.padded_n,
                     .b_k = s.padded_n,
                     .c = o_rows,
                     .c_m = s.padded_n,
                     .accumulate = true});
    }
    finish_rows(w.rows, state, lse + query);
    store(o_rows, s.padded_n, state.sum, o, query, w.rows, s.n);
  }
}

// Scratch of a backward task; pointers say what they belong to.
struct Backward {
  explicit Backward(const Shape& s) {
    const int64_t keys = s.padded_keys * s.padded_n, block = kQueries * s.padded_n;
    float* next = thread_scratch<float>(5 * keys + 4 * block + 2 * kQueries * kKeys);
    for (float** p : {&k_rows, &k_panels, &v_panels, &dk, &dv}) {
      *p = std::exchange(next, next + keys);
    }
    for (float** p : {&q, &o, &d_out, &dq}) *p = std::exchange(next, next + block);
    score = next;
    d_score = next + kQueries * kKeys;
  }
  float *k_rows, *k_panels, *v_panels, *dk, *dv;  // of the group
  float *q, *o, *d_out, *dq;                      // of the query block
  float *score, *d_score;                         // of the block of queries and keys
};

// Adds one block of keys' part of dv, dk and dq.
void backward_block(const Shape& s, const Window& w, const Backward& x, int64_t key,
                    const float* lse, const float* delta) {
  const int64_t columns = block_columns(w, key), n = s.padded_n;
  block_product(scores(s, w, x.q, x.k_panels, key, columns, x.score));
  block_product(scores(s, w, x.d_out, x.v_panels, key, columns, x.d_score));
  gradient_block(w, key, columns, s.scale, lse, delta, x.score, x.d_score);
  BlockProduct p{.m = columns,
                 .n = n,
                 .k = w.rows,
                 .a = x.score,
                 .a_m = 1,
                 .a_k = kKeys,
                 .b = x.d_out,
                 .b_k = n,
                 .c = x.dv + key * n,
                 .c_m = n,
                 .accumulate = true};
  block_product(p);
  p.a = x.d_score;
  p.b = x.q;
  p.c = x.dk + key * n;
  block_product(p);
  block_product({.m = w.padded_rows,
                 .n = n,
                 .k = columns,
                 .a = x.d_score,
                 .a_m = kKeys,
                 .b = x.k_rows + key * n,
                 .b_k = n,
                 .c = x.dq,
                 .c_m = n,
                 .accumulate = true});
}

void backward_head(const AttentionBackwardArgs& a, const Shape& s, const Backward& x, int64_t b,
                   int64_t g, int64_t m) {
  const AttentionArgs& f = a.forward;
  const int32_t* start = document_starts(f, b);
  const float* lse = lse_row(f, b, g, m);
  const StoredRows q(f.q_BSGMC, b, g, m), o(f.o_BSGMC, b, g, m), d_out(a.do_BSGMC, b, g, m);
  const StoredRows dq(a.dq_BSGMC, b, g, m);
  for (int64_t query = 0; query < s.queries; query += kQueries) {
    const Window w(s, start, query, std::min(kQueries, s.queries - query));
    load(q, query, w.rows, s.n, x.q, s.padded_n, kQueries);
    load(o, query, w.rows, s.n, x.o, s.padded_n, kQueries);
    load(d_out, query, w.rows, s.n, x.d_out, s.padded_n, kQueries);
    std::fill_n(x.dq, kQueries * s.padded_n, 0.0f);
    float delta[kQueries], lse_block[kQueries] = {};
    std::copy_n(lse + query, w.rows, lse_block);
    row_dots(x.o, x.d_out, s.padded_n, delta);
    for (int64_t key = w.begin; key < w.end; key += kKeys) {
      backward_block(s, w, x, key, lse_block, delta);
    }
    store(x.dq, s.padded_n, nullptr, dq, query, w.rows, s.n);
  }
}

void backward_group(const AttentionBackwardArgs& a, int64_t b, int64_t g) {
  const Shape s(a.forward);
  const Backward x(s);
  load(StoredRows(a.forward.v_BSGC, b, g, 0), 0, s.keys, s.n, x.k_rows, s.padded_n, s.padded_keys);
  make_panels(x.k_rows, s.padded_n, s.padded_keys, s.n, x.v_panels);
  load(StoredRows(a.forward.k_BSGC, b, g, 0), 0, s.keys, s.n, x.k_rows, s.padded_n, s.padded_keys);
  make_panels(x.k_rows, s.padded_n, s.padded_keys, s.n, x.k_panels);
  std::fill_n(x.dk, s.padded_keys * s.padded_n, 0.0f);
  std::fill_n(x.dv, s.padded_keys * s.padded_n, 0.0f);
  for (int64_t m = 0; m < a.forward.q_BSGMC.size(3); ++m) backward_head(a, s, x, b, g, m);
  store(x.dk, s.padded_n, nullptr, StoredRows(a.dk_BSGC, b, g, 0), 0, s.keys, s.n);
  store(x.dv, s.padded_n, nullptr, StoredRows(a.dv_BSGC, b, g, 0), 0, s.keys, s.n);
}

}  // namespace

void attention_cpu(const AttentionArgs& a) {
  const int64_t groups = a.q_BSGMC.size(2), heads = a.q_BSGMC.size(3);
  parallel_tasks(a.q_BSGMC.size(0) * groups * heads, [&](int64_t i) {
    forward_head(a, i / (groups * heads), i / heads % groups, i % heads);
  });
}

void attention_backward_cpu(const AttentionBackwardArgs& a) {
  const int64_t groups = a.forward.q_BSGMC.size(2);
  parallel_tasks(a.forward.q_BSGMC.size(0) * groups,
                 [&](int64_t i) { backward_group(a, i / groups, i % groups); });
}

}  // namespace moiety::nn
