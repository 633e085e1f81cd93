#include "moiety/gemm/sm90/grouped_sm90.h"

#include "moiety/base/format.h"
#include "moiety/base/integer.h"
#include "moiety/gemm/sm90/fused.h"

namespace moiety::gemm::sm90 {
namespace {

constexpr int64_t kAlignment = 16;            // bytes, of what the copy engine reads
constexpr int64_t kMostRows = 1 << 30;        // of a buffer: ragged_map
constexpr int64_t kMostGathered = 1ll << 36;  // bytes that a loader's 32-bit places reach
constexpr int64_t kMostBytes = 1ll << 40;     // from row to row, and from matrix to matrix
constexpr int64_t kInStep = 4096;  // of a reduction, from where on blocks lose their step

// Whether results may be added to old values.
bool adds(const Epilogue& e) { return e.beta.data || e.beta.value != 0; }

std::optional<std::string> unaligned(const char* name, const void* data, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(data) % kAlignment != 0) {
    return text("{} is not at a multiple of {} bytes", name, kAlignment);
  }
  if (bytes % kAlignment != 0 || bytes <= 0 || bytes >= kMostBytes) {
    return text("{} has strides of {} bytes, not of a multiple of {}", name, bytes, kAlignment);
  }
  return {};
}

// The matrices of the groups: b or out.
std::optional<std::string> unaligned_matrices(const TileGemm& g) {
  const bool out = g.ragged == Ragged::kReduction;
  const char* name = out ? "out" : "w";
  const int64_t item = byte_size(out ? g.epilogue.out_dtype : g.dtype, 1);
  const int64_t row = (out ? g.epilogue.out_stride : g.b.stride) * item;
  if (!g.indexed) {
    if (g.groups.groups > 1) {
      if (auto why = unaligned(name, nullptr, g.group_stride * item)) return why;
    }
    return unaligned(name, out ? g.epilogue.out : g.b.data, row);
  }
  for (int64_t e = 0; e < g.groups.groups; ++e) {
    if (auto why = unaligned(name, g.pointers[e], row)) return why;
  }
  return {};
}

}  // namespace

std::optional<std::string> refusal(const TileGemm& g, const GpuProperties& gpu) {
  if (gpu.major != 9 || gpu.minor != 0) {
    return text("capability {}.{} is not 9.0", gpu.major, gpu.minor);
  }
  if (g.dtype != DType::kBFloat16) return text("dtype {} is not bfloat16", name(g.dtype));
  const bool by_rows = g.ragged == Ragged::kRows && g.op != GemmOp::kNT;
  const bool by_reduction = g.ragged == Ragged::kReduction && g.op == GemmOp::kNT;
  if (!by_rows && !by_reduction) return "operands are transposed, or not grouped";
  if (g.a_scales.data) return "operands have block scales";
  const ProductGroups& all = g.groups;
  if (all.capacity <= 0 || all.capacity >= kMostRows) {
    return text("{} rows are not in [1, {})", all.capacity, kMostRows);
  }
  if (g.n <= 0 || (by_rows ? g.k : g.m) <= 0) return "a matrix is empty";
  if (g.a.source && g.b.source) return "rows of both operands are gathered";
  if (auto why = unaligned("a", g.a.data, g.a.stride * 2)) return why;
  for (const ProductOperand* x : {&g.a, &g.b}) {
    if (x->source && x->sources >= kMostGathered / (x->stride * 2)) {
      return text("{} gathered rows have more than 64 GiB", x->sources);
    }
  }
  const Epilogue& e = g.epilogue;
  if (by_reduction) {
    if (auto why = unaligned("b", g.b.data, g.b.stride * 2)) return why;
    if (adds(e) && e.old != e.out) return "a weight gradient is added to another tensor";
  } else {
    if (auto why = unaligned("out", e.out, byte_size(e.out_dtype, e.out_stride))) return why;
    const int64_t old = byte_size(e.old_dtype, e.old_stride);
    if (adds(e)) {
      if (auto why = unaligned("c", e.old, old)) return why;
    }
  }
  return unaligned_matrices(g);
}

std::optional<std::string> fused_refusal(const TileGemm& g, const FusedActivation& activation) {
  const Epilogue& e = g.epilogue;
  const ActivationBlock& block = activation.block;
  if (g.ragged != Ragged::kRows || e.out_dtype != DType::kBFloat16) {
    return "the product has no rows of bfloat16";
  }
  for (const ProductFactor* f : {&e.a_scale, &e.b_scale, &e.alpha}) {
    if (f->data || f->value != 1) return "the product is scaled";
  }
  if (adds(e) || e.bias_scale) return "the product is added to";
  if (block.interleave != 0) return text("interleave {} is not 0", block.interleave);
  if (block.ffn % 8 != 0) return text("F={} is no multiple of 8", block.ffn);
  struct Rows {
    const char* name;
    const void* data;
    int64_t stride;
  };
  for (const Rows& x :
       {Rows{"h", block.h, block.h_stride}, Rows{"a", block.a, block.a_stride},
        Rows{"da", block.da, block.da_stride}, Rows{"dh", block.dh, block.dh_stride}}) {
    if (!x.data) continue;
    if (auto why = unaligned(x.name, x.data, x.stride * 2)) return why;
  }
  return {};
}

namespace {

// Columns that are computed in tiles of so many, dearer in narrow tiles, which read `a` more often.
int64_t cost(int64_t n, int columns) { return round_up(n, columns) * (100 + (256 - columns) / 16); }

// Gated forward products that are faster in tiles of 256 columns, which read fewer bytes than narrower
// ones: where few of their columns are computed in vain, and tiles have steps enough to compute an
// activation beside.
bool holds(const Product& g, bool gated) {
  constexpr int64_t kLeast = 1536;
  const int64_t in_vain = round_up(g.n, kHeldColumns) - g.n;
  return g.op == GemmOp::kTN && gated && (g.a.source || g.sm_limit != 1) && g.k >= kLeast &&
         in_vain * 64 <= g.n;
}

// Weight gradients that are faster in turns: of a matrix of two tiles a multiprocessor, with few
// columns computed in vain, and not added to sums in fp32, which memory holds up anyhow.
bool takes_turns(const Product& g, int64_t multiprocessors) {
  const int64_t rows = ceil_div(g.m, kTileRows), columns = ceil_div(g.n, 192);
  const bool added = g.epilogue.out_dtype == DType::kFloat32 && adds(g.epilogue);
  return g.op == GemmOp::kNT && !g.a.source && !g.b.source && !added &&
         rows * columns >= 2 * multiprocessors && (columns * 192 - g.n) * 16 <= g.n;
}

// Products whose blocks lose little by waiting for each other: of many rows a group, so that few tiles
// have no neighbour, and tiles of many steps, for which blocks wait at their ends alone.
bool suits_pairs(const Product& g) {
  constexpr int64_t kRows = 1024, kLeast = 2048;
  return g.groups.capacity >= kRows * g.groups.groups && g.k >= kLeast;
}

// Products that are faster in pairs of blocks, but not of matrices of more than 64 MiB, where it was
// no gain.
bool takes_pairs(const Product& g, const Kernel& kernel, int64_t multiprocessors) {
  return has_pairs(kernel.op, kernel.gathered, kernel.columns) && multiprocessors > 1 &&
         suits_pairs(g) && g.k * g.n <= kMostInPairs;
}

// Products that are faster with operands exchanged: long ones of groups whose rows fill a few tiles
// badly, and forward ones of which a group makes up the pairs. Gathered rows have to be more, and the
// products longer, to be worth a loader that waits for two blocks.
bool takes_exchanged(const Product& g, const Kernel& kernel, int64_t multiprocessors) {
  if (kernel.columns != kTileColumns.back() || !has_exchanged(kernel.op, kernel.gathered) ||
      adds(g.epilogue) || g.epilogue.out_dtype != DType::kBFloat16 || g.groups.groups < 2 ||
      multiprocessors < kPair) {
    return false;
  }
  constexpr int64_t kFew = 640, kMost = 1152;
  const int64_t fewest = g.a.source ? 384 : 96, least = g.a.source ? kInStep : 768;
  const int64_t rows = g.groups.capacity / g.groups.groups, pairs = multiprocessors / kPair;
  if (rows < fewest || g.k < least) return false;
  return rows <= kFew || (rows <= kMost && g.op == GemmOp::kTN && pairs_in_step(g, pairs));
}

}  // namespace

std::optional<int64_t> pairs_in_step(const Product& g, int64_t most) {
  const int64_t tiles = ceil_div(ceil_div(g.groups.capacity, g.groups.groups), kExchangedRows);
  const int64_t columns = ceil_div(g.n, kTileColumns.back());
  const int64_t pairs = pairs_of(tiles, columns);
  if (g.k < kInStep || pairs > most || pairs * 16 < most * 15) return {};
  return pairs;
}

FusedKernel choose_fused(const Product& g, bool gated) {
  if (holds(g, gated)) return {kHeldColumns, !g.a.source || (g.sm_limit != 1 && suits_pairs(g))};
  const int columns = cost(g.n, 192) <= cost(g.n, 128) ? 192 : 128;
  return {columns, columns == 192 && !g.a.source && g.sm_limit != 1};
}

Kernel choose_kernel(const Product& product, int64_t multiprocessors) {
  if (takes_turns(product, multiprocessors)) return {product.op, 192, Gathered::kNone, true};
  Kernel kernel{product.op, kTileColumns[0], Gathered::kNone};
  if (product.a.source) kernel.gathered = Gathered::kA;
  if (product.b.source) {
    if (adds(product.epilogue)) return {product.op, kTileColumns[0], Gathered::kB};  // tile_rows
    return {.op = product.op, .columns = 256, .gathered = Gathered::kB, .transposed = true};
  }
  for (const int columns : kTileColumns) {
    if (cost(product.n, columns) <= cost(product.n, kernel.columns)) kernel.columns = columns;
  }
  if (takes_exchanged(product, kernel, multiprocessors)) {
    return exchanged_kernel(kernel.op, kernel.gathered);
  }
  kernel.pairs = takes_pairs(product, kernel, multiprocessors);
  return kernel;
}

}  // namespace moiety::gemm::sm90
