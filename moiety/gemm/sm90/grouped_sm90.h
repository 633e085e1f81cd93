// Grouped products of bfloat16 operands by Hopper's tensor cores (WGMMA), fed by its copy engine:
// one launch computes the products of all groups, whose sizes are read on the GPU. Internal to
// moiety/gemm.
//
// A block holds the chip's multiprocessor alone: a group of threads loads tiles of both operands
// into a ring of stages in shared memory, two groups multiply 64 rows each. An element is one
// chain over the reduction from its start, ascending, in steps of 16, so nothing about it depends
// on the tile that it lies in.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "moiety/base/gpu.h"
#include "moiety/gemm/tile_gemm.h"

namespace moiety::gemm::sm90 {

// The operand whose rows the kernel reads through `source`.
enum class Gathered { kNone, kA, kB };

struct Kernel {
  GemmOp op;
  int columns;  // of a tile; its rows are 128
  Gathered gathered;
  bool turns = false;       // kNT: two groups multiply in turns, a tile each
  bool pairs = false;       // blocks share the matrix's part (pairs.cuh)
  bool transposed = false;  // kNT: the transpose is computed, with a and b exchanged
  bool exchanged = false;   // in pairs: a tile's transpose is computed (exchanged.cuh)
  friend constexpr bool operator==(const Kernel&, const Kernel&) = default;
};

inline constexpr int kTileRows = 128;
// Where `b` is gathered, tiles have few of its columns, so that these are read by fewer tiles.
constexpr int tile_rows(GemmOp op, Gathered gathered) {
  return op == GemmOp::kNT && gathered == Gathered::kB ? 256 : kTileRows;
}
inline constexpr std::array kTileColumns = {128, 192, 256};
inline constexpr int kPair = 2;                            // blocks that work together (pairs.cuh)
inline constexpr int64_t kMostInPairs = int64_t{1} << 25;  // elements of a matrix, where pairs pay
// Whether there is a kernel of pairs: of the widest tiles of gathered rows.
constexpr bool has_pairs(GemmOp op, Gathered gathered, int columns) {
  return columns == kTileColumns.back() && gathered == Gathered::kA && op != GemmOp::kNT;
}

// Of exchanged operands: the most rows of a tile, and of those that are stored at a time.
inline constexpr int kExchangedRows = 136, kExchangedBox = 48;
// Whether there is a kernel for that: of rows in order, and of gathered ones that go forward.
constexpr bool has_exchanged(GemmOp op, Gathered gathered) {
  return gathered == Gathered::kNone ? op != GemmOp::kNT
                                     : gathered == Gathered::kA && op == GemmOp::kTN;
}
constexpr Kernel exchanged_kernel(GemmOp op, Gathered gathered) {
  return {.op = op,
          .columns = kTileColumns.back(),
          .gathered = gathered,
          .pairs = true,
          .exchanged = true};
}

// The pairs of tiles of a group with so many tiles down and across: neighbours in a column, and of the
// last row, where their number is odd, neighbours in the row.
template <class Int>
constexpr Int pairs_of(Int rows, Int columns) {
  return rows / kPair * columns + rows % kPair * ((columns + kPair - 1) / kPair);
}

// The pairs of blocks for that which keep step, of at most so many: as many as a group of the average
// size has pairs of tiles, if this leaves few over. Blocks that work at the same time then share
// operands.
std::optional<int64_t> pairs_in_step(const Product& product, int64_t most);

// The reason why these kernels cannot take the product on this GPU, with values; none if they can.
std::optional<std::string> refusal(const TileGemm& g, const GpuProperties& gpu);

// The kernel of a product that is not refused, by its shape, on a GPU of so many multiprocessors.
Kernel choose_kernel(const Product& product, int64_t multiprocessors);

}  // namespace moiety::gemm::sm90
