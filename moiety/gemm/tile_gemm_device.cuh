// Device code that both tile products share: the tile that a block works on, the places of its
// operands, and the epilogue of its accumulators.
#pragma once

#include "moiety/formats/octet.cuh"
#include "moiety/gemm/mma_device.cuh"
#include "moiety/gemm/tile_gemm.h"

namespace moiety::gemm::device {

// A tile of the product of a group: rows from i on, columns from j on.
struct Tile {
  int64_t group = -1;  // counted from groups.first; -1 if there is no tile
  int64_t begin = 0;   // the group's first row in the buffers
  int64_t m = 0, k = 0;
  int64_t i = 0, j = 0;
};

// The tiles of `kRows` rows and `kColumns` columns, in the order in which blocks take them. All
// threads of a warp call together.
template <int kRows, int kColumns>
class TileWalk {
 public:
  __device__ explicit TileWalk(const TileGemm& g)
      : g_(g), columns_((g.n + kColumns - 1) / kColumns) {}

  // `index` ascends from call to call.
  __device__ Tile at(int64_t index) {
    if (g_.ragged == Ragged::kRows) return of_ragged_rows(index);
    const int64_t rows = (g_.m + kRows - 1) / kRows, tiles = rows * columns_;
    Tile t{.m = g_.m, .k = g_.k};
    if (tiles == 0 || index >= g_.groups.groups * tiles) return t;
    t.group = index / tiles;
    place(t, index - t.group * tiles, rows);
    if (g_.ragged == Ragged::kReduction) {
      const quant::Claim c = claim(g_.groups, t.group);
      t.begin = c.valid ? c.begin : 0;
      t.k = c.valid ? c.rows : 0;
    }
    return t;
  }

 private:
  // Row tiles that share columns, so that the part of `b` that they read is read from the cache.
  static constexpr int64_t kBand = 8;

  __device__ void place(Tile& t, int64_t index, int64_t rows) const {
    const int64_t band = index / (kBand * columns_), inner = index - band * kBand * columns_;
    const int64_t height = min(kBand, rows - band * kBand), column = inner / height;
    t.i = (band * kBand + inner - column * height) * kRows;
    t.j = column * kColumns;
  }

  // Each lane has one of 32 groups, from group_ on; their tiles begin at tile_.
  __device__ Tile of_ragged_rows(int64_t index) {
    const int lane = threadIdx.x % 32;
    for (; group_ < g_.groups.groups; group_ += 32) {
      quant::Claim c{0, 0, false};
      if (group_ + lane < g_.groups.groups) c = claim(g_.groups, group_ + lane);
      const int64_t rows = c.valid ? c.rows : 0;
      const int64_t own = (rows + kRows - 1) / kRows * columns_;
      int64_t end = own;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t before = __shfl_up_sync(~0u, end, distance);
        if (lane >= distance) end += before;
      }
      end += tile_;
      const unsigned past = __ballot_sync(~0u, index < end);
      if (past == 0) {
        tile_ = __shfl_sync(~0u, end, 31);
        continue;
      }
      const int owner = __ffs(past) - 1;
      Tile t{.group = group_ + owner, .k = g_.k};
      t.begin = __shfl_sync(~0u, c.begin, owner);
      t.m = __shfl_sync(~0u, rows, owner);
      place(t, index - __shfl_sync(~0u, end - own, owner), (t.m + kRows - 1) / kRows);
      return t;
    }
    return {};
  }

  const TileGemm& g_;
  int64_t columns_;
  int64_t group_ = 0, tile_ = 0;
};

// The rows of an operand that a tile reads, from its row r = 0 on.
template <class T>
struct TileRows {
  const T* data;  // at the tile's column 0
  int64_t stride;
  const int32_t* source;  // of row 0
  int64_t sources;
  int64_t rows, columns;  // that exist
  bool aligned;           // pieces of 16 bytes lie at multiples of 16

  // Row r; null if it holds zeros.
  __device__ const T* row(int64_t r) const {
    if (r >= rows) return nullptr;
    if (source) {
      r = source[r];
      if (r < 0 || r >= sources) return nullptr;
    }
    return data + r * stride;
  }
};

// `first` and `column` are the place of the tile's first element in the operand.
template <class T>
__device__ TileRows<T> tile_rows(const ProductOperand& x, const void* data, int64_t first,
                                 int64_t rows, int64_t column, int64_t columns) {
  TileRows<T> out{static_cast<const T*>(data) + column,
                  x.stride,
                  x.source ? x.source + first : nullptr,
                  x.sources,
                  rows,
                  columns,
                  false};
  if (!x.source) out.data += first * x.stride;
  out.aligned = (reinterpret_cast<uintptr_t>(out.data) | (x.stride * sizeof(T))) % 16 == 0;
  return out;
}

// The matrix of the tile's group: `data` unless each group has one.
__device__ inline const void* group_data(const TileGemm& g, const Tile& t, const void* data,
                                         int64_t item) {
  if (g.indexed) return g.pointers[t.group];
  return static_cast<const char*>(data) + t.group * g.group_stride * item;
}

template <class T, GemmOp kOp>
__device__ TileRows<T> left_rows(const TileGemm& g, const Tile& t) {
  if constexpr (kOp == GemmOp::kNT) {
    return tile_rows<T>(g.a, g.a.data, t.begin, t.k, t.i, g.m - t.i);
  } else if (g.ragged == Ragged::kReduction) {  // groups are ranges of columns
    return tile_rows<T>(g.a, g.a.data, t.i, t.m - t.i, t.begin, t.k);
  } else {
    return tile_rows<T>(g.a, g.a.data, t.begin + t.i, t.m - t.i, 0, t.k);
  }
}

template <class T, GemmOp kOp>
__device__ TileRows<T> right_rows(const TileGemm& g, const Tile& t) {
  const void* data = g.ragged == Ragged::kRows ? group_data(g, t, g.b.data, sizeof(T)) : g.b.data;
  if constexpr (kOp == GemmOp::kTN) {
    const int64_t column = g.ragged == Ragged::kReduction ? t.begin : 0;
    return tile_rows<T>(g.b, data, t.j, g.n - t.j, column, t.k);
  } else {
    const int64_t first = g.ragged == Ragged::kReduction ? t.begin : 0;
    return tile_rows<T>(g.b, data, first, t.k, t.j, g.n - t.j);
  }
}

__device__ inline float factor(const ProductFactor& f, const TileGemm& g, const Tile& t) {
  return f.of(g.groups.first + t.group);
}

// The block scales of a slice of the reduction.
struct SliceScales {
  const float* a;
  const float* b;

  __device__ SliceScales(const TileGemm& g, const Tile& t, int64_t slice) {
    if (g.ragged == Ragged::kReduction) slice += t.begin / kScaledSlice;
    a = g.a_scales.data + slice * g.a_scales.slice_stride;
    b = g.b_scales.data + slice * g.b_scales.slice_stride;
    if (g.ragged == Ragged::kRows) b += (g.groups.first + t.group) * g.b_scales_group;
  }
};
__device__ inline float block_scale(const BlockScales& s, const float* slice, int64_t row) {
  return slice[row / s.rows * s.stride];
}

// The epilogue of gemm.h and grouped_gemm.h for the elements of a tile.
class TileEpilogue {
 public:
  __device__ TileEpilogue(const TileGemm& g, const Tile& t, int columns)
      : e_(g.epilogue), rows_(t.m), columns_(g.n) {
    a_scale_ = factor(e_.a_scale, g, t);
    b_scale_ = factor(e_.b_scale, g, t);
    alpha_ = factor(e_.alpha, g, t);
    beta_ = factor(e_.beta, g, t);
    first_row_ = g.ragged == Ragged::kRows ? t.begin : 0;
    out_ = e_.out;
    old_ = e_.old;
    if (g.ragged == Ragged::kReduction) {
      out_ = const_cast<void*>(group_data(g, t, e_.out, item(e_.out_dtype)));
      old_ = out_;
    }
    bias_ = (g.groups.first + t.group) * g.n;
    whole_ = t.j + columns <= g.n && pairs_fit(out_, e_.out_dtype, e_.out_stride) &&
             (beta_ == 0 || pairs_fit(old_, e_.old_dtype, e_.old_stride));
  }

  // Stores accumulators of the group's product, for rows row(r) that exist, at columns column(p)
  // and the next. Everything is read before anything is written, since outputs may be inputs.
  template <int kRows, int kPairs, class Row, class Column>
  __device__ void store(Row&& row, float2 (&v)[kRows][kPairs], Column&& column) const {
    whole_ ? store_pairs<true>(row, v, column) : store_pairs<false>(row, v, column);
  }

  // Begins to bring the old elements of a tile of `tile_rows` and `tile_columns` to the L2 cache.
  template <int kThreads>
  __device__ void prefetch(const Tile& t, int tile_rows, int tile_columns) const {
    if (beta_ == 0) return;
    constexpr int kLine = 128;  // bytes
    const int64_t each = item(e_.old_dtype);
    const int lines = tile_columns * static_cast<int>(each) / kLine;
    for (int n = threadIdx.x; n < tile_rows * lines; n += kThreads) {
      const int64_t row = t.i + n / lines, column = t.j + n % lines * (kLine / each);
      if (row >= t.m || column >= columns_) continue;
      const int64_t at = (first_row_ + row) * e_.old_stride + column;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(old_) + at * each));
    }
  }

 private:
  __device__ static int64_t item(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
  // Whether pairs at even columns are aligned to their size.
  __device__ static bool pairs_fit(const void* data, DType dtype, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % (2 * item(dtype)) == 0 && stride % 2 == 0;
  }

  // kWhole says that all columns exist and pairs are aligned.
  template <bool kWhole, int kRows, int kPairs, class Row, class Column>
  __device__ void store_pairs(Row&& row, float2 (&v)[kRows][kPairs], Column&& column) const {
    for_pairs<kRows, kPairs>([&](int r, int p) {
      v[r][p] = {scaled(v[r][p].x), scaled(v[r][p].y)};
    });
    if (beta_ != 0) {
      float2 old[kRows][kPairs];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t i = row(r), at = (first_row_ + i) * e_.old_stride;
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          old[r][p] = i < rows_ ? load<kWhole>(old_, e_.old_dtype, at, column(p)) : float2{};
        }
      }
      for_pairs<kRows, kPairs>([&](int r, int p) {
        v[r][p] = {fmaf(beta_, old[r][p].x, v[r][p].x), fmaf(beta_, old[r][p].y, v[r][p].y)};
      });
    }
    if (e_.bias) add_bias(row, v, column);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t i = row(r), at = (first_row_ + i) * e_.out_stride;
      if (i >= rows_) continue;
#pragma unroll
      for (int p = 0; p < kPairs; ++p) put<kWhole>(at, column(p), v[r][p]);
    }
  }
  template <int kRows, int kPairs, class Run>
  __device__ static void for_pairs(Run&& run) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPairs; ++p) run(r, p);
    }
  }

  template <int kRows, int kPairs, class Row, class Column>
  __device__ void add_bias(Row&& row, float2 (&v)[kRows][kPairs], Column&& column) const {
    const auto* scales = static_cast<const float*>(e_.bias_scale);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t i = row(r);
      if (i >= rows_) continue;
      const float scale = scales ? scales[first_row_ + i] : 1;  // v + b * 1 rounds once too
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const float2 b = load<false>(e_.bias, e_.bias_dtype, bias_, column(p));
        v[r][p] = {fmaf(b.x, scale, v[r][p].x), fmaf(b.y, scale, v[r][p].y)};
      }
    }
  }

  __device__ float scaled(float x) const {
    return __fmul_rn(__fmul_rn(__fmul_rn(x, a_scale_), b_scale_), alpha_);
  }
  // Two elements of a row; zeros past its end.
  template <bool kWhole>
  __device__ float2 load(const void* data, DType dtype, int64_t row, int64_t column) const {
    const bool first = column < columns_, second = column + 1 < columns_;
    if (dtype == DType::kFloat32) {
      const float* x = static_cast<const float*>(data) + row + column;
      if (kWhole) return *reinterpret_cast<const float2*>(x);
      return {first ? x[0] : 0, second ? x[1] : 0};
    }
    const bf16* x = static_cast<const bf16*>(data) + row + column;
    if (kWhole) {
      const uint32_t both = *reinterpret_cast<const uint32_t*>(x);
      return {low_bf16(both), high_bf16(both)};
    }
    return {first ? float(x[0]) : 0, second ? float(x[1]) : 0};
  }
  template <bool kWhole>
  __device__ void put(int64_t row, int64_t column, float2 v) const {
    const bool first = column < columns_, second = column + 1 < columns_;
    if (e_.out_dtype == DType::kFloat32) {
      float* x = static_cast<float*>(out_) + row + column;
      if (kWhole) {
        *reinterpret_cast<float2*>(x) = v;
      } else {
        if (first) x[0] = v.x;
        if (second) x[1] = v.y;
      }
      return;
    }
    bf16* x = static_cast<bf16*>(out_) + row + column;
    if (kWhole) {
      *reinterpret_cast<uint32_t*>(x) = bf16_word(v.x, v.y);
    } else {
      if (first) x[0] = bf16(v.x);
      if (second) x[1] = bf16(v.y);
    }
  }

  const Epilogue& e_;
  int64_t rows_, columns_;
  float a_scale_, b_scale_, alpha_, beta_;
  int64_t first_row_, bias_;
  void* out_;
  const void* old_;
  bool whole_;
};

}  // namespace moiety::gemm::device
