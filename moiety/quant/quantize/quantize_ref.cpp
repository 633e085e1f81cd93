// The scalar reference: block by block, in the terms of docs/spec/formats.md#scales.
#include <algorithm>
#include <bit>
#include <cstring>

#include "moiety/base/integer.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/e5m2.h"
#include "moiety/quant/hadamard.h"
#include "moiety/quant/quantize/ieee_scope.h"
#include "moiety/quant/quantize/quantize_job.h"
#include "moiety/quant/scale_math.h"

namespace moiety::quant {
namespace {

constexpr int64_t kMaxBlock = 128;

float larger(float a, float b) { return std::bit_cast<float>(std::max(abs_bits(a), abs_bits(b))); }

// X or, with its strides exchanged, X transposed.
struct Matrix {
  const void* data;
  DType dtype;
  int64_t rows, cols, row_stride, col_stride;

  float at(int64_t r, int64_t c) const {
    const int64_t i = r * row_stride + c * col_stride;
    return dtype == DType::kBFloat16 ? static_cast<float>(static_cast<const bf16*>(data)[i])
                                     : static_cast<const float*>(data)[i];
  }
};

Matrix matrix(const QuantizeJob& job, Direction direction) {
  if (direction == Direction::kRow) return {job.x, job.dtype, job.rows, job.cols, job.stride, 1};
  return {job.x, job.dtype, job.cols, job.rows, 1, job.stride};
}

// Loads sixteen elements of a column of X, those past its end +0.0, and rotates them.
void load_rotated(const Matrix& x, int64_t r, int64_t c, uint16_t signs, float (&out)[16]) {
  for (int64_t i = 0; i < 16; ++i) out[i] = c + i < x.cols ? bf16(x.at(r, c + i)) : bf16(0.0f);
  apply_rht(out, signs);
}

// The amax of rows [begin, end).
float measure(const Matrix& x, int64_t begin, int64_t end) {
  float amax = 0;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) amax = larger(amax, x.at(r, c));
  }
  return amax;
}

float measure_rotated(const Matrix& x, uint16_t signs) {
  float amax = 0;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; c += 16) {
      float y[16];
      load_rotated(x, r, c, signs, y);
      for (float v : y) amax = larger(amax, v);
    }
  }
  return amax;
}

uint8_t encode(const QuantSpec& spec, float x, uint8_t r8) {
  const bool stochastic = spec.rounding == Rounding::kStochastic;
  switch (spec.element) {
    case DType::kE2M1:
      return stochastic ? E2M1::encode_stochastic(x, r8) : E2M1::encode(x);
    case DType::kE5M2:
      return stochastic ? E5M2::encode_stochastic(x, r8) : E5M2::encode(x);
    default:
      return stochastic ? E4M3::encode_stochastic(x, r8) : E4M3::encode(x);
  }
}

// The random bytes of one direction; zeros if rounding needs none.
class RandomBytes {
 public:
  RandomBytes(const QuantizeJob& job, Direction direction)
      : on_(job.stochastic()), position_(job.position(direction)) {
    if (on_) stream_ = job.random_stream(direction);
  }
  // The block of elements [16 b, 16 b + 16) of row r.
  PhiloxBlock block(int64_t r, int64_t b) const {
    return on_ ? stream_.block(position_.block(r, b)) : PhiloxBlock{};
  }

 private:
  bool on_;
  BlockPosition position_;
  RandomStream stream_{};
};

// The number that scales of blocks depend on: the amax of the tensor, or a scale that was stored.
struct TensorScale {
  float amax = 0;
  Nvfp4TensorScale nvfp4{};
  Fp8Scale fp8{};
  float decode = 1;
};

TensorScale tensor_scale(const QuantizeJob& job, float amax) {
  TensorScale out;
  out.amax = amax;
  if (is_fp4(job.spec.format)) {
    out.nvfp4 = nvfp4_tensor_scale(amax);
    out.decode = out.nvfp4.decode;
  } else if (job.spec.format == Format::kFp8Tensor) {
    out.fp8 = job.delayed_scale ? Fp8Scale{*job.delayed_scale, *job.delayed_scale_inv}
                                : fp8_scale(amax, fp8_max_of(job.spec.element), job.spec.amax_floor,
                                            job.spec.pow2_scales);
    out.decode = out.fp8.decode;
  }
  return out;
}

// Stores scale number `i` of a block and returns the factor of its elements.
float store_scale(const QuantSpec& spec, const TensorScale& tensor, float amax, void* scales,
                  int64_t i) {
  if (spec.format == Format::kFp8Tensor) return tensor.fp8.encode;
  if (is_fp8_block(spec.format)) {
    const Fp8Scale s = fp8_scale(amax, fp8_max_of(spec.element), spec.amax_floor, spec.pow2_scales);
    static_cast<float*>(scales)[i] = s.decode;
    return s.encode;
  }
  if (is_mxfp8(spec.format)) {
    const uint8_t e =
        spec.element == DType::kE5M2 ? mxfp8_scale<E5M2>(amax) : mxfp8_scale<E4M3>(amax);
    static_cast<uint8_t*>(scales)[i] = e;
    return UE8M0::inverse(e);
  }
  const Nvfp4BlockScale s = nvfp4_block_scale(amax, tensor.nvfp4);
  static_cast<uint8_t*>(scales)[i] = s.code;
  return s.encode;
}

void store_code(const QuantSpec& spec, const QuantizeOutput& out, int64_t r, int64_t c,
                uint8_t code) {
  if (!out.data) return;
  if (!is_fp4(spec.format)) {
    out.data[r * out.pitch + c] = code;
    return;
  }
  uint8_t& byte = out.data[r * out.pitch + c / 2];
  byte = c % 2 ? E2M1::pack(byte & 15, code) : E2M1::pack(code, byte >> 4);
}

// Casts row r of X (of X transposed for col), block by block, in formats whose blocks are
// one-dimensional. Returns the largest amax of its blocks.
float cast_row(const QuantizeJob& job, Direction direction, const TensorScale& tensor, int64_t r) {
  const QuantSpec& spec = job.spec;
  const bool col = direction == Direction::kCol;
  const bool rotate = col && spec.rht_col;
  const Matrix x = matrix(job, direction);
  const QuantizeOutput& out = col ? job.col : job.row;
  const RandomBytes random(job, direction);
  const int64_t block = block_shape(spec.format).cols;
  float largest = 0;
  for (int64_t c0 = 0; c0 < x.cols; c0 += block) {
    const int64_t n = rotate ? 16 : std::min(block, x.cols - c0);
    float value[kMaxBlock] = {};
    if (rotate) {
      load_rotated(x, r, c0, spec.rht_signs, *reinterpret_cast<float(*)[16]>(value));
    } else {
      for (int64_t i = 0; i < n; ++i) value[i] = x.at(r, c0 + i);
    }
    float amax = 0;
    for (int64_t i = 0; i < n; ++i) amax = larger(amax, value[i]);
    largest = larger(largest, amax);
    // MXFP8 keeps its col arrays in the order of X.
    const bool transposed = !(col && spec.format == Format::kMxfp8);
    const int64_t b = c0 / block;
    const float factor =
        store_scale(spec, tensor, amax, out.scales,
                    transposed ? r * out.scale_pitch + b : b * out.scale_pitch + r);
    PhiloxBlock bits{};
    for (int64_t i = 0; i < n; ++i) {
      if (i % 16 == 0) bits = random.block(r, (c0 + i) / 16);
      const uint8_t code = encode(spec, value[i] * factor, random_byte(bits, i % 16));
      transposed ? store_code(spec, out, r, c0 + i, code) : store_code(spec, out, c0 + i, r, code);
    }
  }
  return largest;
}

// Casts one tile or, with one scale for everything, the tensor, for both directions.
float cast_tile(const QuantizeJob& job, const TensorScale& tensor, int64_t r0, int64_t c0,
                BlockShape tile) {
  const Matrix x = matrix(job, Direction::kRow);
  const RandomBytes random(job, Direction::kRow);
  const int64_t r1 = tile.rows ? std::min(x.rows, r0 + tile.rows) : x.rows;
  const int64_t c1 = tile.cols ? std::min(x.cols, c0 + tile.cols) : x.cols;
  float amax = 0;
  for (int64_t r = r0; r < r1; ++r) {
    for (int64_t c = c0; c < c1; ++c) amax = larger(amax, x.at(r, c));
  }
  const int64_t index = tile.rows ? r0 / tile.rows * job.row.scale_pitch + c0 / tile.cols : 0;
  const float factor = store_scale(job.spec, tensor, amax, job.row.scales, index);
  for (int64_t r = r0; r < r1; ++r) {
    PhiloxBlock bits{};
    for (int64_t c = c0; c < c1; ++c) {
      if (c % 16 == 0) bits = random.block(r, c / 16);
      const uint8_t code = encode(job.spec, x.at(r, c) * factor, random_byte(bits, c % 16));
      store_code(job.spec, job.row, r, c, code);
      store_code(job.spec, job.col, c, r, code);
    }
  }
  return amax;
}

// Clears bytes of data and scales that no element determines: pad nibbles, and rows past the end
// that the col arrays of a group have.
void clear_pads(const QuantizeJob& job) {
  const bool fp4 = is_fp4(job.spec.format);
  if (job.row.data && fp4) {
    for (int64_t r = 0; r < job.rows; ++r) {
      std::memset(job.row.data + r * job.row.pitch, 0, 8 * ceil_div(job.cols, 16));
    }
  }
  if (!job.col.data) return;
  if (job.spec.format == Format::kMxfp8) {
    for (int64_t r = job.rows; r < job.padded_rows; ++r) {
      std::memset(job.col.data + r * job.col.pitch, 0, job.cols);
    }
    for (int64_t b = ceil_div(job.rows, 32); b < ceil_div(job.padded_rows, 32); ++b) {
      std::memset(static_cast<uint8_t*>(job.col.scales) + b * job.col.scale_pitch, 0, job.cols);
    }
    return;
  }
  for (int64_t c = 0; c < job.cols; ++c) {
    std::memset(job.col.data + c * job.col.pitch, 0,
                fp4 ? 8 * ceil_div(job.padded_rows, 16) : job.padded_rows);
    if (job.spec.format != Format::kNvfp4) continue;
    const int64_t used = ceil_div(job.rows, 16);
    std::memset(static_cast<uint8_t*>(job.col.scales) + c * job.col.scale_pitch + used, 0,
                ceil_div(job.padded_rows, 16) - used);
  }
}

void measure_job(const QuantizeJob& job) {
  const Matrix x = matrix(job, Direction::kRow);
  if (job.spec.row_scaled) {
    for (int64_t r = 0; r < job.rows; ++r) job.amax[0][r] = measure(x, r, r + 1);
    return;
  }
  const float amax = measure(x, 0, x.rows);
  if (job.want_row) *job.amax[0] = amax;
  if (!job.want_col) return;
  *job.amax[1] =
      job.spec.rht_col ? measure_rotated(matrix(job, Direction::kCol), job.spec.rht_signs) : amax;
}

// The casts return the largest amax that they met, of the tensor or of a block.
float cast_row_scaled(const QuantizeJob& job) {
  float largest = 0;
  for (int64_t r = 0; r < job.rows; ++r) {
    const TensorScale tensor = tensor_scale(job, job.amax[0][r]);
    job.tensor_scale[0][r] = tensor.decode;
    largest = larger(larger(largest, tensor.amax), cast_row(job, Direction::kRow, tensor, r));
  }
  return largest;
}

float cast_shared(const QuantizeJob& job, const TensorScale& tensor) {
  const BlockShape tile = block_shape(job.spec.format);
  float largest = 0;
  for (int64_t r = 0; r < job.rows; r += tile.rows ? tile.rows : job.rows) {
    for (int64_t c = 0; c < job.cols; c += tile.cols ? tile.cols : job.cols) {
      largest = larger(largest, cast_tile(job, tensor, r, c, tile));
    }
  }
  return largest;
}

float cast(const QuantizeJob& job) {
  const bool uses_amax = job.amax[0] && !job.delayed_scale;
  float largest = 0;
  for (const Direction d : {Direction::kRow, Direction::kCol}) {
    const int i = d == Direction::kCol;
    if (!(i == 0 ? job.want_row : job.want_col)) continue;
    const TensorScale tensor = tensor_scale(job, uses_amax ? *job.amax[job.amax_index(d)] : 0);
    largest = larger(largest, tensor.amax);
    if (!job.shares_codes()) {
      for (int64_t r = 0; r < (i == 0 ? job.rows : job.cols); ++r) {
        largest = larger(largest, cast_row(job, d, tensor, r));
      }
    } else if (d == Direction::kRow || !job.want_row) {
      largest = larger(largest, cast_shared(job, tensor));
    }
    if (job.tensor_scale[i]) *job.tensor_scale[i] = tensor.decode;
    if (job.amax[i]) *job.amax[i] = job.delayed_scale ? largest : tensor.amax;
  }
  if (job.delayed_scale) *job.step_amax = larger(*job.step_amax, largest);
  return largest;
}

}  // namespace

void measure_reference(const QuantizeJob& job) {
  const IeeeScope scope;
  if (!job.skipped()) measure_job(job);
}

void quantize_reference(const QuantizeJob& job) {
  const IeeeScope scope;
  if (job.skipped()) return;
  clear_pads(job);
  if (job.measures_first()) measure_job(job);
  const float largest = job.spec.row_scaled ? cast_row_scaled(job) : cast(job);
  if (job.flags && !is_finite(largest)) *job.flags |= kFlagNonFinite;
}

}  // namespace moiety::quant
