// Rows in segments of 1024 elements; columns and tiles in panels of 128 x 128, a row of blocks at a
// time. Ragged blocks are filled up with zeros, and their codes cleared.
#include <algorithm>
#include <bit>
#include <cstring>

#include "moiety/formats/e5m2.h"
#include "moiety/quant/quantize_loops.h"
#include "moiety/quant/quantize_task.h"
#include "moiety/quant/random_bytes.h"

namespace moiety::quant {
namespace {

using loops::kPanel;
constexpr int64_t kSegment = 1024;

int64_t up(int64_t n, int64_t block) { return (n + block - 1) / block * block; }

const void* element(const QuantizeJob& job, int64_t r, int64_t c) {
  return static_cast<const std::byte*>(job.x) + byte_size(job.dtype, r * job.stride + c);
}

// From the amax of blocks to their scales.
struct Rule {
  Format format;
  bool e5m2;
  float amax_floor;
  bool pow2;
  Nvfp4TensorScale nvfp4{};
  float tensor_encode = 1;  // kFp8Tensor

  static Rule of(const QuantizeJob& job, float amax) {
    const QuantSpec& spec = job.spec;
    Rule rule{spec.format, spec.element == DType::kE5M2, spec.amax_floor, spec.pow2_scales};
    if (is_fp4(spec.format)) rule.nvfp4 = nvfp4_tensor_scale(amax);
    if (spec.format == Format::kFp8Tensor) {
      rule.tensor_encode = job.delayed_scale
                               ? *job.delayed_scale
                               : fp8_scale(amax, rule.fp8_max(), rule.amax_floor, rule.pow2).encode;
    }
    return rule;
  }
  float fp8_max() const { return e5m2 ? E5M2::kMax : E4M3::kMax; }
  int64_t stored_bytes() const {
    return format == Format::kFp8Tensor ? 0 : is_fp8_block(format) ? 4 : 1;
  }
  void apply(const uint32_t* amax, int64_t n, float* factor, uint8_t* stored) const {
    if (is_fp8_block(format)) {
      loops::fp8_scales(amax, n, fp8_max(), amax_floor, pow2, factor,
                        reinterpret_cast<float*>(stored));
    } else if (is_mxfp8(format)) {
      loops::mxfp8_scales(amax, n, e5m2, factor, stored);
    } else if (is_fp4(format)) {
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

// One direction of a job, as the functions below need it.
struct Caster {
  const QuantizeJob& job;
  Rule rule;
  loops::Encode encode, encode_floats;
  bool fp4, stochastic;
  int block;  // elements along the direction that share a scale
  BlockPosition position;
  RandomStream stream{};

  Caster(const QuantizeJob& job, Direction direction, const Rule& rule)
      : job(job),
        rule(rule),
        encode(loops::encode(job.dtype, job.spec.element, job.stochastic())),
        encode_floats(loops::encode(DType::kFloat32, job.spec.element, job.stochastic())),
        fp4(is_fp4(job.spec.format)),
        stochastic(job.stochastic()),
        block(job.spec.format == Format::kFp8Tensor ? 128 : block_shape(job.spec.format).cols),
        position(job.position(direction)) {
    if (stochastic) stream = job.random_stream(direction);
  }
};

// Columns [c0, c1) of row r.
uint32_t cast_row(const Caster& cast, int64_t r, int64_t c0, int64_t c1) {
  alignas(64) float factor[kSegment / 16], spread[kSegment];
  alignas(64) std::byte copy[kSegment * sizeof(float)];
  alignas(64) uint32_t amax[kSegment / 16];
  alignas(64) uint8_t codes[kSegment], random[kSegment], stored[kSegment / 16];
  const QuantizeJob& job = cast.job;
  const int64_t width = cast.rule.stored_bytes();
  uint32_t largest = 0;
  for (int64_t c = c0; c < c1; c += kSegment) {
    const int64_t n = std::min(kSegment, c1 - c), padded = up(n, cast.block);
    const int64_t blocks = padded / cast.block;
    const void* x = element(job, r, c);
    if (n < padded) {
      const auto bytes = static_cast<size_t>(byte_size(job.dtype, n));
      std::memcpy(copy, x, bytes);
      std::memset(copy + bytes, 0, static_cast<size_t>(byte_size(job.dtype, padded)) - bytes);
      x = copy;
    }
    if (job.dtype == DType::kBFloat16) {
      loops::block_amax(static_cast<const bf16*>(x), cast.block, blocks, amax);
    } else {
      loops::block_amax(static_cast<const float*>(x), cast.block, blocks, amax);
    }
    largest = std::max(largest, loops::largest(amax, blocks));
    cast.rule.apply(amax, blocks, factor, stored);
    loops::spread(factor, cast.block, blocks, spread);
    if (cast.stochastic) {
      random_bytes(cast.stream, cast.position.block(r, c / 16), up(n, 16) / 16, random);
    }
    cast.encode(x, spread, random, n, codes);
    if (width) {
      std::memcpy(static_cast<uint8_t*>(job.row.scales) +
                      (r * job.row.scale_pitch + c / cast.block) * width,
                  stored, static_cast<size_t>(blocks * width));
    }
    uint8_t* out = job.row.data + r * job.row.pitch;
    if (cast.fp4) {
      std::fill(codes + n, codes + padded, uint8_t{0});
      loops::pack_pairs(codes, padded, out + c / 2);
    } else {
      std::memcpy(out + c, codes, static_cast<size_t>(n));
    }
  }
  return largest;
}

// A part of X of up to 128 rows and columns.
struct Panel {
  int64_t r0, c0, rows, cols;
};
struct alignas(64) PanelBytes {
  uint8_t at[kPanel * kPanel];
  uint8_t* row(int64_t r) { return at + r * kPanel; }
};

// Rows of a panel, where they are in X or, filled up with zeros or rotated, as float32 in `copy`.
struct Strip {
  const void* x;
  int64_t pitch;  // bytes
  int64_t rows;
  bool in_place;
  alignas(64) float copy[kPanel][kPanel];

  // `count` rows from row r of the panel on.
  void load(const QuantizeJob& job, const Panel& panel, int64_t r, int64_t count, bool rotate) {
    rows = count;
    in_place = !rotate && panel.cols == kPanel && r + count <= panel.rows;
    if (in_place) {
      x = element(job, panel.r0 + r, panel.c0);
      pitch = byte_size(job.dtype, job.stride);
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t n = r + i < panel.rows ? panel.cols : 0;
      const void* from = element(job, panel.r0 + r + i, panel.c0);
      if (n > 0 && job.dtype == DType::kBFloat16) {
        loops::widen(static_cast<const bf16*>(from), n, copy[i]);
      } else if (n > 0) {
        std::memcpy(copy[i], from, static_cast<size_t>(n) * sizeof(float));
      }
      std::fill(copy[i] + n, copy[i] + kPanel, 0.0f);
    }
    if (rotate) loops::rotate(*reinterpret_cast<float(*)[16][kPanel]>(copy), job.spec.rht_signs);
    x = copy;
    pitch = sizeof copy[0];
  }
  void column_amax(const QuantizeJob& job, uint32_t* out) const {
    if (in_place && job.dtype == DType::kBFloat16) {
      loops::column_amax(static_cast<const bf16*>(x), job.stride, rows, out);
    } else {
      loops::column_amax(static_cast<const float*>(x), in_place ? job.stride : kPanel, rows, out);
    }
  }
  // Codes [rows, 128] of columns that have a factor each.
  void encode(const Caster& cast, const float* factor, const uint8_t* random,
              uint8_t* codes) const {
    const loops::Encode run = in_place ? cast.encode : cast.encode_floats;
    for (int64_t i = 0; i < rows; ++i) {
      run(static_cast<const std::byte*>(x) + i * pitch, factor, random + i * kPanel, kPanel,
          codes + i * kPanel);
    }
  }
};

// Codes [rows, 128] as the rows of X transposed.
void store_transposed(const Caster& cast, const Panel& panel, PanelBytes& codes, int64_t rows) {
  const QuantizeJob& job = cast.job;
  int64_t bytes = rows;
  if (cast.fp4) {
    bytes = rows / 2;
    // In place: row i comes from rows 2i and 2i + 1.
    PanelBytes packed;
    for (int64_t i = 0; i < bytes; ++i) {
      loops::pack_rows(codes.row(2 * i), codes.row(2 * i + 1), packed.row(i));
    }
    std::memcpy(codes.at, packed.at, static_cast<size_t>(bytes * kPanel));
  }
  uint8_t* out = job.col.data + panel.c0 * job.col.pitch + (cast.fp4 ? panel.r0 / 2 : panel.r0);
  if (bytes % 16 == 0 && panel.cols == kPanel) {
    loops::transpose(codes.at, kPanel, bytes, kPanel, out, job.col.pitch);
    return;
  }
  PanelBytes turned;
  loops::transpose(codes.at, kPanel, up(bytes, 16), kPanel, turned.at, kPanel);
  for (int64_t c = 0; c < panel.cols; ++c) {
    std::memcpy(out + c * job.col.pitch, turned.row(c), static_cast<size_t>(bytes));
  }
}

// Random bytes of a panel, by row of X; `turned`: those of the rows of X transposed.
void panel_random(const Caster& cast, const Panel& panel, bool turned, PanelBytes& out) {
  if (!turned) {
    for (int64_t r = 0; r < panel.rows; ++r) {
      random_bytes(cast.stream, cast.position.block(panel.r0 + r, panel.c0 / 16),
                   up(panel.cols, 16) / 16, out.row(r));
    }
    return;
  }
  PanelBytes columns;
  for (int64_t c = 0; c < panel.cols; ++c) {
    random_bytes(cast.stream, cast.position.block(panel.c0 + c, panel.r0 / 16),
                 up(panel.rows, 16) / 16, columns.row(c));
  }
  loops::transpose(columns.at, kPanel, kPanel, kPanel, out.at, kPanel);
}

void store_column_scales(const Caster& cast, const Panel& panel, int64_t r, const uint8_t* stored) {
  const QuantizeJob& job = cast.job;
  const int64_t block = (panel.r0 + r) / cast.block, pitch = job.col.scale_pitch;
  if (job.spec.format == Format::kMxfp8) {
    std::memcpy(static_cast<uint8_t*>(job.col.scales) + block * pitch + panel.c0, stored,
                static_cast<size_t>(panel.cols));
  } else if (is_fp8_block(job.spec.format)) {
    const float* from = reinterpret_cast<const float*>(stored);
    float* out = static_cast<float*>(job.col.scales) + panel.c0 * pitch + block;
    for (int64_t c = 0; c < panel.cols; ++c) out[c * pitch] = from[c];
  } else {
    uint8_t* out = static_cast<uint8_t*>(job.col.scales) + panel.c0 * pitch + block;
    for (int64_t c = 0; c < panel.cols; ++c) out[c * pitch] = stored[c];
  }
}

// The col direction of a one-dimensional format.
uint32_t cast_columns(const Caster& cast, const Panel& panel) {
  const QuantizeJob& job = cast.job;
  const bool rotated = job.spec.rht_col;
  Strip strip;
  alignas(64) float factor[kPanel];
  alignas(64) uint32_t amax[kPanel];
  alignas(64) uint8_t stored[kPanel * sizeof(float)];
  PanelBytes codes, random;
  if (cast.stochastic) panel_random(cast, panel, true, random);
  uint32_t largest = 0;
  for (int64_t r = 0; r < panel.rows; r += cast.block) {
    strip.load(job, panel, r, cast.block, rotated);
    strip.column_amax(job, amax);
    largest = std::max(largest, loops::largest(amax, kPanel));
    cast.rule.apply(amax, kPanel, factor, stored);
    store_column_scales(cast, panel, r, stored);
    strip.encode(cast, factor, random.row(r), codes.row(r));
  }
  if (job.spec.format == Format::kMxfp8) {
    for (int64_t r = 0; r < panel.rows; ++r) {
      std::memcpy(job.col.data + (panel.r0 + r) * job.col.pitch + panel.c0, codes.row(r),
                  static_cast<size_t>(panel.cols));
    }
    return largest;
  }
  const int64_t rows = cast.fp4 ? up(panel.rows, 16) : panel.rows;
  if (!rotated) std::fill(codes.row(panel.rows), codes.row(rows), uint8_t{0});
  store_transposed(cast, panel, codes, rows);
  return largest;
}

// The factors of a row of tiles from the maxima of its columns; their scales are stored.
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
              static_cast<size_t>(up(panel.cols, cast.block) / cast.block * width));
}

// Codes that both directions have in common: of tiles, or with one scale for everything.
uint32_t cast_shared(const Caster& cast, const Panel& panel) {
  const QuantizeJob& job = cast.job;
  Strip strip;
  alignas(64) float factor[kPanel];
  alignas(64) uint32_t amax[kPanel];
  PanelBytes codes, random;
  if (cast.stochastic) panel_random(cast, panel, false, random);
  uint32_t largest = 0;
  for (int64_t r = 0; r < panel.rows; r += cast.block) {
    strip.load(job, panel, r, cast.block, false);
    strip.column_amax(job, amax);
    largest = std::max(largest, loops::largest(amax, kPanel));
    tile_factors(cast, panel, r, amax, factor);
    strip.encode(cast, factor, random.row(r), codes.row(r));
  }
  const int64_t rows = cast.fp4 ? up(panel.rows, 16) : panel.rows;
  for (int64_t r = 0; r < rows; ++r) {
    std::fill(codes.row(r) + (r < panel.rows ? panel.cols : 0), codes.row(r + 1), uint8_t{0});
  }
  for (int64_t r = 0; job.row.data && r < panel.rows; ++r) {
    uint8_t* out = job.row.data + (panel.r0 + r) * job.row.pitch;
    if (cast.fp4) {
      loops::pack_pairs(codes.row(r), up(panel.cols, 16), out + panel.c0 / 2);
    } else {
      std::memcpy(out + panel.c0, codes.row(r), static_cast<size_t>(panel.cols));
    }
  }
  if (job.col.data) store_transposed(cast, panel, codes, rows);
  return largest;
}

// body(panel) for the panels of columns [c0, c1).
template <class Body>
uint32_t for_panels(const QuantizeTask& task, int64_t c0, int64_t c1, Body&& body) {
  uint32_t largest = 0;
  for (int64_t c = c0; c < c1; c += kPanel) {
    const Panel panel{task.r0, c, task.r1 - task.r0, std::min(kPanel, c1 - c)};
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
    largest = std::max(largest, job.dtype == DType::kBFloat16
                                    ? loops::amax(static_cast<const bf16*>(x), n)
                                    : loops::amax(static_cast<const float*>(x), n));
  }
  return largest;
}

uint32_t measure_rotated_task(const QuantizeTask& task) {
  Strip strip;
  return for_panels(task, task.c0, task.c1, [&](const Panel& panel) {
    uint32_t largest = 0;
    for (int64_t r = 0; r < panel.rows; r += 16) {
      strip.load(*task.job, panel, r, 16, true);
      largest = std::max(largest, loops::amax(strip.copy[0], 16 * kPanel));
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
    if (!is_tile(job.spec.format)) cast.block = 32;  // any: the scale is that of the tensor
    return for_panels(task, task.c0, task.c1,
                      [&](const Panel& panel) { return cast_shared(cast, panel); });
  }
  const Caster row(job, Direction::kRow, rule_of(job, Direction::kRow));
  const Caster col(job, Direction::kCol, rule_of(job, Direction::kCol));
  // Rows in parts of 512 columns, so that the panels of the col direction find them in the cache.
  const int64_t part = row_alone ? task.c1 - task.c0 : 4 * kPanel;
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
