// The epilogue of gemm.h and grouped_gemm.h on the accumulators of a warp group: 64 rows of a tile.
#pragma once

#include "moiety/gemm/sm90/old_values.cuh"
#include "moiety/gemm/sm90/stages.cuh"

namespace moiety::gemm::sm90 {

// The transpose of a warp's 16 rows of `kEights` times 8 columns of bf16, in a box of as many rows of
// 128 bytes, of which other warps write the rest.
template <int kEights>
__device__ __forceinline__ void write_transposed_box(uint32_t to, const uint32_t* words, int warp,
                                                     int lane) {
  const int in_eight = lane % 8, piece = 2 * warp + lane / 8 % 2;
  to += (lane / 16 * 8 + in_eight) * 128 + (piece ^ in_eight) * 16;
#pragma unroll
  for (int j = 0; j < kEights; j += 2) {
    store_transposed(to + j * 8 * 128, words[2 * j], words[2 * j + 1], words[2 * j + 2],
                     words[2 * j + 3]);
  }
}

template <GemmOp kOp, int kColumns, class L>
class Storer {
 public:
  static constexpr int kRound = L::kRound, kRounds = L::kBuffers / kRound;
  static constexpr int kHeld = kColumns / 2;  // accumulators of a thread

  __device__ Storer(const TileGemm& g, const Maps& maps, uint32_t base, int group)
      : g_(g),
        maps_(maps),
        e_(g.epilogue),
        buffers_(base + L::kStore + group * L::kBuffers * kPiece),
        group_(group),
        warp_(__shfl_sync(~0u, threadIdx.x % kWarpGroup / 32, 0)),
        lane_(threadIdx.x % 32) {}

  // Asks for old values of a half of a tile, before it is multiplied, where reading and writing
  // them is faster than adding in the L2 cache, which adds 1.1 TB/s and no more: where few rows make
  // the products short.
  __device__ void expect(const Tile& t, int half) {
    if constexpr (kOp != GemmOp::kNT && !L::kGathers) ask_for_old(t, half);
    reads_ = false;
    if constexpr (kAhead > 0) {
      reads_ = t.depth > 0 && g_.groups.capacity <= kFewRows * g_.groups.groups && g_.n % 2 == 0 &&
               e_.out_dtype == DType::kFloat32 && e_.beta.of(g_.groups.first + t.group) == 1;
      if (!reads_) return;
      first_row_ = 64 * half;
      old_rows_ = rows_left(t) - row(0);
      old_columns_ = static_cast<int>(g_.n) - t.column - lane_ % 4 * 2;
      old_at_ = static_cast<const float*>(matrix(t)) + first_element(t) + row(0) * e_.out_stride +
                t.column + lane_ % 4 * 2;
#pragma unroll
      for (int box = 0; box < kAhead; ++box) read_old(box);
    }
  }

  // The half of a tile that the group has multiplied, the kOwn-th of its own.
  template <int kOwn = 0>
  __device__ void store(const Tile& t, int half, float (&d)[kHeld]) {
    first_row_ = 64 * half;
    const int64_t group = g_.groups.first + t.group;
    const float a_scale = e_.a_scale.of(group), b_scale = e_.b_scale.of(group);
    const float alpha = e_.alpha.of(group), beta = e_.beta.of(group);
    if (a_scale != 1 || b_scale != 1 || alpha != 1) {
#pragma unroll
      for (float& v : d) v = __fmul_rn(__fmul_rn(__fmul_rn(v, a_scale), b_scale), alpha);
    }
    const bool fp32 = e_.out_dtype == DType::kFloat32;
    if (kOp == GemmOp::kNT && t.depth == 0 && beta == 1) return;  // nothing is added
    // The engine adds 1 * old with one rounding.
    const bool add = kOp == GemmOp::kNT && fp32 && beta == 1;
    if (beta != 0 && !add) add_scaled(t, d, beta);
    if (kOp == GemmOp::kTN && e_.bias) add_bias(t, d, group);
    if constexpr (kAhead > 0) {
      if (reads_) return store_fp32<true>(t, d, false);
    }
    fp32 ? store_fp32<false>(t, d, add) : store_bf16<kOwn>(t, d);
  }

  // ---- Boxes of bf16 for which no buffer is free wait in registers, rounded, until the next tile is
  // multiplied.
  static constexpr int kBoxes16 = kColumns / 64;  // of a half
  static constexpr int kWaiting =
      L::kAlone && L::kHalves * kBoxes16 > L::kBuffers ? L::kHalves* kBoxes16 - L::kBuffers : 0;
  __device__ bool waits() const { return waiting_ > 0; }
  template <int kBox>
  __device__ void leave() {
    if (kBox >= waiting_) return;
    const uint32_t to = buffer(kBox);
    write_box(to, &words_[kBox * 16]);
    fence_for_engines();
    senders_meet();
    const uint32_t from = buffers_ + round_ * kPiece + warp_ * kWarpRows * 128;
    round_ = (round_ + 1) % kRounds;
    if (!one_of_senders()) return;
    const int column = waiting_column_ + kBox * 64;
    if constexpr (kOp == GemmOp::kNT) {
      if (waiting_row_ < g_.m) {
        store_tile(maps_.out, from,
                   matrix_place(g_, maps_.matrices, waiting_group_, column, waiting_row_));
      }
    } else if (waiting_group_ > 0) {
      store_tile(maps_.out, from, ragged_place(column, waiting_row_, waiting_group_));
    }
    commit_stores();
  }
  template <int kBox = 0>
  __device__ void leave_all() {
    if constexpr (kBox < kWaiting) {
      leave<kBox>();
      leave_all<kBox + 1>();
    }
    waiting_ = 0;
  }
  // The same beside steps of the next tile's products.
  template <class Multiply>
  __device__ __forceinline__ void leave_beside(Multiply&& multiply, int) {
    multiply([&] { leave<0>(); });
    if constexpr (kWaiting > 1) multiply([&] { leave<1>(); });
    waiting_ = 0;
  }

  // Waits until all that was stored has left shared memory.
  __device__ void end() const {
    if (one_of_senders()) wait_stores_read<0>();
  }

 private:
  __device__ int row(int half) const { return 16 * warp_ + 8 * half + lane_ / 4; }
  __device__ int rows_left(const Tile& t) const { return t.live - first_row_; }

  template <class Run>
  __device__ void for_pairs(const Tile& t, Run&& run) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= rows_left(t)) continue;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const int column = t.column + 8 * j + lane_ % 4 * 2;
        if (column < g_.n) run(row(half), column, column + 1 < g_.n, 4 * j + 2 * half);
      }
    }
  }
  // Element (row, 0) of the tile's group in the output, from its own half on.
  __device__ int64_t first_element(const Tile& t) const {
    return (int64_t{kOp == GemmOp::kNT ? 0 : t.begin} + t.row + first_row_) * e_.out_stride;
  }
  __device__ const void* matrix(const Tile& t) const {
    if (kOp != GemmOp::kNT) return e_.out;
    if (g_.indexed) return g_.pointers[t.group];
    return static_cast<const char*>(e_.out) + t.group * maps_.matrices.stride;
  }

  // Brings the rows that a half of a tile is added to nearer, while it is multiplied.
  __device__ void ask_for_old(const Tile& t, int half) const {
    constexpr int kLine = 128;  // bytes
    if (e_.beta.of(g_.groups.first + t.group) == 0) return;
    const int row = 64 * half + threadIdx.x % 64;
    if (row >= t.live) return;
    const int item = e_.old_dtype == DType::kFloat32 ? 4 : 2;
    const int64_t at = (int64_t{t.begin} + t.row + row) * e_.old_stride + t.column;
    const char* from = static_cast<const char*>(e_.old) + at * item;
    const int bytes = min(kColumns, static_cast<int>(g_.n) - t.column) * item;
    for (int i = threadIdx.x % kWarpGroup / 64 * kLine; i < bytes; i += 2 * kLine) {
      bring_to_l2(from + i);
    }
  }
  __device__ void add_scaled(const Tile& t, float (&d)[kHeld], float beta) const {
    constexpr bool kRows = kOp != GemmOp::kNT;  // else it is added in place
    const void* old = kRows ? e_.old : matrix(t);
    const DType dtype = kRows ? e_.old_dtype : e_.out_dtype;
    const int64_t stride = kRows ? e_.old_stride : e_.out_stride;
    const int64_t first = (int64_t{kRows ? t.begin : 0} + t.row + first_row_) * stride;
    // The other kernels have no registers for it.
    if constexpr (kOp == GemmOp::kNN && !L::kGathers) {
      const int64_t at = first + t.column;
      if (g_.n % 2 == 0) {
        return dtype == DType::kFloat32
                   ? add_pairs(t, static_cast<const float*>(old) + at, stride, d, beta)
                   : add_pairs(t, static_cast<const uint16_t*>(old) + at, stride, d, beta);
      }
    }
    for_pairs(t, [&](int row, int column, bool both, int i) {
      const float2 x = read_pair(old, dtype, first + row * stride + column, both);
      d[i] = fmaf(beta, x.x, d[i]);
      d[i + 1] = fmaf(beta, x.y, d[i + 1]);
    });
  }
  // The same where pairs are whole, several of which wait for memory together. Instead of rows and
  // columns that do not exist, the last ones are read.
  template <class T>
  __device__ void add_pairs(const Tile& t, const T* old, int64_t stride, float (&d)[kHeld],
                            float beta) const {
    constexpr int kPairs = kColumns / 8;
    constexpr int kTogether = kColumns > 192 ? 8 : kColumns > 128 ? 12 : 16;
    static_assert(kPairs % kTogether == 0);
    const int last = static_cast<int>(g_.n) - t.column - 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* from = old + min(row(half), rows_left(t) - 1) * stride;
#pragma unroll
      for (int j = 0; j < kPairs; j += kTogether) {
        PackedPair<T> x[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          x[i] = load_pair(from + min(8 * (j + i) + lane_ % 4 * 2, last));
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          float* to = &d[4 * (j + i) + 2 * half];
          const float2 v = unpacked(x[i]);
          to[0] = fmaf(beta, v.x, to[0]);
          to[1] = fmaf(beta, v.y, to[1]);
        }
      }
    }
  }
  __device__ void add_bias(const Tile& t, float (&d)[kHeld], int64_t group) const {
    const auto* scales = static_cast<const float*>(e_.bias_scale);
    for_pairs(t, [&](int row, int column, bool both, int i) {
      const float scale = scales ? scales[t.begin + t.row + first_row_ + row] : 1;
      const int64_t at = group * g_.n + column;
      d[i] = fmaf(read_element(e_.bias, e_.bias_dtype, at), scale, d[i]);
      if (both) d[i + 1] = fmaf(read_element(e_.bias, e_.bias_dtype, at + 1), scale, d[i + 1]);
    });
  }
  // ---- Results leave through the group's buffers, boxes of 64 rows of 128 bytes, in rounds. The
  // group sends its box together, or each warp its 16 rows as soon as it has them.
  __device__ bool one_of_senders() const {
    if constexpr (L::kAlone) {
      return elect_one();
    } else {
      return threadIdx.x % kWarpGroup == 0;
    }
  }
  __device__ void senders_meet() const { L::kAlone ? __syncwarp() : meet(1 + group_, kWarpGroup); }
  // The buffer of a box, free to be written.
  __device__ uint32_t buffer(int box) const {
    if (box % kRound == 0) {
      if (one_of_senders()) wait_stores_read<kRounds - 1>();
      senders_meet();
    }
    return buffers_ + (round_ * kRound + box % kRound) * kPiece;
  }
  // Sends the boxes, of `width` columns, up to `box`, if it is the last of its round.
  __device__ void send(const Tile& t, int box, int boxes, int width, bool add) {
    if (box % kRound != kRound - 1 && box != boxes - 1) return;
    fence_for_engines();
    senders_meet();
    const int first = L::kAlone ? warp_ * kWarpRows : 0;  // of the group's rows
    const uint32_t from = buffers_ + round_ * kRound * kPiece + first * 128;
    round_ = (round_ + 1) % kRounds;
    if (!one_of_senders()) return;
    const int row = t.row + first_row_ + first;
    const int rows = min(rows_left(t) - first, L::kAlone ? kWarpRows : 64);
    for (int i = box / kRound * kRound; rows > 0 && i <= box; ++i) {
      const int column = t.column + i * width;
      const uint32_t piece = from + i % kRound * kPiece;
      if constexpr (L::kTransposed) {
        send_transposed(t, piece, column, row, width);
        continue;
      }
      const Place at = kOp == GemmOp::kNT ? matrix_place(g_, maps_.matrices, t.group, column, row)
                                          : ragged_place(column, t.begin + row, rows);
      add ? add_tile(maps_.out, piece, at) : store_tile(maps_.out, piece, at);
    }
    commit_stores();
  }

  // ---- A box of the transpose: of `width` of its rows the group's 64 elements, of fp32 in two pieces
  // of 32. The group sends it, as a warp has but 32 bytes of a row.
  __device__ void send_transposed(const Tile& t, uint32_t from, int row, int column,
                                  int width) const {
    for (int i = 0; i < 64; i += width) {
      store_tile(maps_.out, from + i / width * (kPiece / 2),
                 matrix_place(g_, maps_.matrices, t.group, column + i, row));
    }
  }
  __device__ void write_transposed(uint32_t to, int row, int column, float v) const {
    const uint32_t at =
        column / 32 * (kPiece / 2) + row * 128 + (column % 32 / 4 ^ row % 8) * 16 + column % 4 * 4;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + at), "f"(v) : "memory");
  }

  __device__ void write_box(uint32_t to, const uint32_t* words) const {
    if constexpr (L::kTransposed) return write_transposed_box<8>(to, words, warp_, lane_);
    const int row = 16 * warp_ + lane_ % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      store_matrices(to + row * 128 + ((j + lane_ / 16) ^ row % 8) * 16, words[2 * j],
                     words[2 * j + 1], words[2 * j + 2], words[2 * j + 3]);
    }
  }
  template <int kOwn>
  __device__ void store_bf16(const Tile& t, const float (&d)[kHeld]) {
    const int boxes = min(pieces(g_.n - t.column, 64), kColumns / 64);
#pragma unroll
    for (int box = 0; box < kColumns / 64; ++box) {
      constexpr int kFirst = kOwn * kBoxes16;
      if (kWaiting > 0 && kFirst + box >= L::kBuffers) {
        if constexpr (kWaiting > 0) {
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            words_[(kFirst + box - L::kBuffers) * 16 + i] =
                bf16_word(d[box * 32 + 2 * i], d[box * 32 + 2 * i + 1]);
          }
        }
        continue;
      }
      if (box >= boxes) break;
      const uint32_t to = buffer(box);
      uint32_t words[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        words[i] = bf16_word(d[box * 32 + 2 * i], d[box * 32 + 2 * i + 1]);
      }
      write_box(to, words);
      send(t, box, boxes, 64, false);
    }
    if constexpr (kWaiting > 0 && (kOwn + 1) * kBoxes16 > L::kBuffers) {
      constexpr int kFirstBox = kOwn > 0 ? 0 : L::kBuffers;
      waiting_ = boxes - kFirstBox;
      const int first = warp_ * kWarpRows;
      waiting_column_ = t.column + kFirstBox * 64;
      waiting_row_ = (kOp == GemmOp::kNT ? 0 : t.begin) + t.row + first_row_ + first;
      waiting_group_ = kOp == GemmOp::kNT ? t.group : min(rows_left(t) - first, kWarpRows);
    }
  }
  template <bool kReads>
  __device__ void store_fp32(const Tile& t, const float (&d)[kHeld], bool add) {
    const int boxes = min(pieces(g_.n - t.column, 32), kColumns / 32);
#pragma unroll
    for (int box = 0; box < kColumns / 32; ++box) {
      if (box >= boxes) break;
      const uint32_t to = buffer(box);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = (box * 4 + j) * 4 + half * 2, piece = 2 * j + lane_ % 4 / 2;
          float2 v = {d[i], d[i + 1]};
          if constexpr (kReads) {  // as the engine adds, which keeps subnormal numbers, too
            const uint32_t* old = &words_[box % kAhead * 16 + 4 * j + 2 * half];
            v = {__fadd_rn(v.x, __uint_as_float(old[0])), __fadd_rn(v.y, __uint_as_float(old[1]))};
          }
          if constexpr (L::kTransposed) {
            write_transposed(to, 8 * j + lane_ % 4 * 2, row(half), v.x);
            write_transposed(to, 8 * j + lane_ % 4 * 2 + 1, row(half), v.y);
            continue;
          }
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                           to + row(half) * 128 + (piece ^ row(half) % 8) * 16 + lane_ % 2 * 8),
                       "f"(v.x), "f"(v.y)
                       : "memory");
        }
      }
      if constexpr (kReads) {
        if (box + kAhead < kBoxes) read_old(box + kAhead);
      }
      send(t, box, boxes, 32, add);
    }
  }

  // ---- Old values of fp32 that are added to.
  static constexpr int kAhead = L::kReadAhead, kBoxes = kColumns / 32;
  static constexpr int64_t kFewRows = 768;  // of a group, on average
  // To where the thread's accumulators of a box are.
  __device__ void read_old(int box) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t* x = &words_[box % kAhead * 16 + 4 * j + 2 * half];
        const int column = box * 32 + 8 * j;
        x[0] = x[1] = 0;
        if (8 * half < old_rows_ && column < old_columns_) {
          asm volatile("ld.global.cs.v2.u32 {%0, %1}, [%2];"
                       : "=r"(x[0]), "=r"(x[1])
                       : "l"(old_at_ + half * 8 * e_.out_stride + column)
                       : "memory");
        }
      }
    }
  }
  const TileGemm& g_;
  const Maps& maps_;
  const Epilogue& e_;
  uint32_t buffers_;
  int group_, warp_, lane_, first_row_ = 0, round_ = 0;
  uint32_t words_[(kWaiting > kAhead ? kWaiting
                   : kAhead > 0      ? kAhead
                                     : 1) *
                  16];  // that wait, or are added to
  int waiting_ = 0;     // boxes
  // The place of the first: its group and row, or its rows and the first of them.
  int waiting_column_ = 0, waiting_row_ = 0, waiting_group_ = 0;
  bool reads_ = false;
  const float* old_at_ = nullptr;
  int old_rows_ = 0, old_columns_ = 0;
};

}  // namespace moiety::gemm::sm90
