// The table of cases of quantization, for tests and benchmarks of every device: shapes, data,
// specs; and outputs between guard bytes.
#pragma once

#include <bit>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"
#include "moiety/quant/quantize.h"
#include "tests/support/bits.h"
#include "tests/support/error_of.h"

namespace moiety::quant {

// The full product of the table, which takes minutes, is run if MOIETY_FULL_TESTS is set.
inline bool full_tests() { return std::getenv("MOIETY_FULL_TESTS") != nullptr; }

struct Shape {
  int64_t rows, cols;
};
inline std::string name(const Shape& s) {
  return std::to_string(s.rows) + "x" + std::to_string(s.cols);
}
inline std::vector<Shape> small_shapes() {
  return {{1, 1},     {1, 16},   {16, 16},  {17, 33},   {15, 16},   {31, 32},
          {32, 31},   {48, 112}, {64, 80},  {127, 129}, {129, 255}, {256, 272},
          {304, 304}, {1, 7168}, {7168, 1}, {0, 40},    {40, 0},    {0, 0}};
}
inline std::vector<Shape> large_shapes() { return {{2048, 5120}, {4096, 13312}}; }

enum class Data {
  kNormal,
  kAllZero,
  kMinusZero,
  kOneNonzero,
  kConstant,
  kFltMax,
  kSubnormalAmax,
  kAmaxBelow8em36,
  kBlockUnderflowsE4m3,
  kOneNan,
  kOneInf,
  kHugeAndTiny,
  kExactTies,
  kRandomBits,
};
inline constexpr Data kAllData[] = {
    Data::kNormal,        Data::kAllZero,        Data::kMinusZero,
    Data::kOneNonzero,    Data::kConstant,       Data::kFltMax,
    Data::kSubnormalAmax, Data::kAmaxBelow8em36, Data::kBlockUnderflowsE4m3,
    Data::kOneNan,        Data::kOneInf,         Data::kHugeAndTiny,
    Data::kExactTies,     Data::kRandomBits};
inline const char* name(Data data) {
  constexpr const char* kNames[] = {"normal",         "all_zero",         "minus_zero",
                                    "one_nonzero",    "constant",         "flt_max",
                                    "subnormal_amax", "amax_below_8e-36", "block_underflows_e4m3",
                                    "one_nan",        "one_inf",          "huge_and_tiny",
                                    "exact_ties",     "random_bits"};
  return kNames[static_cast<int>(data)];
}

// Nearly normal: four bytes, and the low bits of a product so that mantissas are full.
inline float bell(uint32_t word) {
  const uint32_t sum = (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24);
  const float fraction = static_cast<float>(word * 2654435761u >> 8) * 0x1p-24f;
  return (static_cast<float>(sum) - 510.5f + fraction) / 147.8f;
}

// Element i of n, `word` random. Independent of the shape, but for the odd element out.
inline float element(Data data, int64_t i, int64_t n, uint32_t word) {
  const float normal = bell(word);
  const float sign = word & 1 ? -1.0f : 1.0f;
  const bool chosen = i == n / 3;
  switch (data) {
    case Data::kNormal:
      return normal;
    case Data::kAllZero:
      return 0.0f;
    case Data::kMinusZero:
      return -0.0f;
    case Data::kOneNonzero:
      return chosen ? -1.75f : 0.0f;
    case Data::kConstant:
      return 1.0f / 3;
    case Data::kFltMax:
      return sign * (word & 2 ? std::numeric_limits<float>::max() : 1e38f);
    case Data::kSubnormalAmax:
      return std::bit_cast<float>((word & 0x807F0000u) | (word & 0xFFFF));
    case Data::kAmaxBelow8em36:
      return normal * 2e-36f;
    case Data::kBlockUnderflowsE4m3:
      return i / 16 % 3 == 1 ? normal * 1e-6f : normal * 10;
    case Data::kOneNan:
      return chosen ? std::bit_cast<float>(0xFF900001u) : normal;
    case Data::kOneInf:
      return chosen ? -std::numeric_limits<float>::infinity() : normal;
    case Data::kHugeAndTiny:
      return word & 6 ? normal * 1e-30f : normal * 1e30f;
    case Data::kExactTies: {
      // Multiples of a sixteenth below 6, and 6 itself: midpoints of every format.
      const float tie = sign * static_cast<float>(word >> 8 & 127) / 16;
      return i % 16 == 3 || tie > 6 ? 6.0f : tie;
    }
    case Data::kRandomBits:
      return std::bit_cast<float>(word);
  }
  return 0;
}

// x is [rows, cols], float32 or bf16, any row stride.
inline void fill(const TensorView& x, Data data, uint32_t seed) {
  const PhiloxKey key = rng_key(seed, RngDomain::kInit);
  const int64_t rows = x.size(0), cols = x.size(1), n = rows * cols;
  PhiloxBlock words{};
  for (int64_t i = 0; i < n; ++i) {
    if (i % 4 == 0) {
      words = philox(key, {static_cast<uint32_t>(i / 4), static_cast<uint32_t>(data), 0, 0});
    }
    const float v = element(data, i, n, words[static_cast<size_t>(i % 4)]);
    const int64_t at = i / cols * x.stride(0) + i % cols;
    if (x.dtype() == DType::kFloat32) {
      x.data<float>()[at] = v;
    } else {
      // The upper half, so that NaN payloads stay.
      const bool nan = v != v;
      x.data<bf16>()[at] =
          nan ? bf16::from_bits(static_cast<uint16_t>(std::bit_cast<uint32_t>(v) >> 16 | 1))
              : bf16(v);
    }
  }
}

// An input with a row stride that is larger than its columns if `gap` > 0; gaps hold NaN.
class Input {
 public:
  Input(DType dtype, Shape shape, Data data, int64_t gap = 0, uint32_t seed = 1)
      : memory_(dtype, {shape.rows, shape.cols + gap}) {
    if (memory_.view().bytes() > 0) {
      std::memset(memory_.view().raw(), 0xFF, static_cast<size_t>(memory_.view().bytes()));
    }
    view_ = memory_.view().slice(1, 0, shape.cols);
    fill(view_, data, seed);
  }
  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }

 private:
  Tensor memory_;
  TensorView view_;
};

struct SpecCase {
  std::string name;
  QuantSpec spec;
};
inline void PrintTo(const SpecCase& c, std::ostream* out) { *out << c.name; }

// Every format with every option that changes bits.
inline std::vector<SpecCase> spec_cases() {
  std::vector<SpecCase> out;
  const auto add = [&](std::string name, QuantSpec spec) {
    out.push_back({name, spec});
    spec.rounding = Rounding::kStochastic;
    out.push_back({name + "_sr", spec});
  };
  for (int f = 0; f <= static_cast<int>(Format::kNvfp4Tile16); ++f) {
    const Format format = static_cast<Format>(f);
    QuantSpec spec = QuantSpec::of(format);
    add(name(format), spec);
    if (format == Format::kNvfp4) {
      spec.row_scaled = true;
      add("nvfp4_row_scaled", spec);
      spec.row_scaled = false;
      spec.rht_col = true;
      add("nvfp4_rht", spec);
      spec.rht_signs = 0x1234;
      out.push_back({"nvfp4_rht_1234", spec});
    }
    if (is_fp4(format)) continue;
    spec.element = DType::kE5M2;
    add(std::string(name(format)) + "_e5m2", spec);
    if (is_mxfp8(format)) continue;
    spec.pow2_scales = !spec.pow2_scales;
    spec.amax_floor = 0.01f;
    add(std::string(name(format)) + "_pow2_floor", spec);
    spec.element = DType::kE4M3;
    out.push_back({std::string(name(format)) + "_other_pow2", spec});
  }
  return out;
}

// Arrays of a quantized tensor with poison in and guard bytes around each of them.
class Guarded {
 public:
  static constexpr int64_t kGuard = 64;

  Guarded(const QuantSpec& spec, int64_t rows, int64_t cols, Directions wanted,
          uint8_t poison = 0xA5)
      : Guarded(spec, rows, cols, quantized_sizes(spec, rows, cols, wanted), 1, poison) {}
  Guarded(const QuantSpec& spec, int64_t rows, int64_t cols, const QuantizedSizes& sizes,
          int64_t flags, uint8_t poison = 0xA5)
      : poison_(poison) {
    view_.spec = spec;
    view_.rows = rows;
    view_.cols = cols;
    view_.row_data = place(sizes.row_data);
    view_.row_scales = place(sizes.row_scales);
    view_.col_data = place(sizes.col_data);
    view_.col_scales = place(sizes.col_scales);
    view_.amax = place(sizes.amax);
    view_.tensor_scale = place(sizes.tensor_scale);
    view_.flags = place({DType::kUInt32, 1, {flags, 0}});
    if (flags > 0) std::memset(view_.flags.raw(), 0, static_cast<size_t>(view_.flags.bytes()));
  }
  const QuantizedView& view() const { return view_; }
  operator const QuantizedView&() const { return view_; }
  uint32_t flag(int64_t i = 0) const { return view_.flags.data<uint32_t>()[i]; }

  // Nothing was written outside of the arrays.
  bool guards_intact() const {
    for (const Part& part : parts_) {
      for (int64_t i = 0; i < part.buffer.bytes(); ++i) {
        const bool guard = i < kGuard || i >= kGuard + part.bytes;
        if (guard && part.buffer.data()[i] != std::byte{poison_}) return false;
      }
    }
    return true;
  }

 private:
  struct Part {
    Buffer buffer;
    int64_t bytes;
  };
  TensorView place(const ArraySpec& a) {
    if (a.dims == 0) return {};
    parts_.push_back({Buffer(a.bytes() + 2 * kGuard), a.bytes()});
    Buffer& buffer = parts_.back().buffer;
    std::memset(buffer.data(), poison_, static_cast<size_t>(buffer.bytes()));
    return {buffer.data() + kGuard, a.dtype,
            std::span(a.sizes.data(), static_cast<size_t>(a.dims))};
  }

  uint8_t poison_;
  std::vector<Part> parts_;
  QuantizedView view_;
};

// Empty if all arrays are the same, those that are not there too.
inline std::string difference(const QuantizedView& a, const QuantizedView& b) {
  return difference("row_data", a.row_data, b.row_data) +
         difference("row_scales", a.row_scales, b.row_scales) +
         difference("col_data", a.col_data, b.col_data) +
         difference("col_scales", a.col_scales, b.col_scales) + difference("amax", a.amax, b.amax) +
         difference("tensor_scale", a.tensor_scale, b.tensor_scale) +
         difference("flags", a.flags, b.flags);
}

inline constexpr RngState kTestRng{0x0123456789ABCDEFu, 3};
inline QuantizeOptions test_options() {
  QuantizeOptions options;
  options.rng = &kTestRng;
  options.tensor_id = 7;
  return options;
}

inline std::vector<Directions> directions_of(const QuantSpec& spec) {
  if (spec.row_scaled) return {{true, false}};
  return {{true, true}, {true, false}, {false, true}};
}

}  // namespace moiety::quant
