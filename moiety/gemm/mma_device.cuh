// Tensor cores fed from shared memory: pieces of 16 bytes come by cp.async, 8 x 8 matrices of bf16
// leave by ldmatrix, mma.sync multiplies.
#pragma once

#include <cstdint>

namespace moiety::device {

// Copies the first `bytes` of 16; the rest becomes zeros. `from` is not read if `bytes` is 0.
__device__ inline void copy_piece(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
// Copies one word, or 0 if it is not `there`.
__device__ inline void copy_word(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0));
}
__device__ inline void commit_pieces() { asm volatile("cp.async.commit_group;"); }
// Waits until all but the last n commits of this thread have come.
template <int n>
__device__ void wait_for_pieces() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n));
}

// The place of a piece in a tile whose rows are kPieces pieces, such that eight rows at the same
// piece are read from all banks.
template <int kPieces>
__device__ uint32_t piece_offset(int row, int piece) {
  constexpr int kRowsOfLine = kPieces < 8 ? 8 / kPieces : 1;  // 128 bytes
  return (row * kPieces + (piece ^ (row / kRowsOfLine & (8 / kRowsOfLine - 1)))) * 16;
}

// Loads four matrices: lane l has the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&out)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from));
}
__device__ inline void load_transposed(uint32_t (&out)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from));
}

// acc [16, 8] += a [16, 16] b [16, 8]. A lane has rows lane / 4 and lane / 4 + 8 (elements 2 and
// 3), columns lane % 4 * 2 and the next.
__device__ inline void multiply(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The operands of products, from tiles of shared memory whose rows are kPieces pieces. `row` and
// `depth` are those of the first element.

// a: 16 rows and 16 elements of the reduction, where rows hold the reduction.
template <int kPieces>
__device__ void load_left(uint32_t (&out)[4], uint32_t tile, int row, int depth) {
  const int lane = threadIdx.x % 32;
  load_matrices(out, tile + piece_offset<kPieces>(row + lane % 16, depth / 8 + lane / 16));
}
// The same where rows are the reduction.
template <int kPieces>
__device__ void load_left_turned(uint32_t (&out)[4], uint32_t tile, int row, int depth) {
  const int lane = threadIdx.x % 32;
  load_transposed(
      out, tile + piece_offset<kPieces>(depth + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2));
}
// b: 16 columns; registers 0 and 1 have the first eight, 2 and 3 the others. Here a row of the tile
// is a column of b.
template <int kPieces>
__device__ void load_right(uint32_t (&out)[4], uint32_t tile, int column, int depth) {
  const int lane = threadIdx.x % 32;
  load_matrices(out, tile + piece_offset<kPieces>(column + lane % 8 + lane / 16 * 8,
                                                  depth / 8 + lane / 8 % 2));
}
template <int kPieces>
__device__ void load_right_turned(uint32_t (&out)[4], uint32_t tile, int column, int depth) {
  const int lane = threadIdx.x % 32;
  load_transposed(out, tile + piece_offset<kPieces>(depth + lane % 16, column / 8 + lane / 16));
}

}  // namespace moiety::device
