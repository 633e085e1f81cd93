// The work of one task on CPUs. Rows are taken in segments of 1024 elements; columns and tiles in
// panels of 128 x 128, a row of blocks at a time. Ragged blocks are filled up with zeros, and their
// codes cleared. Codes go through buffers, from which they are written in long runs.
#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "moiety/base/integer.h"
#include "moiety/quant/quantize/quantize_loops_avx2.h"
#include "moiety/quant/quantize/quantize_task.h"
#include "moiety/quant/quantize/stream_bytes.h"
#include "moiety/quant/random_bytes.h"

namespace moiety::quant {
namespace {

using loops::kPanel;
using loops::Rows;
constexpr int64_t kSegment = 1024;

const void* element(const QuantizeJob& job, int64_t r, int64_t c) {
  return static_cast<const std::byte*>(job.x) + byte_size(job.dtype, r * job.stride + c);
}

// Prefetches n elements that are read soon, in an order that hardware does not foresee; any address
// will do.
void prefetch(const QuantizeJob& job, int64_t r, int64_t c, int64_t n) {
  const auto* x = static_cast<const std::byte*>(element(job, r, c));
  const int64_t bytes = byte_size(job.dtype, n);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(x + i, 0, 2);
}

// The rule from the amax of blocks to their scales.
struct Rule {
  QuantSpec spec;
  Nvfp4TensorScale nvfp4{};
  float tensor_encode = 1;            // used by kFp8Tensor
  std::optional<uint32_t> amax = {};  // used by kFp8Tensor, if X was measured

  static Rule of(const QuantizeJob& job, float amax) {
    Rule rule{job.spec};
    if (is_fp4(job.spec.format)) rule.nvfp4 = nvfp4_tensor_scale(amax);
    if (job.spec.format == Format::kFp8Tensor) {
      rule.tensor_encode = job.delayed_scale ? *job.delayed_scale
                                             : fp8_scale(amax, fp8_max_of(job.spec.element),
                                                         job.spec.amax_floor, job.spec.pow2_scales)
                                                   .encode;
    }
    return rule;
  }
  // Whether factors of finite blocks are finite and positive.
  bool finite() const {
    const float tensor = is_fp4(spec.format) ? nvfp4.encode : tensor_encode;
    return std::bit_cast<uint32_t>(tensor) < 0x7F800000u;
  }
  int64_t stored_bytes() const {
    return spec.format == Format::kFp8Tensor ? 0 : is_fp8_block(spec.format) ? 4 : 1;
  }
  void apply(const uint32_t* amax, int64_t n, float* factor, uint8_t* stored) const {
    if (is_fp8_block(spec.format)) {
      loops::fp8_scales(amax, n, fp8_max_of(spec.element), spec.amax_floor, spec.pow2_scales,
                        factor, reinterpret_cast<float*>(stored));
    } else if (is_mxfp8(spec.format)) {
      loops::mxfp8_scales(amax, n, spec.element == DType::kE5M2, factor, stored);
    } else if (is_fp4(spec.format)) {
      loops::nvfp4_scales(amax, n, nvfp4, factor, stored);
    } else {
      std::fill(factor, factor + n, tensor_encode);
    }
  }
};

Rule rule_of(const QuantizeJob& job, Direction direction) {
  const bool uses_amax = job.amax[0] && !job.delayed_scale && !job.spec.row_scaled;
  return Rule::of(job, uses_amax ? *job.amax[job.amax_index(direction)] : 0);
}

// One direction of a job, in the form that the functions below need.
struct Caster {
  const QuantizeJob& job;
  Rule rule;
  bool fp4, stochastic, finite;
  int block;  // elements along the direction that share a scale
  BlockPosition position;
  RandomStream stream{};
  ByteWriter row_writer, col_writer;

  Caster(const QuantizeJob& job, Direction direction, const Rule& rule)
      : job(job),
        rule(rule),
        fp4(is_fp4(job.spec.format)),
        stochastic(job.stochastic()),
        finite(rule.finite()),
        block(job.spec.format == Format::kFp8Tensor ? 128 : block_shape(job.spec.format).cols),
        position(job.position(direction)),
        row_writer(job.rows * job.row.pitch),
        col_writer((job.spec.format == Format::kMxfp8 ? job.rows : job.cols) * job.col.pitch) {
    if (stochastic) stream = job.random_stream(direction);
  }

  // The largest |x| (as bits) of each block, and of each column.
  void block_amax(const void* x, int64_t blocks, uint32_t* out) const {
    if (rule.amax) return void(std::fill(out, out + blocks, *rule.amax));
    loops::block_amax(job.dtype, x, block, blocks, out);
  }
  void column_amax(const Rows& x, uint32_t* out) const {
    if (rule.amax) return void(std::fill(out, out + kPanel, *rule.amax));
    loops::column_amax(x, out);
  }
  // The bytes of n codes; n is even.
  int64_t bytes(int64_t n) const { return fp4 ? n / 2 : n; }
  void encode(const Rows& x, uint32_t amax, const loops::PairFactors& factor, const uint8_t* random,
              uint8_t* codes) const {
    loops::encode(x.dtype, job.spec.element, stochastic, known(amax))(x, factor, random, codes);
  }
  // The same for n elements of a row whose blocks have a factor each.
  void encode_blocks(const void* x, uint32_t amax, const float* factor, int64_t n,
                     const uint8_t* random, uint8_t* codes) const {
    const loops::EncodeBlocks fast =
        job.dtype == DType::kBFloat16
            ? loops::encode_blocks_avx2(job.spec.element, block, stochastic, known(amax))
            : nullptr;
    if (fast) return fast(static_cast<const bf16*>(x), factor, n, random, codes);
    alignas(64) float pairs[kSegment / 2];
    loops::spread(factor, block, n / block, pairs);
    encode({job.dtype, x, 0, 1, n}, amax, {pairs, pairs}, random, codes);
  }
  loops::Known known(uint32_t amax) const {
    if (!finite || amax >= 0x7F800000u) return loops::Known::kNothing;
    return has_power_scales(job.spec) ? loops::Known::kPowers : loops::Known::kFinite;
  }
  // Clears codes n to `padded` of a row.
  void clear(uint8_t* codes, int64_t n, int64_t padded) const {
    if (fp4 && n % 2 != 0) codes[n / 2] &= 15;
    std::fill(codes + bytes(round_up(n, 2)), codes + bytes(padded), uint8_t{0});
  }
};

// Casts columns [c0, c1) of row r.
uint32_t cast_row(const Caster& cast, int64_t r, int64_t c0, int64_t c1) {
  alignas(64) float factor[kSegment / 16];
  alignas(64) std::byte copy[kSegment * sizeof(float)];
  alignas(64) uint32_t amax[kSegment / 16];
  alignas(64) uint8_t codes[kSegment], random[kSegment], stored[kSegment / 4];
  const QuantizeJob& job = cast.job;
  const int64_t width = cast.rule.stored_bytes();
  const int64_t segments = ceil_div(c1 - c0, kSegment);
  uint32_t largest = 0;
  for (int64_t c = c0; c < c1; c += kSegment) {
    const int64_t n = std::min(kSegment, c1 - c), padded = round_up(n, cast.block);
    const int64_t blocks = padded / cast.block;
    const void* x = element(job, r, c);
    if (n < padded) {
      const auto bytes = static_cast<size_t>(byte_size(job.dtype, n));
      std::memcpy(copy, x, bytes);
      std::memset(copy + bytes, 0, static_cast<size_t>(byte_size(job.dtype, padded)) - bytes);
      x = copy;
    }
    // the segment of the rows, counted from this one on
    const int64_t next = (c - c0) / kSegment + 2;
    prefetch(job, r + next / segments, c0 + next % segments * kSegment, kSegment);
    cast.block_amax(x, blocks, amax);
    const uint32_t segment_amax = loops::largest(amax, blocks);
    largest = std::max(largest, segment_amax);
    cast.rule.apply(amax, blocks, factor, stored);
    if (cast.stochastic) {
      random_bytes(cast.stream, {cast.position.block(r, c / 16), 0, 1, ceil_div(n, 16)}, random, 0);
    }
    cast.encode_blocks(x, segment_amax, factor, padded, random, codes);
    cast.clear(codes, n, padded);
    if (width) {
      std::memcpy(static_cast<uint8_t*>(job.row.scales) +
                      (r * job.row.scale_pitch + c / cast.block) * width,
                  stored, static_cast<size_t>(blocks * width));
    }
    cast.row_writer.write(job.row.data + r * job.row.pitch + cast.bytes(c), codes,
                          cast.fp4 ? padded / 2 : n);
  }
  return largest;
}

// A part of X of up to 128 rows and columns. Transposed it has `padded` columns: those of whole
// blocks of nibbles, and at the end of a group all that the group has.
struct Panel {
  int64_t r0, c0, rows, cols, padded;

  static Panel of(const QuantizeJob& job, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    const int64_t rows = is_fp4(job.spec.format) ? round_up(r1 - r0, 16) : r1 - r0;
    return {r0, c0, r1 - r0, c1 - c0, r1 == job.rows ? std::max(rows, job.padded_rows - r0) : rows};
  }
};
struct alignas(64) PanelBytes {
  uint8_t at[kPanel * kPanel];
};

// Rows of a panel, as they are in X, or filled up with zeros or rotated in `copy`.
class Strip {
 public:
  // Loads `count` rows from row r of the panel on.
  Rows load(const QuantizeJob& job, const Panel& panel, int64_t r, int64_t count) {
    const int64_t pitch = byte_size(job.dtype, job.stride);
    if (panel.cols == kPanel && r + count <= panel.rows) {
      return {job.dtype, element(job, panel.r0 + r, panel.c0), pitch, count, kPanel};
    }
    const auto row = static_cast<size_t>(byte_size(job.dtype, kPanel));
    for (int64_t i = 0; i < count; ++i) {
      const auto bytes =
          static_cast<size_t>(r + i < panel.rows ? byte_size(job.dtype, panel.cols) : 0);
      std::byte* to = copy_ + static_cast<size_t>(i) * row;
      if (bytes > 0) std::memcpy(to, element(job, panel.r0 + r + i, panel.c0), bytes);
      std::memset(to + bytes, 0, row - bytes);
    }
    return {job.dtype, copy_, static_cast<int64_t>(row), count, kPanel};
  }
  // The same for 16 rows, rotated, with the amax of every column.
  Rows load_rotated(const QuantizeJob& job, const Panel& panel, int64_t r, uint32_t* amax) {
    loops::rotate(load(job, panel, r, 16), job.spec.rht_signs, rotated_, amax);
    return {DType::kBFloat16, rotated_, sizeof rotated_[0], 16, kPanel};
  }

 private:
  alignas(64) std::byte copy_[kPanel * kPanel * sizeof(float)];
  alignas(64) bf16 rotated_[16][kPanel];
};

// Stores the codes of a panel as rows of X transposed; rows from number `filled` on are pads.
void store_transposed(const Caster& cast, const Panel& panel, PanelBytes& codes, int64_t filled) {
  const QuantizeJob& job = cast.job;
  const int64_t width = cast.bytes(kPanel);
  std::fill(codes.at + filled * width, codes.at + panel.padded * width, uint8_t{0});
  PanelBytes turned;
  (cast.fp4 ? loops::transpose_nibbles : loops::transpose)(codes.at, turned.at);
  uint8_t* out = job.col.data + panel.c0 * job.col.pitch + cast.bytes(panel.r0);
  for (int64_t c = 0; c < panel.cols; ++c) {
    cast.col_writer.write(out + c * job.col.pitch, turned.at + c * width,
                          cast.fp4 ? panel.padded / 2 : panel.padded);
  }
}

// The random bytes of a panel, by row of X or, if `turned`, by row of X transposed.
void panel_random(const Caster& cast, const Panel& panel, bool turned, PanelBytes& out) {
  if (!turned) {
    const RandomBlocks blocks{cast.position.block(panel.r0, panel.c0 / 16),
                              static_cast<uint64_t>(cast.position.blocks_per_row), panel.rows,
                              ceil_div(panel.cols, 16)};
    return random_bytes(cast.stream, blocks, out.at, kPanel);
  }
  PanelBytes columns;
  const RandomBlocks blocks{cast.position.block(panel.c0, panel.r0 / 16),
                            static_cast<uint64_t>(cast.position.blocks_per_row), panel.cols,
                            ceil_div(panel.rows, 16)};
  random_bytes(cast.stream, blocks, columns.at, kPanel);
  loops::transpose(columns.at, out.at);
}

// The scales of the blocks of a panel's columns, [blocks along M, 128].
struct ColumnScales {
  alignas(64) uint8_t at[16 * kPanel];  // at most 8 bytes, or a float32, per column

  void store(const Caster& cast, const Panel& panel) {
    const QuantizeJob& job = cast.job;
    const int64_t block = panel.r0 / cast.block, pitch = job.col.scale_pitch;
    const int64_t blocks = ceil_div(panel.rows, cast.block);
    if (job.spec.format == Format::kMxfp8) {
      for (int64_t b = 0; b < blocks; ++b) {
        std::memcpy(static_cast<uint8_t*>(job.col.scales) + (block + b) * pitch + panel.c0,
                    at + b * kPanel, static_cast<size_t>(panel.cols));
      }
    } else if (is_fp8_block(job.spec.format)) {
      const float* from = reinterpret_cast<const float*>(at);
      float* out = static_cast<float*>(job.col.scales) + panel.c0 * pitch + block;
      for (int64_t c = 0; c < panel.cols; ++c) out[c * pitch] = from[c];
    } else {
      alignas(64) uint8_t turned[16 * kPanel];
      const int64_t all = panel.padded / 16;
      std::fill(at + blocks * kPanel, at + all * kPanel, uint8_t{0});
      loops::transpose_16(at, turned);
      uint8_t* out = static_cast<uint8_t*>(job.col.scales) + panel.c0 * pitch + block;
      for (int64_t c = 0; c < panel.cols; ++c) {
        std::memcpy(out + c * pitch, turned + 16 * c, static_cast<size_t>(all));
      }
    }
  }
};

// Casts the col direction of a one-dimensional format.
uint32_t cast_columns(const Caster& cast, const Panel& panel) {
  const QuantizeJob& job = cast.job;
  const bool rotated = job.spec.rht_col;
  Strip strip;
  ColumnScales scales;
  alignas(64) float factor[kPanel], even[kPanel / 2], odd[kPanel / 2];
  alignas(64) uint32_t amax[kPanel];
  PanelBytes codes, random;
  if (cast.stochastic) panel_random(cast, panel, true, random);
  uint32_t largest = 0;
  for (int64_t r = 0; r < panel.rows; r += cast.block) {
    const Rows x = rotated
                       ? strip.load_rotated(job, panel, r, amax)
                       : strip.load(job, panel, r, std::min<int64_t>(cast.block, panel.rows - r));
    if (!rotated) cast.column_amax(x, amax);
    const uint32_t strip_amax = loops::largest(amax, kPanel);
    largest = std::max(largest, strip_amax);
    cast.rule.apply(amax, kPanel, factor, scales.at + r / cast.block * kPanel);
    loops::split(factor, kPanel, even, odd);
    cast.encode(x, strip_amax, {even, odd}, random.at + r * kPanel,
                codes.at + r * cast.bytes(kPanel));
  }
  scales.store(cast, panel);
  if (job.spec.format == Format::kMxfp8) {
    for (int64_t r = 0; r < panel.rows; ++r) {
      cast.col_writer.write(job.col.data + (panel.r0 + r) * job.col.pitch + panel.c0,
                            codes.at + r * kPanel, panel.cols);
    }
    return largest;
  }
  store_transposed(cast, panel, codes, rotated ? round_up(panel.rows, 16) : panel.rows);
  return largest;
}

// The factors of a row of tiles, from the maxima of its columns; it stores their scales.
void tile_factors(const Caster& cast, const Panel& panel, int64_t r, const uint32_t* column_amax,
                  float* factor) {
  const QuantizeJob& job = cast.job;
  const int64_t width = cast.rule.stored_bytes(), tiles = kPanel / cast.block;
  uint32_t amax[kPanel / 16];
  float tile_factor[kPanel / 16];
  alignas(8) uint8_t stored[kPanel / 16];
  for (int64_t t = 0; t < tiles; ++t) {
    amax[t] = loops::largest(column_amax + t * cast.block, cast.block);
  }
  cast.rule.apply(amax, tiles, tile_factor, stored);
  loops::spread(tile_factor, cast.block, tiles, factor);
  if (width == 0) return;
  const int64_t at = (panel.r0 + r) / cast.block * job.row.scale_pitch + panel.c0 / cast.block;
  std::memcpy(static_cast<uint8_t*>(job.row.scales) + at * width, stored,
              static_cast<size_t>(ceil_div(panel.cols, cast.block) * width));
}

// Casts codes that both directions have in common: of tiles, or with one scale for everything.
uint32_t cast_shared(const Caster& cast, const Panel& panel) {
  const QuantizeJob& job = cast.job;
  Strip strip;
  alignas(64) float factor[kPanel / 2];
  alignas(64) uint32_t amax[kPanel];
  PanelBytes codes, random;
  if (cast.stochastic) panel_random(cast, panel, false, random);
  const int64_t width = cast.bytes(kPanel);  // bytes of a row of codes
  uint32_t largest = 0;
  for (int64_t r = 0; r < panel.rows; r += cast.block) {
    const Rows x = strip.load(job, panel, r, std::min<int64_t>(cast.block, panel.rows - r));
    for (int64_t i = 0; i < x.rows; ++i) {
      prefetch(job, panel.r0 + r + i, panel.c0 + kPanel, kPanel);
    }
    cast.column_amax(x, amax);
    const uint32_t strip_amax = loops::largest(amax, kPanel);
    largest = std::max(largest, strip_amax);
    tile_factors(cast, panel, r, amax, factor);
    cast.encode(x, strip_amax, {factor, factor}, random.at + r * kPanel, codes.at + r * width);
  }
  for (int64_t r = 0; r < panel.rows; ++r) cast.clear(codes.at + r * width, panel.cols, kPanel);
  const int64_t bytes = cast.fp4 ? round_up(panel.cols, 16) / 2 : panel.cols;
  for (int64_t r = 0; job.row.data && r < panel.rows; ++r) {
    cast.row_writer.write(job.row.data + (panel.r0 + r) * job.row.pitch + cast.bytes(panel.c0),
                          codes.at + r * width, bytes);
  }
  if (job.col.data) store_transposed(cast, panel, codes, panel.rows);
  return largest;
}

// Calls body(panel) for the panels of columns [c0, c1).
template <class Body>
uint32_t for_panels(const QuantizeTask& task, int64_t c0, int64_t c1, Body&& body) {
  uint32_t largest = 0;
  for (int64_t c = c0; c < c1; c += kPanel) {
    const Panel panel = Panel::of(*task.job, task.r0, task.r1, c, std::min(c + kPanel, c1));
    largest = std::max(largest, body(panel));
  }
  return largest;
}

uint32_t cast_row_scaled(const QuantizeTask& task) {
  const QuantizeJob& job = *task.job;
  uint32_t largest = 0;
  for (int64_t r = task.r0; r < task.r1; ++r) {
    float& amax = job.amax[0][r];
    if (!job.amax_given) {
      amax = std::bit_cast<float>(measure_task({&job, r, r + 1, 0, job.cols}));
    }
    const Rule rule = Rule::of(job, amax);
    job.tensor_scale[0][r] = rule.nvfp4.decode;
    largest = std::max(
        {largest, abs_bits(amax), cast_row(Caster(job, Direction::kRow, rule), r, 0, job.cols)});
  }
  return largest;
}

}  // namespace

uint32_t measure_task(const QuantizeTask& task) {
  const QuantizeJob& job = *task.job;
  uint32_t largest = 0;
  for (int64_t r = task.r0; r < task.r1; ++r) {
    const void* x = element(job, r, task.c0);
    const int64_t n = task.c1 - task.c0;
    largest = std::max(largest, loops::amax(job.dtype, x, n));
  }
  return largest;
}

uint32_t measure_rotated_task(const QuantizeTask& task) {
  Strip strip;
  return for_panels(task, task.c0, task.c1, [&](const Panel& panel) {
    uint32_t largest = 0;
    for (int64_t r = 0; r < panel.rows; r += 16) {
      const Rows x = strip.load(*task.job, panel, r, 16);
      largest = std::max(largest, loops::rotated_amax(x, task.job->spec.rht_signs));
    }
    return largest;
  });
}

uint32_t cast_task(const QuantizeTask& task) {
  const QuantizeJob& job = *task.job;
  if (job.spec.row_scaled) return cast_row_scaled(task);
  const bool row_alone = job.want_row && !job.want_col;
  if (is_tile(job.spec.format) || (job.shares_codes() && !row_alone)) {
    const Direction first = job.want_row ? Direction::kRow : Direction::kCol;
    Caster cast(job, Direction::kRow, rule_of(job, first));
    // any number will do, since the scale is that of the tensor
    if (!is_tile(job.spec.format)) cast.block = 32;
    return for_panels(task, task.c0, task.c1,
                      [&](const Panel& panel) { return cast_shared(cast, panel); });
  }
  const Caster row(job, Direction::kRow, rule_of(job, Direction::kRow));
  const Caster col(job, Direction::kCol, rule_of(job, Direction::kCol));
  // Rows are taken in parts, so that the panels of the col direction find them in the cache.
  const int64_t part = row_alone ? task.c1 - task.c0 : kSegment;
  uint32_t largest = 0;
  for (int64_t c0 = task.c0; c0 < task.c1; c0 += part) {
    const int64_t c1 = std::min(task.c1, c0 + part);
    for (int64_t r = task.r0; job.want_row && r < task.r1; ++r) {
      largest = std::max(largest, cast_row(row, r, c0, c1));
    }
    if (!job.want_col) continue;
    largest = std::max(largest, for_panels(task, c0, c1, [&](const Panel& panel) {
                         return cast_columns(col, panel);
                       }));
  }
  return largest;
}

}  // namespace moiety::quant
